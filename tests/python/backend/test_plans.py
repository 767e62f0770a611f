"""Plans that a caller holds: made once, right about bytes, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.decisions import table
from support.fsdp_model import NODES, batch, sharded
from support.worlds import options, run

import zcomm
from zcomm._core import BlockFormat
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of


def test_calls_that_repeat_make_no_plan() -> None:
    """FSDP2 with formats for each parameter, error feedback and secondary shards."""

    def body() -> None:
        model = sharded()
        shards = zcomm.fsdp.compress(model, gradients="int8:64/int4:64", error_feedback=zcomm.codec.ErrorFeedback())

        plans: set[_c10d.Operation] = set()

        def recorded(make: Any) -> Any:
            def plan(*arguments: Any, **named: Any) -> Any:
                made = make(*arguments, **named)
                if isinstance(made, _c10d.Operation):
                    plans.add(made)
                return made

            return plan

        _c10d.ProcessGroup.plan = recorded(_c10d.ProcessGroup.plan)  # type: ignore[method-assign]

        def step() -> int:
            shards.invalidate()
            model(batch()).sum().backward()
            return len(plans)

        first = step()
        assert first > 0
        assert step() == step() == first
        reduced = zcomm.stats().reduce_scatter.calls
        with zcomm.override(reduce_scatter="bf16"):
            assert step() > first
        assert zcomm.stats().reduce_scatter.calls > reduced

    run(body, len(NODES), nodes=NODES, options=options(min_bytes=0))


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], NODES, [0, 0, 1]], ids=str)
def test_a_plan_knows_its_bytes(nodes: list[int]) -> None:
    def body() -> None:
        size, rank, backend = dist.get_world_size(), dist.get_rank(), backend_of()
        whole = torch.ones(size * 1000)
        own = whole[rank * 1000 :][:1000]
        site = _c10d.Site("here", [])
        gather = backend.plan(whole, own, parts=[(900, False), (100, True)])
        assert gather is not None
        assert gather.segments == [(900, "int8:256"), (100, "exact")]
        gather.run(whole, own, site=site).wait()
        assert (site.intra_node_bytes, site.inter_node_bytes) == (gather.intra_node_bytes, gather.inter_node_bytes)

        site = _c10d.Site("there", [])
        reduce = backend.plan(torch.empty(1000), whole, dist.ReduceOp.SUM)
        assert reduce is not None
        reduce.run(torch.empty(1000), whole, dist.ReduceOp.SUM, site=site).wait()
        assert (site.intra_node_bytes, site.inter_node_bytes) == (reduce.intra_node_bytes, reduce.inter_node_bytes)

    run(body, len(nodes), nodes=nodes, options=options(min_bytes=0))


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1], NODES, [0, 0, 1]], ids=str)
def test_hops_have_the_bytes_of_their_links(nodes: list[int]) -> None:
    """Inter-node bytes come first in a gather and last in a reduction; an all-reduce has both, in this order."""

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
        dist.barrier(group)  # Gloo fails on a rank that still connects if the other one has ended
        whole = torch.ones(2000)
        own = whole[dist.get_rank() * 1000 :][:1000]
        plan = backend.plan(whole, own)
        assert isinstance(plan, _c10d.Operation)
        assert backend.plan(whole, own, like=plan) is plan
        with zcomm.override(all_gather="int4:64"):
            other = backend.plan(whole, own, like=plan)
            assert other is not plan and other.format == "int4:64"
        with zcomm.exact():
            assert backend.plan(whole, own, like=plan) == _c10d.Verdict.format_exact
        assert backend.plan(whole, own, parts=[(1000, True)], like=plan) == _c10d.Verdict.format_exact
        with pytest.raises(ValueError, match="as was planned"):
            plan.run(whole[:1000], own[:500])
        with pytest.raises(ValueError, match=r"expected a tensor of 2000 Float on cpu, as was planned, got .* on meta"):
            plan.run(torch.ones(2000, device="meta"), own)
        with pytest.raises(ValueError, match=r"input: expected a contiguous tensor on cpu, got strides \[1\] on meta"):
            plan.run(whole, torch.ones(1000, device="meta"))
        with pytest.raises(ValueError, match=r"secondary: expected .* got 7 contiguous"):
            plan.bound_to(torch.empty(7, dtype=torch.uint8)).run(whole)
        with pytest.raises(ValueError, match="input: expected a tensor, as nothing is kept, got none"):
            plan.run(whole)
        fields: dict[str, Any]
        for fields in ({"feedback": BlockFormat("int8:128")}, {"compared": True}):
            with pytest.raises(ValueError, match="op: expected one, as feedback and compared are for reductions"):
                backend.plan(whole, own, **fields)
        with pytest.raises(ValueError, match="op: expected none, as again and leaves_wires are for gathers"):
            backend.plan(own, whole, dist.ReduceOp.SUM, again=True)
        with pytest.raises(ValueError, match="op: expected none, got one"):
            plan.run(whole, own, dist.ReduceOp.SUM)
        wires = torch.empty(plan.wires_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match="wires: expected exactly one of wires and output, got both"):
            plan.run(whole, own, wires=wires)
        with pytest.raises(ValueError, match=f"wires: expected {len(wires)} contiguous Byte on cpu, got 7"):
            plan.run(None, own, wires=wires[:7])
        with pytest.raises(ValueError, match="input: expected 1000 Float, as was planned, got 7 Float"):
            plan.run(None, own[:7], wires=wires)
        with pytest.raises(ValueError, match=f"wires: expected {len(wires)} contiguous Byte on cpu, got 7"):
            plan.decode(whole, wires[:7])
        lossless = backend.plan_lossless(whole.bfloat16(), own.bfloat16())
        with pytest.raises(ValueError, match="wires: expected a gather in a format, got "):
            lossless.run(None, own.bfloat16(), wires=wires)
        del backend
        dist.destroy_process_group(group)
        del group
        with pytest.raises(RuntimeError, match="was destroyed"):
            plan.run(whole, own)

    run(body)


def test_a_plan_in_one_hop_is_no_plan_of_a_gather_that_repeats(tmp_path: Path) -> None:
    """A rank that keeps what it gathers takes two hops, so that each wire enters a node once."""
    one_hop = table(tmp_path, (1.0, 0.9, 0.5))

    def body() -> None:
        backend = backend_of()
        whole = torch.ones(4 * 1000)
        own = whole[dist.get_rank() * 1000 :][:1000]
        first = backend.plan(whole, own)
        again = backend.plan(whole, own, again=True, like=first)
        assert again is not first
        assert backend.plan(whole, own, like=first) is first
        assert backend.plan(whole, own, again=True, like=again) is again

    run(body, 4, nodes=NODES, options=options(compress="auto", decisions=one_hop, min_bytes=0))


def test_calls_of_all_plans_refuse_other_layouts() -> None:
    """Such calls would read and write beyond the end of the tensor."""

    def body() -> None:
        backend, rank = backend_of(), dist.get_rank()
        whole, half = torch.ones(2000), torch.ones(2000, dtype=torch.bfloat16)
        own, own_half = whole[rank * 1000 :][:1000], half[rank * 1000 :][:1000]
        strided, strided_half = torch.ones(4000)[::2], torch.ones(4000, dtype=torch.bfloat16)[::2]
        gather, total = backend.plan(whole, own), dist.ReduceOp.SUM
        reduce, all_reduce = backend.plan(own, whole, total), backend.plan(whole, op=total)
        differences = backend.plan_lossless(half, own_half)
        held = differences.bound_to(torch.zeros(differences.secondary_bytes, dtype=torch.uint8))
        secondary = gather.bound_to(torch.zeros(gather.secondary_bytes, dtype=torch.uint8))
        for call in (
            lambda: gather.run(strided, own),
            lambda: secondary.run(strided),
            lambda: held.run(strided_half, own_half),
            lambda: held.run(half, strided_half[::2]),
            lambda: held.run(strided_half),
            lambda: reduce.run(own, strided, total),
            lambda: reduce.run(strided[:1000], whole, total),
            lambda: all_reduce.run(strided, op=total),
        ):
            with pytest.raises(ValueError, match=r": expected a contiguous tensor on cpu, got strides \[[24]\]"):
                call()

    run(body, nodes=[0, 1], options=options(min_bytes=0, all_reduce="int8:128"))


def test_parts_of_other_tensors_are_refused() -> None:
    def body() -> None:
        backend, parts = backend_of(), [(900, False), (100, True)]
        out = torch.empty(1000)
        first, second = torch.ones(1800), torch.ones(200)
        with pytest.raises(ValueError, match="input: expected one tensor, or one for each of 2 parts, got 3"):
            backend.plan(out, [first, second, second], dist.ReduceOp.SUM, parts=parts)
        with pytest.raises(ValueError, match="input: expected 1800 Float of part 0, got 200 Float"):
            backend.plan(out, [second, first], dist.ReduceOp.SUM, parts=parts)
        with pytest.raises(ValueError, match="expected 200 Float of part 1, got 200 BFloat16"):
            backend.plan(out, [first, second.bfloat16()], dist.ReduceOp.SUM, parts=parts)
        with pytest.raises(ValueError, match="input: expected dtype BFloat16 as in output, got Float"):
            backend.plan(out.bfloat16(), [first, second], dist.ReduceOp.SUM, parts=parts)
        plan = backend.plan(out, [first, second], dist.ReduceOp.SUM, parts=parts)
        assert isinstance(plan, _c10d.Operation)
        with pytest.raises(ValueError, match="output: expected one tensor, got 2"):
            plan.run([out, out], [first, second], dist.ReduceOp.SUM)
        gather = backend.plan([first, second], [first[:900], second[:100]], parts=parts)
        assert gather is not None
        with pytest.raises(ValueError, match="input: expected 900 Float of part 0, got 100 Float"):
            gather.run([first, second], [second[:100], first[:900]])
        with pytest.raises(ValueError, match="input: expected a tensor of 2000 Float on cpu, as was planned"):
            plan.run(out, [first.bfloat16(), second.bfloat16()], dist.ReduceOp.SUM)

    run(body, nodes=[0, 1], options=options(min_bytes=0))
