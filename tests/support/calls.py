"""Collective calls that tests of the backend make, what they carry, and how a rank's statistics count them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from support.expected import all_gather

NUM = 32 * 1024  # elements of a shard: above min_bytes for every dtype
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
OPT_INS = {"out_of_place": True, "lists": True, "coalesced": True, "all_reduce": "int8:128"}


def data(rank: int, num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The (num,) values of ``rank``: normal, with blocks of very different size."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(num, generator=generator) * torch.logspace(-3, 2, max(num, 1))[:num]).to(dtype)


def mine(num: int = NUM, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return data(dist.get_rank(), num, dtype, seed)


def gather(shard: torch.Tensor, **fields: Any) -> torch.Tensor:
    """The in-place all-gather that FSDP2 calls."""
    whole = torch.empty(dist.get_world_size() * shard.numel(), dtype=shard.dtype)
    own = whole[dist.get_rank() * shard.numel() :][: shard.numel()]
    own.copy_(shard)
    dist.all_gather_single(whole, own, **fields)
    return whole


def scatter(inputs: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    output = torch.empty(inputs.numel() // dist.get_world_size(), dtype=inputs.dtype)
    dist.reduce_scatter_single(output, inputs, op=op)
    return output


def gather_list() -> None:
    dist.all_gather([torch.empty(NUM) for _ in range(2)], mine())


def call_each_form() -> None:
    """Of the collectives that may be compressed, in a world of two."""
    whole = mine(2 * NUM)
    gather(mine())
    scatter(whole)
    dist.all_reduce(whole)
    dist.all_gather([torch.empty(NUM) for _ in range(2)], whole[:NUM])
    dist.reduce_scatter(torch.empty(NUM), list(whole.split(NUM)))


def start_gather(seed: int, num: int = NUM, group: Any = None) -> tuple[torch.Tensor, Any]:
    rank = dist.get_rank(group)
    whole = torch.zeros(dist.get_world_size(group) * num)
    own = whole[rank * num :][:num].copy_(data(rank, num, seed=seed))
    return whole, dist.all_gather_single(whole, own, group=group, async_op=True)


def gathered(seed: int, num: int = NUM, size: int = 2) -> torch.Tensor:
    return all_gather([data(rank, num, seed=seed) for rank in range(size)], "int8:256")


def counted() -> dict[str, int]:
    """ "collective: reason" -> calls, of this rank so far; compressed ones have the reason "compressed"."""
    now = zcomm.stats()
    seen = {}
    for name in COLLECTIVES:
        one = getattr(now, name)
        seen |= {f"{name}: {reason}": calls.calls for reason, calls in one.exact.items()}
        if one.calls:
            seen[f"{name}: compressed"] = one.calls
    return seen | ({"others": now.others.calls} if now.others.calls else {})


def newly_counted(call: Callable[[], Any]) -> dict[str, int]:
    before = counted()
    call()
    return {reason: calls - before.get(reason, 0) for reason, calls in counted().items() if calls != before.get(reason)}


def expect(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """``call()`` raises ``error`` with ``text`` in its message."""
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value), f"no {text!r} in: {caught.value}"
