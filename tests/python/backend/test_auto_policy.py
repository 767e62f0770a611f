"""`compress="auto"`: all ranks decide alike, results are those of either way, and what was decided is told.

No test knows which way is faster on the machine that it runs on. Where one must, a table that is made up decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, OPT_INS, data, expect, gather, gather_in_place, gather_list, mine, newly_counted, scatter
from support.decisions import FAST_LINK, SLOW_LINK, row, table
from support.expected import all_gather, assert_same_bits
from support.fsdp_model import NODES, batch, sharded
from support.worlds import options, run, sampling

import zcomm
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.report import report_of
from zcomm.distributed.stats import Decision

AUTO = zcomm.Options(compress="auto", min_bytes=1 << 16)  # whatever link this machine has


def decided() -> list[Decision]:
    return zcomm.stats().decisions


def same_on_all_ranks(found: list[Any]) -> Any:
    assert all(one == found[0] for one in found)
    return found[0]


def test_all_ranks_decide_alike_and_once() -> None:
    """The first call of a class rehearses both ways on scratch; the next ones do as was decided."""

    def body() -> tuple[list[Decision], int]:
        for turn in range(3):
            whole = gather(mine(seed=turn))
            wanted = [data(rank, NUM, seed=turn) for rank in range(4)]
            compressed = decided()[0].compressed
            assert_same_bits(whole, all_gather(wanted, "int8:256") if compressed else torch.cat(wanted), "gathered")
        scatter(mine(4 * NUM))
        scatter(mine(4 * NUM), dist.ReduceOp.AVG)
        gather(mine(4 * NUM))  # another size
        gather(mine(dtype=torch.bfloat16))
        with zcomm.override(all_gather="int4:128"):
            gather(mine())
        assert zcomm.report().decisions == [str(decision) for decision in decided()]
        return decided(), zcomm.stats().rehearsals.calls

    decisions, rehearsals = same_on_all_ranks(run(body, 4, options=AUTO, nodes=NODES))
    assert [(one.collective, one.dtype, one.least_bytes, one.format) for one in decisions] == [
        ("all_gather", "float32", 16 * NUM, "int8:256"),
        ("reduce_scatter", "float32", 16 * NUM, "int8:128/int4:128"),
        ("all_gather", "float32", 64 * NUM, "int8:256"),
        ("all_gather", "bfloat16", 8 * NUM, "int8:256"),
        ("all_gather", "float32", 16 * NUM, "int4:128"),
    ]
    assert all(one.rounds > 0 and one.exact_seconds > 0 and one.compressed_seconds > 0 for one in decisions)
    for one in decisions:
        assert one.one_hop == (one.one_hop_seconds > 0 and one.compressed_seconds >= 1.03 * one.one_hop_seconds)
        fastest = one.one_hop_seconds if one.one_hop else one.compressed_seconds
        assert one.compressed == (one.exact_seconds >= 1.03 * fastest)
    # The first round is not counted. Gathers of several nodes of several ranks have a third way.
    ways = [3 if one.collective == "all_gather" else 2 for one in decisions]
    assert all((one.one_hop_seconds > 0) == (way == 3) for one, way in zip(decisions, ways, strict=True))
    assert rehearsals == sum(way * (one.rounds + 1) for one, way in zip(decisions, ways, strict=True))


def test_rehearsals_change_no_tensor_no_seed_and_no_counter_but_their_own() -> None:
    """Checks inputs in place, in-place all-reduces, and random bits, which the calls of a step draw in turn."""

    def body() -> None:
        zcomm.codec.set_step(7)
        whole = gather(mine())
        total = torch.full((2 * NUM,), 1.0 + dist.get_rank())
        dist.all_reduce(total)
        torch.testing.assert_close(total, torch.full((2 * NUM,), 3.0), rtol=0.02, atol=0.0)
        stats = zcomm.stats()
        drawn = [decision.compressed for decision in stats.decisions]
        with zcomm.override(compress="always"):
            after = gather(mine())
            zcomm.codec.set_step(7)
            drawn_alone = [gather(mine()) for _ in range(sum(drawn) + 1)]
        assert_same_bits(after, drawn_alone[-1], "after rehearsals")
        exactly = torch.cat([data(rank, NUM) for rank in range(2)])
        assert_same_bits(whole, drawn_alone[0] if drawn[0] else exactly, "gathered")
        sampled = report_of(backend_of()).all_gather
        assert sum(site.calls for site in sampled) == zcomm.stats().all_gather.calls
        assert stats.others.calls == 0 and stats.all_gather.calls == int(drawn[0])
        sent = stats.rehearsals
        assert sent.bytes == sum(2 * (decision.rounds + 1) * 8 * NUM for decision in stats.decisions)
        assert 0 < sent.intra_node_bytes < sent.bytes and sent.inter_node_bytes == 0

    fields = {"all_gather": "int8:256:stochastic", "all_reduce": "int8:128"}
    run(body, options=zcomm.Options(compress="auto", min_bytes=1 << 16, **fields), env=sampling())


CALLS: dict[str, Callable[[], Any]] = {
    "list": gather_list,
    "asynchronous": lambda: [
        work.wait() for work in [dist.all_gather_single(torch.empty(2 * NUM), mine(), async_op=True) for _ in range(4)]
    ],
    "coalesced": lambda: dist.all_reduce_coalesced([mine(), mine()]),
    "all-reduce": lambda: dist.all_reduce(mine()),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("link", ["slow", "fast"])
def test_a_table_decides_without_a_rehearsal(call: str, link: str, tmp_path: Path) -> None:
    """Calls are compressed over a slow link, and stay exact if the codec is slower."""
    file = table(tmp_path, SLOW_LINK if link == "slow" else FAST_LINK)

    def body() -> tuple[dict[str, int], list[Decision], int]:
        return newly_counted(CALLS[call]), decided(), zcomm.stats().rehearsals.calls

    found = run(body, options=zcomm.Options(compress="auto", decisions=file, **OPT_INS))
    counted, decisions, rehearsals = same_on_all_ranks(found)
    assert {reason.split(": ")[1] for reason in counted} == {"compressed" if link == "slow" else "no_gain"}
    assert [(one.compressed, one.rounds) for one in decisions] == [(link == "slow", 0)]
    assert rehearsals == 0


def test_ranks_that_read_different_tables_decide_alike(tmp_path: Path) -> None:
    """Ranks use the slower times of both files."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder, seconds in zip(folders, ((1.0, 0.5, 0.0), (0.2, 0.6, 0.0)), strict=True):
        folder.mkdir()
        table(folder, seconds)

    def body() -> list[Decision]:
        os.chdir(folders[dist.get_rank()])
        group = dist.new_group(pg_options=zcomm.Options(compress="auto", decisions="cluster.json"))
        whole = torch.zeros(2 * NUM)
        gather_in_place(whole, group)
        return zcomm.stats(group).decisions

    assert [one.compressed for one in same_on_all_ranks(run(body))] == [True]


@pytest.mark.parametrize("planned", [False, True], ids=["by default", "zcomm.fsdp.compress"])
@pytest.mark.parametrize("link", ["slow", "fast", None])
def test_fsdp2_trains_with_what_was_decided(planned: bool, link: str | None, tmp_path: Path) -> None:
    fields = {}
    if link is not None:
        fields["decisions"] = table(tmp_path, SLOW_LINK if link == "slow" else FAST_LINK)

    def body() -> tuple[list[Decision], int, int, list[str]]:
        model = sharded()
        if planned:
            zcomm.fsdp.compress(model, weights="int4:64")
        for _ in range(2):
            model(batch()).sum().backward()
        stats = zcomm.stats()
        reasons = [*stats.all_gather.exact, *stats.reduce_scatter.exact]
        return stats.decisions, stats.all_gather.calls, stats.reduce_scatter.calls, reasons

    found = run(body, 4, options=options(compress="auto", **fields), nodes=NODES)
    decisions, gathers, reductions, reasons = same_on_all_ranks(found)
    assert {one.format for one in decisions if one.collective == "all_gather"} == {"int4:64" if planned else "int8:256"}
    if link == "slow":
        assert gathers > 0 and reductions > 0 and "no_gain" not in reasons
    if link == "fast":
        assert (gathers, reductions) == (0, 0)


@pytest.mark.parametrize("planned", [False, True])
def test_gathers_take_one_hop_where_that_is_faster(planned: bool, tmp_path: Path) -> None:
    """One-hop gathers have the bits of two hops. Reductions keep two hops, as their bits would differ."""

    def body() -> list[Decision]:
        whole = torch.zeros(4 * NUM)
        own = whole[dist.get_rank() * NUM :][:NUM].copy_(mine())
        if planned:
            plan = backend_of().plan(whole, own)
            assert isinstance(plan, _c10d.Operation) and plan.description.endswith(" in one hop")
            plan.run(whole, own).wait()
        else:
            gather_in_place(whole)
        wanted = [data(rank, NUM) for rank in range(4)]
        assert_same_bits(whole, all_gather(wanted, "int8:256"), "gathered")
        scatter(mine(4 * NUM))
        stats = zcomm.stats()
        (hop,) = stats.all_gather.hops
        assert hop.inter_node_bytes == 2 * hop.intra_node_bytes > 0
        assert len(stats.reduce_scatter.hops) == 2
        return stats.decisions

    file = table(tmp_path, (1.0, 0.9, 0.5))
    gathers, reductions = same_on_all_ranks(
        run(body, 4, options=zcomm.Options(compress="auto", decisions=file), nodes=NODES)
    )
    assert gathers.compressed and gathers.one_hop and 0 < gathers.one_hop_seconds < gathers.compressed_seconds
    assert "compressed in one hop, as an exact call takes" in str(gathers)
    assert reductions.compressed and not reductions.one_hop and reductions.one_hop_seconds == 0


@pytest.mark.parametrize("rehearsed", [False, True])
def test_later_gathers_from_secondary_shards_count(rehearsed: bool, tmp_path: Path) -> None:
    once_and_twice = [row(FAST_LINK, "all_gather", "int8:256"), row(SLOW_LINK, "all_gather", "int8:256", again=True)]
    file = None if rehearsed else table(tmp_path, once_and_twice)

    def body() -> tuple[list[Decision], int]:
        whole = torch.zeros(4 * NUM)
        own = whole[dist.get_rank() * NUM :][:NUM]
        once = backend_of().plan(whole, own)
        twice = backend_of().plan(whole, own, again=True)
        if not rehearsed:
            assert once == _c10d.Verdict.no_gain and isinstance(twice, _c10d.Operation)
        return decided(), zcomm.stats().rehearsals.calls

    options = zcomm.Options(compress="auto", decisions=file)
    (once, twice), rehearsals = same_on_all_ranks(run(body, 4, options=options, nodes=NODES))
    assert not once.again and twice.again and ", and again from secondary shards: " in str(twice)
    assert rehearsals == (3 * (once.rounds + 1) + 4 * (twice.rounds + 1) if rehearsed else 0)


def test_fsdp2_says_which_gathers_come_again(tmp_path: Path) -> None:
    """Modules that are resharded after the forward pass gather again. The root does not."""
    file = table(tmp_path, SLOW_LINK)

    def body() -> tuple[set[bool], set[bool]]:
        model = sharded()
        model(batch()).sum().backward()
        before = {one.again for one in decided() if one.collective == "all_gather"}
        zcomm.fsdp.compress(model)
        model(batch()).sum().backward()
        return before, {one.again for one in decided() if one.collective == "all_gather"}

    found = run(body, 4, options=options(compress="auto", decisions=file), nodes=NODES)
    assert same_on_all_ranks(found) == ({False}, {False, True})


def test_decisions_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    file = table(tmp_path, SLOW_LINK)

    def body() -> list[str]:
        gather(mine())
        assert "auto: all_gather of 256 KiB and more" in str(zcomm.stats())
        assert not [name for name in zcomm.stats().to_dict() if "decisions" in name]
        zcomm.report(json=tmp_path / f"{dist.get_rank()}.json")
        found: list[str] = json.loads((tmp_path / f"{dist.get_rank()}.json").read_text())["decisions"]
        return found

    made = zcomm.Options(compress="auto", decisions=file)
    (line,) = same_on_all_ranks(run(body, options=made, env=sampling()))
    assert line.startswith("all_gather of 256 KiB and more, float32 in int8:256: compressed, as an exact call takes ")
    assert line.endswith("by the table of decisions")


def test_the_user_has_the_last_word() -> None:
    """exact() is not asked about; a policy of an override counts inside of it."""

    def body() -> None:
        with zcomm.exact():
            assert newly_counted(lambda: gather(mine())) == {"all_gather: format_exact": 1}
        with zcomm.override(compress="always"):
            assert newly_counted(lambda: gather(mine())) == {"all_gather: compressed": 1}
        assert newly_counted(lambda: gather(mine(64))) == {"all_gather: min_bytes": 1}
        assert decided() == [] and zcomm.stats().rehearsals.calls == 0

    run(body, options=AUTO)


def test_ranks_that_call_different_things_are_told() -> None:
    def body() -> None:
        num = NUM * (1 + dist.get_rank())
        expect(zcomm.errors.Error, f"got an all_gather of {8 * num} bytes of float32", lambda: gather(mine(num)))

    run(body, options=AUTO)
