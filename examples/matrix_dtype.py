"""Which dtype this CPU multiplies matrices in faster, of bfloat16 and float32.

A CPU without instructions for bfloat16 multiplies it ten to a hundred times slower than float32. What travels between
the ranks does not depend on it: weights are gathered as bfloat16 in either case.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

TOKENS, INPUTS, OUTPUTS = 128, 256, 1024  # of the product that is measured
REPEATS = 3


@dataclass(frozen=True)
class MatrixSpeed:
    """Speed of one thread in GFLOP/s, forward and backward."""

    bfloat16: float
    float32: float

    @property
    def faster(self) -> str:
        return "bfloat16" if self.bfloat16 > self.float32 else "float32"

    def __str__(self) -> str:
        return (
            f"one thread multiplies {self.bfloat16:.1f} GFLOP/s of bfloat16 and {self.float32:.1f} of float32: "
            f"the model multiplies in {self.faster}"
        )


def gflops(dtype: torch.dtype) -> float:
    """Measure one linear layer, forward and backward, by the best of a few runs."""
    x = torch.ones(TOKENS, INPUTS, dtype=dtype, requires_grad=True)
    weight = torch.ones(OUTPUTS, INPUTS, dtype=dtype, requires_grad=True)
    upstream = torch.ones(TOKENS, OUTPUTS, dtype=dtype)
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.thread_time()  # unlike the clock, independent of other programs
        F.linear(x, weight).backward(upstream)
        seconds.append(time.thread_time() - start)
    return 3 * 2 * TOKENS * INPUTS * OUTPUTS / min(seconds[1:]) / 1e9


def measure() -> MatrixSpeed:
    """Measure for up to two seconds with one thread, as the ranks of the examples have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return MatrixSpeed(gflops(torch.bfloat16), gflops(torch.float32))
    finally:
        torch.set_num_threads(threads)


class MultiplyAs(TorchFunctionMode):
    """Mode that computes matrix products of bfloat16 inputs in another dtype and returns bfloat16."""

    PRODUCTS = (F.linear, F.scaled_dot_product_attention, torch.matmul)

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.PRODUCTS or args[0].dtype != torch.bfloat16:
            return function(*args, **kwargs)

        def cast(value: Any) -> Any:
            is_bfloat16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
            return value.to(self.dtype) if is_bfloat16 else value

        named = {name: cast(value) for name, value in kwargs.items()}
        return function(*(cast(value) for value in args), **named).to(torch.bfloat16)
