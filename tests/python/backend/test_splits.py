"""Groups that torch splits off a group."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from support.calls import NUM, data
from support.expected import all_gather, assert_same_bits
from support.worlds import options, run
from torch._C._distributed_c10d import AllgatherOptions

import zcomm
from zcomm.distributed import overrides

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def gather_in(group: Any) -> torch.Tensor:
    """torch's own functions refuse a group that they have not made."""
    whole = torch.zeros(group.size() * NUM)
    part = whole[group.rank() * NUM :][:NUM].copy_(data(group.rank(), NUM))
    group._allgather_base(whole, part, AllgatherOptions()).wait()
    return whole


def test_split() -> None:
    """A split makes children with the parent's options, or with their own."""

    def body() -> None:
        world, rank = dist.group.WORLD, dist.get_rank()
        members = [0, 2] if rank % 2 == 0 else [1, 3]
        child = world.split_group(members, group_name=f"half{rank % 2}")
        assert child.size() == 2 and child.rank() == rank // 2
        backend = child._get_backend(CPU)
        assert repr(backend.options) == repr(world._get_backend(CPU).options)
        whole, own = torch.zeros(2 * NUM), data(child.rank(), NUM)
        for _ in range(3):
            part = whole[child.rank() * NUM :][:NUM].copy_(own)
            child._allgather_base(whole, part, AllgatherOptions()).wait()
            assert_same_bits(whole, all_gather([data(r, NUM) for r in range(2)], "int4:64"))
        assert backend.stats()["all_gather"]["calls"] == 3
        changed = world.split_group(members, opts=zcomm.Options(all_gather="int8:64"), group_name=f"other{rank % 2}")
        assert changed._get_backend(CPU).options.all_gather == "int8:64"
        for part in (changed, child):
            part.shutdown()
        again = world.split_group(members, group_name=f"other{rank % 2}")  # the name of one that has ended
        assert again._get_backend(CPU) is not changed._get_backend(CPU)
        again.shutdown()

    run(body, 4, options=options(all_gather="int4:64"))


def test_a_split_that_compresses_traced_calls_tells_them_from_dtensors_own() -> None:
    def body() -> None:
        assert overrides.tell_apart_what_is_traced.cache_info().currsize == 0
        dist.group.WORLD.split_group([0, 1], opts=zcomm.Options(groups={"fsdp": "traced"}))
        assert overrides.tell_apart_what_is_traced.cache_info().currsize == 1

    run(body)


def test_a_split_has_the_nodes_of_its_ranks_in_the_world() -> None:
    """The nodes are right also in a split of a group whose ranks have other numbers in the world."""

    def body() -> None:
        rank = dist.get_rank()
        child: Any = dist.group.WORLD.split_group([0, 2] if rank % 2 == 0 else [1, 3])
        gather_in(child)
        traffic = child._get_backend(CPU).stats()["all_gather"]
        assert traffic["intra_node_bytes"] == 0 and traffic["inter_node_bytes"] > 0
        assert child._get_backend(CPU).options.global_ranks_in_group == ([0, 2] if rank % 2 == 0 else [1, 3])
        group: Any = dist.new_group([1, 2, 3])
        if rank:
            grandchild: Any = group.split_group([0, 2] if rank != 2 else [1])
            assert grandchild._get_backend(CPU).options.global_ranks_in_group == ([1, 3] if rank != 2 else [2])
        dist.barrier()

    run(body, 4, options=options(node_size=2))


def test_splits_of_one_name_are_groups_of_their_own() -> None:
    """All devices of a split have the same backend."""

    def body() -> None:
        first, second = (dist.group.WORLD.split_group([0, 1]) for _ in range(2))
        for group in (first, second):
            assert group._get_backend(CPU) is group._get_backend(CUDA)
        first.shutdown()
        gather_in(second)
        second.shutdown()

    run(body, options=options())


def test_a_split_leaves_its_parents_options_alone() -> None:
    def body() -> None:
        world = dist.group.WORLD
        parent: Any = world._get_backend(CPU)
        before = parent.options._timeout, parent.options.group_name
        child: Any = world.split_group([0, 1], timeout=datetime.timedelta(seconds=7))
        assert child._get_backend(CPU).options._timeout == datetime.timedelta(seconds=7)
        assert (parent.options._timeout, parent.options.group_name) == before

    run(body)


def test_ranks_outside_of_a_split_have_none() -> None:
    """Splits have the names of their ranks, so that ranks may make them in any order."""

    def body() -> None:
        world, rank = dist.group.WORLD, dist.get_rank()
        lists = [[0], [0, 1]] if rank == 0 else [[0, 1], [0]]
        made: dict[int, Any] = {len(ranks): world.split_group(ranks) for ranks in lists}
        assert (made[1] is None) == (rank == 1)
        assert_same_bits(gather_in(made[2]), all_gather([data(r, NUM) for r in range(2)], "int8:256"))

    run(body, options=options())
