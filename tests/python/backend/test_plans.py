"""Plans that a caller holds: made once, right about bytes, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.fsdp_model import NODES, batch, sharded
from support.worlds import options, run

import zcomm
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of


def test_calls_that_repeat_make_no_plan() -> None:
    """FSDP2 with formats for each parameter, error feedback and secondary shards; a plain call makes one."""

    def body() -> None:
        model = sharded()
        zcomm.fsdp.compress(model, reduce_scatter="int8:64/int4:64", error_feedback=zcomm.ErrorFeedback())
        shards = zcomm.fsdp.enable_secondary_shards(model)
        backend = backend_of()

        def step() -> int:
            shards.invalidate()
            model(batch()).sum().backward()
            return backend.plans_made

        first = step()
        assert first > 0
        assert step() == step() == first
        reduced = zcomm.stats().reduce_scatter.calls
        with zcomm.override(reduce_scatter="bf16"):
            assert step() > first
        assert zcomm.stats().reduce_scatter.calls > reduced
        before = backend.plans_made
        whole = torch.zeros(4 * 1024)
        dist.all_gather_single(whole, whole[dist.get_rank() * 1024 :][:1024])
        assert backend.plans_made == before + 1

    run(body, len(NODES), nodes=NODES, options=options(min_bytes=0))


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], NODES, [0, 0, 1]], ids=str)
def test_a_plan_knows_its_bytes(nodes: list[int]) -> None:
    def body() -> None:
        size, rank, backend = dist.get_world_size(), dist.get_rank(), backend_of()
        whole = torch.ones(size * 1000)
        own = whole[rank * 1000 :][:1000]
        site = _c10d.Site("here", [])
        gather = backend.plan_gather(whole, own, parts=[(900, False), (100, True)])
        assert gather is not None
        assert gather.segments == [(900, "int8:256"), (100, "exact")]
        gather.run(whole, own, site=site).wait()
        assert (site.intra_node_bytes, site.inter_node_bytes) == (gather.intra_node_bytes, gather.inter_node_bytes)

        site = _c10d.Site("there", [])
        reduce = backend.plan_reduce(torch.empty(1000), whole, dist.ReduceOp.SUM)
        assert reduce is not None
        reduce.run(torch.empty(1000), whole, dist.ReduceOp.SUM, site=site).wait()
        assert (site.intra_node_bytes, site.inter_node_bytes) == (reduce.intra_node_bytes, reduce.inter_node_bytes)

    run(body, len(nodes), nodes=nodes, options=options(min_bytes=0))


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], NODES, [0, 0, 1]], ids=str)
def test_hops_have_the_bytes_of_their_links(nodes: list[int]) -> None:
    """Between nodes first in a gather, last in a reduction; of an all-reduce both, one after the other."""

    def body() -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        whole = torch.ones(size * 1000)
        dist.all_gather_single(whole, whole[rank * 1000 :][:1000])
        dist.reduce_scatter_single(torch.empty(1000), whole)
        dist.all_reduce(whole)
        stats = zcomm.stats()
        for one in (stats.all_gather, stats.reduce_scatter, stats.all_reduce):
            assert sum(hop.intra_node_bytes for hop in one.hops) == one.intra_node_bytes
            assert sum(hop.inter_node_bytes for hop in one.hops) == one.inter_node_bytes
            assert all(hop.wait_seconds > 0 for hop in one.hops if hop.intra_node_bytes + hop.inter_node_bytes)
            assert sum(hop.wait_seconds for hop in one.hops) <= one.transfer_seconds
        if nodes != NODES:
            assert [len(one.hops) for one in (stats.all_gather, stats.reduce_scatter)] == [1, 1]
            return
        first, last = stats.all_gather.hops
        assert first.inter_node_bytes > 0 and last.inter_node_bytes == 0 and last.intra_node_bytes > 0
        first, last = stats.reduce_scatter.hops
        assert first.inter_node_bytes == 0 and first.intra_node_bytes > 0
        assert last.inter_node_bytes > 0 and last.intra_node_bytes == 0
        used = [(hop.intra_node_bytes > 0, hop.inter_node_bytes > 0) for hop in stats.all_reduce.hops]
        assert used == [(True, False), (False, True), (True, True), (True, False)]

    run(body, len(nodes), nodes=nodes, options=options(min_bytes=0, all_reduce="int8:64"))


def test_a_plan_is_for_its_tensors_formats_and_group() -> None:
    def body() -> None:
        group = dist.new_group([0, 1], pg_options=options(min_bytes=0))
        backend = backend_of(group)
        whole = torch.ones(2000)
        own = whole[dist.get_rank() * 1000 :][:1000]
        plan = backend.plan_gather(whole, own)
        assert plan is not None
        assert backend.plan_gather(whole, own, kept=plan) is plan
        with zcomm.override(all_gather="int4:64"):
            other = backend.plan_gather(whole, own, kept=plan)
            assert other is not plan and other is not None and other.format == "int4:64"
        with zcomm.exact():
            assert backend.plan_gather(whole, own, kept=plan) is None
        assert backend.plan_gather(whole, own, parts=[(1000, True)], kept=plan) is None
        with pytest.raises(ValueError, match="as was planned"):
            plan.run(whole[:1000], own[:500])
        with pytest.raises(ValueError, match=r"secondary: expected .* got 7 contiguous"):
            plan.run_from_secondary(whole, torch.empty(7, dtype=torch.uint8))
        del backend
        dist.destroy_process_group(group)
        del group
        with pytest.raises(RuntimeError, match="was destroyed"):
            plan.run(whole, own)

    run(body)
