"""Worlds of real processes that share a GPU, or have the stand-in for one (see gpu_device.py).

Every rank says that it is a host of its own (see zcomm_bench.lab.gpus), so NCCL moves all over sockets on loopback.
Ranks are forked, as in support/worlds.py, so the process that runs pytest must never start CUDA: whatever uses the
GPU runs in a rank. Two processes on a GPU take turns of milliseconds, and a kernel that waits for a peer spends its
turn: collectives take milliseconds each, however small, and tests make few.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from support import worlds
from support.expected import assert_same_bits
from support.gpu_device import DEVICE, GPU, KIND
from zcomm import _core
from zcomm.testing import LocalWorld
from zcomm_bench.lab import gpus

IS_GPU = KIND == "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_SECONDS = 45.0  # of a group's calls, the first one's connections included
WORLD_SECONDS = 120.0
FAIL_SECONDS = 30.0
# Of a group that is to time out. Its first call must fit: ranks that take turns on a GPU connect over sockets, and on a
# busy machine without a GPU 64 chunks took 3 s.
SOON = 10.0 if IS_GPU else 6.0


def missing() -> str:
    """Why nothing can run here; empty if it can."""
    if not IS_GPU:
        return ""
    if torch.version.cuda is None:
        return f"no GPU tests: torch {torch.__version__} was built without CUDA"
    if torch.cuda.device_count() == 0:
        return "no GPU tests: torch sees no GPU"
    return ""


def broken() -> str:
    """What is wrong with zcomm on a machine that has a GPU; empty if nothing is."""
    if not IS_GPU:
        return ""
    if not _core.cuda_toolkit():
        return f"{_core.__file__} was built without CUDA: install zcomm where nvcc is on the PATH (make gpu does)"
    return ""


def run(function: Callable[[], Any], size: int = 2, **fields: Any) -> list[Any]:
    """As worlds.run, in ranks on the GPU; ``options``: of worlds.options() by default."""
    return worlds.run(in_rank(function), size, **with_defaults(fields))


def collect(function: Callable[[], Any], size: int = 2, **fields: Any) -> list[worlds.Outcome]:
    """As worlds.collect, in ranks on the GPU."""
    return worlds.collect(in_rank(function), size, **with_defaults(fields))


def alone(function: Callable[[], Any], **fields: Any) -> Any:
    """function() in a process of its own that may use the GPU."""
    return run(function, 1, backend=None, **fields)[0]


def with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    if fields.get("backend", "zcomm") == "zcomm":
        fields.setdefault("options", worlds.options())
    if KIND == "stand-in":
        fields["env"] = {"ZCOMM_NCCL_LIB": os.environ["ZCOMM_NCCL_LIB"], **fields.get("env", {})}
    return {"group_seconds": GROUP_SECONDS, "seconds": WORLD_SECONDS, **fields}


def in_rank(function: Callable[[], Any]) -> Callable[[], Any]:
    def body() -> Any:
        enter()
        return function()

    return body


def enter() -> None:
    """Puts this rank on its GPU."""
    if not IS_GPU:
        return
    if torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized():
        raise AssertionError("the process that runs pytest has started CUDA: no rank that it forks can use it")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    gpus.place(rank, size)


synchronize, on_device, on_host = GPU.synchronize, GPU.on_device, GPU.on_host


def values(num: int, dtype: torch.dtype = torch.float32, seed: int = 0, rank: int | None = None) -> torch.Tensor:
    """The (num,) values of a rank (default: this one), on the CPU: normal, with blocks of very different size."""
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if rank is None else rank))
    return (torch.randn(num, generator=generator) * torch.logspace(-3, 2, max(num, 1))[:num]).to(dtype)


class Gather:
    """An all-gather in place, as FSDP2 calls it, whose result is known. It leaves in the own slot what everybody holds,
    so each call first copies ``source`` there, on the current stream."""

    def __init__(self, num: int, dtype: torch.dtype = torch.float32, seed: int = 0, group: Any = None) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.num, self.dtype = num, dtype
        self.blank = torch.full((self.size * num,), -1.0, dtype=dtype)
        self.whole = on_device(self.blank)
        self.own = self.whole[self.rank * num :][:num]
        self.source = on_device(self.blank[:num])
        self.set(seed)

    def set(self, seed: int) -> None:
        """Takes the values of ``seed`` and forgets the result before, on the current stream."""
        self.seed = seed
        GPU.copy(self.whole, self.blank)
        GPU.copy(self.source, values(self.num, self.dtype, seed, self.rank))

    def __call__(self, **fields: Any) -> Any:
        GPU.copy(self.own, self.source)
        with zcomm.override(forms="in_place"):
            return dist.all_gather_into_tensor(self.whole, self.own, group=self.group, **fields)

    def check(self, whole: torch.Tensor | None = None) -> None:
        want = gathered(self.size, self.num, self.dtype, self.seed)
        assert_same_bits(on_host(self.whole if whole is None else whole), want, (self.num, self.dtype, self.seed))


class ReduceScatter:
    """A reduce-scatter, whose result is known."""

    def __init__(self, num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.whole = on_device(values(self.size * num, dtype, seed))
        self.own = on_device(torch.full((num,), -1.0, dtype=dtype))

    def __call__(self, **fields: Any) -> Any:
        with zcomm.override(forms="single"):
            return dist.reduce_scatter_tensor(self.own, self.whole, **fields)


def gathered(size: int, num: int, dtype: torch.dtype, seed: int, format: str = "int8:256") -> torch.Tensor:
    """What every rank must hold, from the codec and collectives on the CPU."""

    def body(rank: Any) -> torch.Tensor:
        out = torch.zeros(size * num, dtype=dtype)
        return rank.all_gather(values(num, dtype, seed, rank.rank), out, format=format)

    return LocalWorld(f"1x{size}").run(body)[0]


def fails(call: Callable[[], object]) -> str:
    """What ``call``, made again and again, raises."""
    deadline = time.monotonic() + FAIL_SECONDS
    while time.monotonic() < deadline:
        try:
            call()
            synchronize()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.05)
    raise AssertionError("nothing was raised")


def nodes_of(size: int, node_size: int) -> list[int]:
    return [rank // node_size for rank in range(size)]


def block_max(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude of each element's block (n,) -> (n,)."""
    padded = torch.nn.functional.pad(values.abs().double(), (0, -values.numel() % block))
    return padded.view(-1, block).amax(1).repeat_interleave(block)[: values.numel()]


QMAX = {"int8": 127, "int4": 7}
HALF_STEP = 0.5 * (1 + 2**-7)  # of absmax / qmax: the scale is rounded up to 8 significant bits


def half_step(values: torch.Tensor, format: str) -> torch.Tensor:
    """The largest error of one quantization (n,) -> (n,)."""
    kind, _, block = format.partition(":")
    return block_max(values, int(block)) / QMAX[kind] * HALF_STEP


def reduce_bound(terms: Sequence[torch.Tensor], owner: int, nodes: Sequence[int], formats: str) -> torch.Tensor:
    """The largest error of the sum of every rank's ``terms`` (n,), float64, at ``owner``: one quantization per hop."""
    inside, between = formats.split("/")
    bound = torch.zeros_like(terms[0])
    members = [[rank for rank in range(len(nodes)) if nodes[rank] == node] for node in dict.fromkeys(nodes)]
    two_hops = len(members) > 1 and len(members[0]) > 1
    for ranks in members:
        if not two_hops:
            format = inside if nodes[owner] == nodes[ranks[0]] else between
            bound += sum((half_step(terms[s], format) for s in ranks if s != owner), torch.zeros_like(bound))
            continue
        summing = ranks[next(own.index(owner) for own in members if owner in own)]
        first = sum((half_step(terms[s], inside) for s in ranks if s != summing), torch.zeros_like(bound))
        bound += first
        if owner not in ranks:
            bound += half_step(sum(terms[s] for s in ranks).abs() + first, between)  # type: ignore[union-attr]
    return bound + sum(term.abs() for term in terms) * len(nodes) * torch.finfo(torch.float32).eps


__all__ = [
    "DEVICE",
    "DTYPES",
    "GPU",
    "KIND",
    "Gather",
    "LocalWorld",
    "ReduceScatter",
    "assert_same_bits",
    "dist",
    "fails",
    "torch",
    "zcomm",
]
