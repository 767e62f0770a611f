"""The device that the tests in tests/gpu are on, by TESTS_GPU_DEVICE: "cuda", a GPU; "stand-in", a CUDA and an
NCCL that live on the host (see tests/cuda_host); "cpu", CPU tensors, which is a check of the tests themselves.

Of torch's operators the stand-in has those that make tensors. So a test that runs on both makes, copies and reads
tensors by what is here, and holds up a stream by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

KINDS = ("cuda", "stand-in", "cpu")
KIND = os.environ.get("TESTS_GPU_DEVICE", "cuda")
if KIND not in KINDS:
    raise ValueError(f"TESTS_GPU_DEVICE: expected one of {', '.join(KINDS)}, got {KIND!r}")
DEVICE = {"cuda": torch.device("cuda"), "stand-in": torch.device("cuda", 0), "cpu": torch.device("cpu")}[KIND]

LONG = 4_000_000_000  # cycles of a kernel that does nothing: two seconds or so, far more than the host needs
SHORT = 100_000_000


class TorchDevice:
    """A GPU, or the CPU as far as that goes."""

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in host memory."""
        return tensor.to(DEVICE, copy=True)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor holds once all streams are done."""
        self.synchronize()
        return self.now(tensor)

    def now(self, tensor: torch.Tensor) -> torch.Tensor:
        """What it holds, by the current stream alone."""
        return tensor.cpu()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On the current stream; ``source`` may be in host memory."""
        target.copy_(source)

    def synchronize(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    def new_stream(self) -> Any:
        return torch.cuda.Stream()

    def on(self, stream: Any) -> Any:
        """The context in which it is the current stream."""
        return torch.cuda.stream(stream)

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """The current stream does not go on before the end of this context: nothing in here may wait for it."""
        torch.cuda._sleep(LONG)
        end = torch.cuda.Event()
        end.record()
        yield
        assert not end.query(), "the host waited for the GPU"

    @contextlib.contextmanager
    def late(self) -> Iterator[None]:
        """The current stream is late."""
        torch.cuda._sleep(SHORT)
        yield

    def dawdle(self) -> None:
        """Streams of this rank get out of step with those of others."""
        torch.cuda._sleep(SHORT // 10)

    @contextlib.contextmanager
    def refused_capture(self) -> Iterator[None]:
        """What is called here raises, and leaves nothing to replay."""
        # Of this thread alone: others, such as watchdogs, ask CUDA things that a capture must not meet.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            yield

    def captured(self, calls: Callable[[], None]) -> Any:
        """A graph of ``calls``, which have been made before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                calls()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            calls()
        dist.barrier()
        return graph


class StandIn:
    """As above. The memory of its tensors is the host's."""

    def __init__(self) -> None:
        import cuda_host_torch

        self.host = cuda_host_torch
        self.kept: list[torch.Tensor] = []  # what streams may still read
        self.num_streams = 0

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host.as_cuda(tensor.clone())

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.synchronize()
        return self.now(tensor)

    def now(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).clone()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.kept.append(source)
        self.host.copy(target, source)

    def synchronize(self) -> None:
        self.host.synchronize()
        self.kept.clear()

    def new_stream(self) -> Any:
        self.num_streams += 1
        return self.num_streams

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.host.set_stream(stream)
        yield
        self.host.set_stream(0)

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        self.host.close_gate()  # who waits for it never returns
        yield
        self.host.open_gate()

    late = held_up

    def dawdle(self) -> None:
        self.host.set_delays(dist.get_rank() + 1, 200)

    @contextlib.contextmanager
    def refused_capture(self) -> Iterator[None]:
        self.host.set_stream(self.new_stream())
        self.host.begin_capture()
        try:
            yield
        finally:
            self.host.end_capture()

    def captured(self, calls: Callable[[], None]) -> Any:
        calls()
        self.synchronize()
        self.host.set_stream(self.new_stream())
        self.host.begin_capture()
        calls()
        return self.host.end_capture()


GPU = StandIn() if KIND == "stand-in" else TorchDevice()
