"""Runs every kernel of the codec once or more, on values that reach their edges. A program, for compute-sanitizer."""

from __future__ import annotations

import os

import torch

from zcomm import codec

DEVICE = os.environ.get("ZCOMM_GPU_TESTS_DEVICE", "cuda")
NUM = 9001
FORMATS = ("int8:32", "int8:96", "int8:256", "int8:4064", "int4:64", "int4:128", "int4:2048", "bf16", "exact")
FORMATS += ("int6:96:stochastic", "int4:128:hadamard", "int2:32:hadamard:stochastic", "fp8:4064")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def empty_wire(format: str, dtype: str) -> torch.Tensor:
    return torch.empty(codec.wire_bytes(format, dtype, NUM), dtype=torch.uint8, device=DEVICE)


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
        torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
