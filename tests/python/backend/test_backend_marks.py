"""Groups that the options name: what is compressed in them alone, and what is never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, gather_list, mine, newly_counted
from support.worlds import run
from torch.distributed import _functional_collectives as functional

import zcomm


def gather_functional() -> None:
    functional.all_gather_tensor(mine(), 0, dist.group.WORLD).sum()


def scatter_functional() -> None:
    functional.reduce_scatter_tensor(mine(2 * NUM), "avg", 0, dist.group.WORLD).sum()


def gather_own_weights() -> None:
    whole = mine(2 * NUM)
    dist.all_gather_single(whole, whole.chunk(2)[dist.get_rank()])


def test_traced_names_the_groups_of_graphs() -> None:
    """Named groups compress the calls that graphs make, and no other calls; other groups compress none of them."""
    of_graphs: dict[str, Callable[[], Any]] = {
        "all_gather": gather_functional,
        "reduce_scatter": scatter_functional,
        "all_gather, in place": gather_own_weights,
    }
    others: dict[str, Callable[[], Any]] = {
        "all_gather: form": gather_list,
        "all_gather: out_of_place": lambda: dist.all_gather_single(torch.empty(2 * NUM), mine()),
        "reduce_scatter: form": lambda: dist.reduce_scatter(torch.empty(NUM), list(mine(2 * NUM).chunk(2))),
        "reduce_scatter: unmarked": lambda: dist.reduce_scatter_single(torch.empty(NUM), mine(2 * NUM)),
    }

    def body() -> None:
        for name, call in of_graphs.items():
            collective = name.partition(",")[0]
            assert newly_counted(call) == {f"{collective}: compressed": 1}, name
            with zcomm.override(groups={"another": "traced"}):
                reason = "in_place" if "in place" in name else "form"
                assert newly_counted(call) == {f"{collective}: {reason}": 1}, name
        for counted, call in others.items():
            assert newly_counted(call) == {counted: 1}
        group = dist.new_group([0, 1], group_desc="mesh_another")
        extra = dist.new_group([0, 1], group_desc="fsdp_extra")
        gather = lambda: functional.all_gather_tensor(mine(), 0, group).sum()  # noqa: E731
        assert newly_counted(gather, group) == {"all_gather: form": 1}
        with zcomm.override(groups="world=traced; another=traced"):
            assert newly_counted(gather, group) == {"all_gather: compressed": 1}
        gather_extra = lambda: functional.all_gather_tensor(mine(), 0, extra).sum()  # noqa: E731
        assert newly_counted(gather_extra, extra) == {"all_gather: form": 1}
        with zcomm.override(groups={"fsdp*": "traced"}):
            assert newly_counted(gather_extra, extra) == {"all_gather: compressed": 1}

    run(body, options=zcomm.Options(groups={"world": "traced"}))


@pytest.mark.promise(7)
@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_groups_are_marked_by_their_names(debug: str) -> None:
    """Forms that are opted in for a group's name compress that group's calls alone; "exact" keeps all calls of a group
    exact, whatever else opts in. Also where torch wraps each backend."""

    def body() -> None:
        data_parallel = dist.new_group([0, 1], group_desc="DATA_PARALLEL_GROUP_WITH_CP")
        tensor_parallel = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
        expected = {data_parallel: "compressed", tensor_parallel: "group", dist.group.WORLD: "unmarked"}
        for group, reason in expected.items():
            output = torch.empty(NUM)
            reduce = lambda group=group, output=output: dist.reduce_scatter_single(output, mine(2 * NUM), group=group)  # noqa: E731
            assert newly_counted(reduce, group) == {f"reduce_scatter: {reason}": 1}, group.group_desc
        with zcomm.override(all_reduce="int8:128", exchanges="int8:128", forms="single,list"):
            all_reduce = lambda: dist.all_reduce(mine(), group=tensor_parallel)  # noqa: E731
            assert newly_counted(all_reduce, tensor_parallel) == {"all_reduce: group": 1}
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine(), group=tensor_parallel, group_peer=1 - dist.get_rank()),
                    dist.P2POp(dist.irecv, torch.empty(NUM), group=tensor_parallel, group_peer=1 - dist.get_rank()),
                ]
            )
            for work in works:
                work.wait()
        assert zcomm.stats(tensor_parallel).send_recv.calls == 0

    groups = {"DATA_PARALLEL*": "single", "TENSOR*": "exact"}
    run(body, options=zcomm.Options(groups=groups), env={"TORCH_DISTRIBUTED_DEBUG": debug})
