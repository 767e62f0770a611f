"""Worlds of real processes whose tensors are on the "cuda:0" of the stand-in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import cuda_host_torch as host
import torch
import torch.distributed as dist

import zcomm
from support import worlds
from zcomm.testing import LocalWorld

NCCL = os.environ["ZCOMM_NCCL_LIB"]


def run(function: Callable[[], Any], size: int = 2, **fields: Any) -> list[Any]:
    """Run as worlds.run."""
    return worlds.run(function, size, **with_nccl(fields))


def with_nccl(fields: dict[str, Any]) -> dict[str, Any]:
    fields.setdefault("options", worlds.options())
    return {**fields, "env": {"ZCOMM_NCCL_LIB": NCCL, **fields.get("env", {})}}


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    """Return the values of a rank, in host memory."""
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if rank is None else rank))
    return torch.randn(numel, generator=generator).to(dtype)


class Gather:
    """An all-gather in place: ``output`` and ``input`` are on the GPU, ``memory`` is what they hold."""

    def __init__(self, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.memory = torch.zeros(dist.get_world_size(), numel, dtype=dtype)
        self.shard = self.memory[dist.get_rank()]
        self.shard.copy_(values(numel, dtype, seed))
        self.expected = gathered(numel, dtype, seed)
        self.output = host.as_cuda(self.memory)
        self.input = host.as_cuda(self.shard)

    def __call__(self, **fields: Any) -> Any:
        with zcomm.override(forms="in_place"):
            return dist.all_gather_into_tensor(self.output, self.input, **fields)

    def check(self) -> None:
        host.synchronize()
        assert torch.equal(self.memory, self.expected)


class ReduceScatter:
    def __init__(self, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        size = dist.get_world_size()
        self.whole = values(size * numel, dtype, seed)
        self.memory = torch.zeros(numel, dtype=dtype)
        self.input = host.as_cuda(self.whole)
        self.output = host.as_cuda(self.memory)

    def __call__(self, **fields: Any) -> Any:
        with zcomm.override(forms="single"):
            return dist.reduce_scatter_tensor(self.output, self.input, **fields)


def gathered(numel: int, dtype: torch.dtype, seed: int, format: str = "int8:256") -> torch.Tensor:
    """Return the result that every rank must hold, computed by the codec and collectives on the CPU."""
    size = dist.get_world_size()

    def body(rank: Any) -> torch.Tensor:
        out = torch.zeros(size, numel, dtype=dtype)
        rank.all_gather(values(numel, dtype, seed, rank.rank), out, format=format)
        return out

    return LocalWorld(f"1x{size}").run(body)[0]


__all__ = ["Gather", "ReduceScatter", "dist", "gathered", "host", "run", "torch", "values", "with_nccl", "zcomm"]
