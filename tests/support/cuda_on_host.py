"""The stand-in for a GPU (see tests/cuda_host) in a process of its own: a core whose CUDA lives on the host, and, for
programs of bench/one_gpu, what they use of ``torch.cuda``, with tensors in host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BUILT = Path(__file__).parents[2] / "build" / "plain" / "cuda_host"


def replace_core() -> None:
    """For this process: the core that the modules load is replaced by one of the same name over a CUDA on the host.

    Raises RuntimeError if it is too late for that, or if the stand-in is not built."""
    if "zcomm" in sys.modules:
        raise RuntimeError("expected a process that has not imported zcomm, got one that has")
    if not (BUILT / "libzcomm_core.so").exists():
        raise RuntimeError(f"{BUILT} is not built: run 'make test-cuda-host'")
    sys.path.insert(0, str(BUILT))
    ctypes.CDLL(str(BUILT / "libzcomm_core.so"))  # before the modules ask for a library of this name
    os.environ["ZCOMM_NCCL_LIB"] = str(BUILT / "libnccl.so.2")


class Stream:
    """The default stream, whatever it is called."""

    cuda_stream = 0

    def __init__(self, priority: int = 0) -> None: ...

    def wait_event(self, event: Event) -> None: ...


class Event:
    """When the host was here, and the GPU done with all that it had."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        synchronize()
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1e3


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    yield


def synchronize() -> None:
    from zcomm import _core

    _core.synchronize(0)


def enter() -> None:
    """Replaces the core and torch.cuda in this process, for good. "cuda" as a device means host memory."""
    replace_core()
    import torch
    from torch.overrides import TorchFunctionMode

    class HostMemory(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = {**(kwargs or {})}
            if function is torch.device:  # by which a group has a backend for "cuda"
                return function(*args, **named)
            if str(named.get("device", "")).startswith("cuda"):
                named["device"] = "cpu"
            return function(*("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **named)

    HostMemory().__enter__()
    properties = SimpleNamespace(
        name="NVIDIA stand-in", total_memory=1 << 30, multi_processor_count=4, L2_cache_size=1 << 20, major=9, minor=0
    )
    replaced = {
        "Event": Event,
        "Stream": Stream,
        "stream": on,
        "current_stream": Stream,
        "synchronize": synchronize,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda: (1 << 29, 1 << 30),
        "memory_reserved": lambda: 0,
        "_sleep": lambda cycles: None,
    }
    for name, other in replaced.items():
        getattr(torch.cuda, name)  # which a GPU has, too
        setattr(torch.cuda, name, other)
    from zcomm_bench import gpu_clock

    gpu_clock.FLUSH_BYTES = 1 << 12
