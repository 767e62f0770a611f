"""Runs every kernel of the codecs once or more, on values that reach their edges. A program, for compute-sanitizer."""

from __future__ import annotations

import os
from typing import Any

import torch

from zcomm import _core, codec

DEVICE = os.environ.get("TESTS_GPU_DEVICE", "cuda")
NUM = 9001
FORMATS = ("int8:32", "int8:96", "int8:256", "int8:4064", "int4:64", "int4:128", "int4:2048", "bf16", "exact")
FORMATS += (
    "int8:96:stochastic",
    "int4:128:stochastic",
    "fp8:4064",
    "eden2:128",
    "eden3:64",
    "eden4:512",
)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def empty_wire(format: str, dtype: str) -> torch.Tensor:
    return torch.empty(codec.wire_bytes(format, dtype, NUM), dtype=torch.uint8, device=DEVICE)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE, copy=True)


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Before and after an update, the same in each call: most tiles are coded, one is frozen, one sent as it is."""
    generator = torch.Generator().manual_seed(0)
    before = (torch.randn(NUM, generator=generator) * 0.02).to(dtype)
    after = (before.float() + 1e-4 * torch.randn(NUM, generator=generator)).to(dtype)
    after[:2048] = before[:2048]
    after[2048:4096].view(torch.int16).random_(-(2**15), 2**15, generator=generator)
    return before, after


class Difference:
    """The memory of one difference on the GPU, and the jobs over it. Values are not aligned. ``generation``: of the
    base; 0: whole values."""

    def __init__(self, dtype: torch.dtype, generation: int) -> None:
        before, after = weights(dtype)
        self.base, self.values = (on_device(torch.cat([each[:3], each]))[3:] for each in (before, after))
        self.message = torch.empty(64 + _core.max_lossless_bytes(NUM), dtype=torch.uint8, device=DEVICE)
        hash = _core.hash_of_values(codec.view_of(before, "before")) if generation else 0
        self.hash = on_device(torch.tensor([hash - (hash >> 63 << 64)]))
        self.num_bytes, self.status = (on_device(torch.zeros(1, dtype=torch.int64)) for _ in range(2))
        self.generation = generation

    def encode(self, is_sent: bool = True) -> tuple[Any, ...]:
        message, num_bytes = (self.message.data_ptr(), self.num_bytes.data_ptr()) if is_sent else (0, 0)
        return view(self.values), view(self.base), self.generation, message, self.hash.data_ptr(), num_bytes

    def decode(self, message: torch.Tensor) -> tuple[Any, ...]:
        places = (self.hash.data_ptr(), self.status.data_ptr())
        return message.data_ptr(), message.numel(), view(self.base), self.generation, *places

    def check(self) -> tuple[Any, ...]:
        return view(self.base), self.hash.data_ptr(), self.status.data_ptr()

    def holds_the_values(self) -> bool:
        bits = (each.cpu().view(torch.int16) for each in (self.base, self.values))
        return int(self.status) == 0 and torch.equal(*bits)


def view(values: torch.Tensor) -> tuple[int, int, str]:
    return values.data_ptr(), values.numel(), name_of(values.dtype)


def run_lossless() -> None:
    """The kernels of lossless differences, which only a GPU has."""
    kinds = [(dtype, generation) for dtype in (torch.bfloat16, torch.float16) for generation in (0, 1)]
    senders, unsent = [Difference(*kind) for kind in kinds], Difference(torch.bfloat16, 1)
    _core.encode_lossless_on_device([*(sender.encode() for sender in senders), unsent.encode(is_sent=False)])
    _core.synchronize(0)
    assert all(sender.holds_the_values() for sender in (*senders, unsent))
    written = [sender.message[: int(sender.num_bytes)] for sender in senders]
    arrived = [on_device(message) for message in written]  # with nothing behind their ends
    damaged = [on_device(message) for message in written]
    for message in damaged:
        message[-3000:].random_(0, 256)
    for messages, is_right in ((written, True), (arrived, True), (damaged, False)):
        receivers = [Difference(*kind) for kind in kinds]
        jobs = [receiver.decode(message) for receiver, message in zip(receivers, messages, strict=True)]
        _core.decode_lossless_on_device(jobs)
        _core.check_hashes_on_device([receiver.check() for receiver in receivers])
        _core.synchronize(0)
        for receiver in receivers:
            assert receiver.holds_the_values() if is_right else receiver.base.isnan().all()


def main() -> None:
    """Prints a line when it is through. Everything is on the GPU by copies of host memory, so that what was never
    written is what a kernel left out."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(NUM + 3).to(dtype).to(DEVICE)[3:]  # not aligned
        sums = []
        for format in FORMATS:
            wire = empty_wire(format, name_of(dtype))
            codec.encode(values, format, out=wire)
            out = torch.empty(NUM, dtype=dtype, device=DEVICE)
            codec.decode(wire, format, out)
            assert out.cpu().isfinite().all(), format
            sums.append((wire, format))
        total = torch.empty(NUM, dtype=dtype, device=DEVICE)
        codec.decode_sum(sums * 8, total, factor=0.5)  # more wires than a launch takes
        assert total.cpu().isfinite().all()
        for format in FORMATS:
            wire = empty_wire(format, "float32")
            codec.decode_sum_encode(sums, NUM, format, dtype=name_of(dtype), out=wire)
            out = torch.empty(NUM, dtype=torch.float32, device=DEVICE)
            codec.decode(wire, format, out)
            assert out.cpu().isfinite().all(), format
    if DEVICE == "cuda":
        run_lossless()
        torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
