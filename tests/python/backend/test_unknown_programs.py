"""Nothing is compressed by surprise: a program that zcomm does not know has Gloo's bits under the defaults, whatever it
sends, how, and in which groups."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expected import assert_same_bits
from support.worlds import WorldError, run
from torch.distributed import _functional_collectives as functional

import zcomm
from zcomm.distributed.single import all_gather_single, reduce_scatter_single

CALLS = 42  # of a program, of which each kind is one at least
COUNT = 33_000  # elements of a shard, about: above min_bytes in every dtype
DESCRIPTIONS = ("mesh_fsdp", "mesh_tp", "DATA_PARALLEL_GROUP", "fsdp_extra", None)


class Rank:
    """What the calls of a program need: their group, its size, this rank in it, and values."""

    def __init__(self, group: Any, seed: int, dtype: torch.dtype, contents: str) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.count = COUNT + seed % 7
        self.dtype, self.contents = dtype, contents
        self.generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())

    def values(self, count: int | None = None, bits: bool = False) -> torch.Tensor:
        """``bits``: the call only moves values, so that they may be any bits."""
        count = self.count if count is None else count
        if self.contents == "codes" and bits:
            num_bytes = count * self.dtype.itemsize
            return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=self.generator).view(self.dtype)
        if self.contents == "indices":
            return torch.randint(0, 1000, (count,), generator=self.generator).to(self.dtype)
        scale = 0.02 if self.contents == "masters" else 3.0
        return (scale * torch.randn(count, generator=self.generator)).to(self.dtype)

    def whole(self, bits: bool = False) -> torch.Tensor:
        return self.values(self.size * self.count, bits)

    def slots(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.view(self.size, -1).unbind())


def gather(one: Rank) -> Any:
    output = torch.zeros(one.size * one.count, dtype=one.dtype)
    all_gather_single(output, one.values(bits=True), group=one.group)
    return output


def gather_in_place(one: Rank) -> Any:
    whole = one.whole(bits=True)
    all_gather_single(whole, one.slots(whole)[one.rank], group=one.group)
    return whole


def gather_list(one: Rank) -> Any:
    outputs = one.slots(torch.zeros(one.size * one.count, dtype=one.dtype))
    dist.all_gather(outputs, one.values(bits=True), group=one.group)
    return torch.cat(outputs)


def gather_list_in_place(one: Rank) -> Any:
    outputs = one.slots(one.whole(bits=True))
    dist.all_gather(outputs, outputs[one.rank], group=one.group)
    return torch.cat(outputs)


def gather_coalesced(one: Rank) -> Any:
    wholes = [one.whole(bits=True) for _ in range(2)]
    with dist._coalescing_manager(one.group):
        for i, whole in enumerate(wholes):
            shard = one.slots(whole)[one.rank]
            all_gather_single(whole, shard if i else shard.clone(), group=one.group)
    return torch.cat(wholes)


def gather_functional(one: Rank) -> Any:
    return functional.wait_tensor(functional.all_gather_tensor(one.values(bits=True), 0, one.group))


def scatter(one: Rank) -> Any:
    output = torch.empty(one.count, dtype=one.dtype)
    reduce_scatter_single(output, one.whole(), group=one.group)
    return output


def scatter_in_place(one: Rank) -> Any:
    whole = one.whole()
    reduce_scatter_single(one.slots(whole)[one.rank], whole, group=one.group)
    return one.slots(whole)[one.rank]


def scatter_later(one: Rank) -> Any:
    output = torch.empty(one.count, dtype=one.dtype)
    reduce_scatter_single(output, one.whole(), op=dist.ReduceOp.AVG, group=one.group, async_op=True).wait()
    return output


def scatter_list(one: Rank) -> Any:
    output = torch.empty(one.count, dtype=one.dtype)
    dist.reduce_scatter(output, one.slots(one.whole()), group=one.group)
    return output


def scatter_coalesced(one: Rank) -> Any:
    outputs = [torch.empty(one.count, dtype=one.dtype) for _ in range(2)]
    with dist._coalescing_manager(one.group):
        for output in outputs:
            reduce_scatter_single(output, one.whole(), group=one.group)
    return torch.cat(outputs)


def scatter_functional(one: Rank) -> Any:
    return functional.wait_tensor(functional.reduce_scatter_tensor(one.whole(), "sum", 0, one.group))


def reduce_all(one: Rank) -> Any:
    values = one.values()
    dist.all_reduce(values, group=one.group)
    return values


def reduce_all_coalesced(one: Rank) -> Any:
    values = [one.values(), one.values()]
    dist.all_reduce_coalesced(values, group=one.group)
    return torch.cat(values)


def exchange(one: Rank) -> Any:
    output = torch.zeros(one.size * one.count, dtype=one.dtype)
    dist.all_to_all_single(output, one.whole(bits=True), group=one.group)
    return output


def exchange_unevenly(one: Rank) -> Any:
    sent = [one.count + one.rank + peer for peer in range(one.size)]
    output = torch.zeros(sum(sent), dtype=one.dtype)
    dist.all_to_all_single(output, one.values(sum(sent), bits=True), sent, sent, group=one.group)
    return output


def exchange_list(one: Rank) -> Any:
    outputs = one.slots(torch.zeros(one.size * one.count, dtype=one.dtype))
    dist.all_to_all(outputs, one.slots(one.whole(bits=True)), group=one.group)
    return torch.cat(outputs)


def broadcast(one: Rank) -> Any:
    values = one.values(bits=True)
    dist.broadcast(values, group=one.group, group_src=one.size - 1)
    return values


def gather_to_one(one: Rank) -> Any:
    outputs = one.slots(torch.zeros(one.size * one.count, dtype=one.dtype))
    dist.gather(one.values(bits=True), outputs if one.rank == 0 else None, group=one.group, group_dst=0)
    return torch.cat(outputs)


def scatter_from_one(one: Rank) -> Any:
    output, slots = torch.empty(one.count, dtype=one.dtype), one.slots(one.whole(bits=True))
    dist.scatter(output, slots if one.rank == 0 else None, group=one.group, group_src=0)
    return output


def pass_on(one: Rank) -> Any:
    output = torch.empty(one.count, dtype=one.dtype)
    right, left = (one.rank + 1) % one.size, (one.rank - 1) % one.size
    sent = dist.P2POp(dist.isend, one.values(bits=True), group=one.group, group_peer=right)
    received = dist.P2POp(dist.irecv, output, group=one.group, group_peer=left)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    return output


KINDS: list[Callable[[Rank], Any]] = [
    gather, gather_in_place, gather_list, gather_list_in_place, gather_coalesced, gather_functional,
    scatter, scatter_in_place, scatter_later, scatter_list, scatter_coalesced, scatter_functional,
    reduce_all, reduce_all_coalesced,
    exchange, exchange_unevenly, exchange_list, broadcast, gather_to_one, scatter_from_one, pass_on,
]  # fmt: skip


def program(seed: int) -> None:
    """Make the same random calls over Gloo and zcomm, and compare their results."""
    choose = random.Random(seed)  # the same on all ranks
    size = dist.get_world_size()
    pairs = [(dist.new_group(backend="gloo"), dist.group.WORLD)]
    for number, description in enumerate(DESCRIPTIONS):
        members = [rank for rank in range(size) if rank != number] if size > 2 else [0, 1]
        pairs.append((dist.new_group(members, backend="gloo"), dist.new_group(members, group_desc=description)))
    kinds = KINDS + choose.choices(KINDS, k=CALLS - len(KINDS))
    choose.shuffle(kinds)
    for number, kind in enumerate(kinds):
        gloo, ours = choose.choice(pairs)
        dtype = choose.choice([torch.float32, torch.bfloat16, torch.float16])
        contents = choose.choice(["activations", "codes", "indices", "masters"])
        if ours == dist.GroupMember.NON_GROUP_MEMBER:
            continue
        want, got = (kind(Rank(group, 1000 * seed + number, dtype, contents)) for group in (gloo, ours))
        assert_same_bits(got, want, f"call {number}: {kind.__name__} of {contents} in {dtype}, {ours.group_desc}")
    for _, ours in pairs:
        if ours != dist.GroupMember.NON_GROUP_MEMBER:
            counters = zcomm.stats(ours)
            assert counters.send_recv.calls == 0
            for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "gather", "scatter", "broadcast"):
                assert getattr(counters, name).calls == 0, f"{name} in {ours.group_desc}"


@pytest.mark.promise(7)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_an_unknown_program_has_the_bits_of_gloo(size: int) -> None:
    """Random calls of every kind, of values that rounding would destroy; nothing is counted as compressed."""
    run(lambda: program(seed=size), size, nodes=[rank // 2 for rank in range(size)])


@pytest.mark.promise(7)
def test_the_comparison_finds_what_is_compressed() -> None:
    """The same program fails where one form is opted in."""
    with pytest.raises(WorldError, match=r"scatter.*element"):
        run(lambda: program(seed=2), 2, options=zcomm.Options(forms="single"))
