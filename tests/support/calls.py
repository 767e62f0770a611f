"""Collective calls that tests of the backend make, what they carry, and how a rank's statistics count them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from support.expected import all_gather
from zcomm.distributed.single import all_gather_single, reduce_scatter_single

NUM = 32 * 1024  # elements of a shard: above min_bytes for every dtype
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "gather", "scatter", "broadcast")
OPT_INS = {
    "forms": "single,in_place,out_of_place,list,coalesced",
    **dict.fromkeys(("all_reduce", "exchanges"), "int8:128"),
}


def data(rank: int, num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """The (num,) values of ``rank``: normal, with blocks of very different size."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(num, generator=generator) * torch.logspace(-3, 2, max(num, 1))[:num]).to(dtype)


def mine(num: int = NUM, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return data(dist.get_rank(), num, dtype, seed)


def logged() -> list[str]:
    """The lines that zcomm logs on this rank from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    return lines


def gather_in_place(whole: torch.Tensor, group: Any = None, **fields: Any) -> Any:
    """An all-gather of this rank's slot of ``whole``, compressed as that of FSDP2 is."""
    with zcomm.override(forms="in_place"):
        return all_gather_single(
            whole, whole.chunk(dist.get_world_size(group))[dist.get_rank(group)], group=group, **fields
        )


def gather(shard: torch.Tensor, **fields: Any) -> torch.Tensor:
    whole = torch.empty(dist.get_world_size() * shard.numel(), dtype=shard.dtype)
    whole[dist.get_rank() * shard.numel() :][: shard.numel()] = shard
    gather_in_place(whole, **fields)
    return whole


def scatter(inputs: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """A reduce-scatter of gradients, compressed as that of FSDP2 is."""
    output = torch.empty(inputs.numel() // dist.get_world_size(), dtype=inputs.dtype)
    with zcomm.override(forms="single"):
        reduce_scatter_single(output, inputs, op=op)
    return output


def gather_list() -> None:
    dist.all_gather([torch.empty(NUM) for _ in range(2)], mine())


def call_each_form() -> None:
    """Make each collective that may be compressed, in each form, in a world of two."""
    whole = mine(2 * NUM)
    gather(mine())
    scatter(whole)
    dist.all_reduce(whole)
    dist.all_gather([torch.empty(NUM) for _ in range(2)], whole[:NUM])
    dist.reduce_scatter(torch.empty(NUM), list(whole.split(NUM)))


def start_gather(seed: int, num: int = NUM, group: Any = None) -> tuple[torch.Tensor, Any]:
    rank = dist.get_rank(group)
    whole = torch.zeros(dist.get_world_size(group) * num)
    whole[rank * num :][:num] = data(rank, num, seed=seed)
    return whole, gather_in_place(whole, group, async_op=True)


def gathered(seed: int, num: int = NUM, size: int = 2) -> torch.Tensor:
    return all_gather([data(rank, num, seed=seed) for rank in range(size)], "int8:256")


def counted(group: Any = None) -> dict[str, int]:
    """ "collective: reason" -> calls, of this rank so far; compressed ones have the reason "compressed"."""
    now = zcomm.stats(group)
    seen = {}
    for name in COLLECTIVES:
        one = getattr(now, name)
        seen |= {f"{name}: {reason}": calls.calls for reason, calls in one.exact.items()}
        if one.calls:
            seen[f"{name}: compressed"] = one.calls
    return seen | ({"others": now.others.calls} if now.others.calls else {})


def newly_counted(call: Callable[[], Any], group: Any = None) -> dict[str, int]:
    before = counted(group)
    call()
    after = counted(group)
    return {reason: calls - before.get(reason, 0) for reason, calls in after.items() if calls != before.get(reason)}


def expect(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """``call()`` raises ``error`` with ``text`` in its message."""
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value), f"no {text!r} in: {caught.value}"
