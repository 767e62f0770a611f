"""`policy="auto"`: all ranks decide alike, results are those of either way, and what was decided is told.

No test knows which way is faster on the machine that it runs on. Where one must, a calibration that is made up decides.
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
from support.calls import NUM, OPT_INS, data, expect, gather, gather_list, mine, newly_counted, scatter
from support.expected import all_gather, assert_same_bits
from support.fsdp_model import NODES, batch, sharded
from support.worlds import WorldError, options, run

import zcomm
from zcomm.distributed.groups import backend_of
from zcomm.distributed.report import report_of
from zcomm.distributed.stats import Decision

AUTO = zcomm.Options(policy="auto")
SLOW_LINK = {"bytes_per_second": 1e6, "exchange_seconds": 1e-6, "hop_seconds": 1e-6, "message_bytes": 1 << 20}
FAST_LINK = {"bytes_per_second": 1e15, "exchange_seconds": 1e-6, "hop_seconds": 1e-6, "message_bytes": 1 << 20}


def calibration(folder: Path, link: dict[str, float], name: str = "cluster.json", **fields: Any) -> str:
    """A file of a cluster with that link everywhere, and a codec of 1 GB/s."""
    content = {"schema": "zcomm-calibration/1", "intra": link, "inter": link, "codec_bytes_per_second": 1e9}
    (folder / name).write_text(json.dumps(content | fields))
    return str(folder / name)


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
    """Of inputs in place, in-place all-reduces, and random bits, which the calls of a step draw in turn."""

    def body() -> None:
        zcomm.set_step(7)
        whole = gather(mine())
        total = torch.full((2 * NUM,), 1.0 + dist.get_rank())
        dist.all_reduce(total)
        torch.testing.assert_close(total, torch.full((2 * NUM,), 3.0), rtol=0.02, atol=0.0)
        stats = zcomm.stats()
        drawn = [decision.compressed for decision in stats.decisions]
        with zcomm.override(policy="always"):
            after = gather(mine())
            zcomm.set_step(7)
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

    fields = {"all_gather": "int8:256:stochastic", "all_reduce": "int8:128", "telemetry_every": 1}
    run(body, options=zcomm.Options(policy="auto", **fields))


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
def test_a_calibration_decides_without_a_rehearsal(call: str, link: str, tmp_path: Path) -> None:
    """Where the link is slow calls are compressed; where the codec is the slower one they stay exact."""
    file = calibration(tmp_path, SLOW_LINK if link == "slow" else FAST_LINK)

    def body() -> tuple[dict[str, int], list[Decision], int]:
        return newly_counted(CALLS[call]), decided(), zcomm.stats().rehearsals.calls

    found = run(body, options=zcomm.Options(policy="auto", calibration=file, **OPT_INS))
    counted, decisions, rehearsals = same_on_all_ranks(found)
    assert {reason.split(": ")[1] for reason in counted} == {"compressed" if link == "slow" else "no_gain"}
    assert [(one.compressed, one.rounds) for one in decisions] == [(link == "slow", 0)]
    assert rehearsals == 0


def test_ranks_that_read_different_calibrations_decide_alike(tmp_path: Path) -> None:
    """By the slower times of both."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder, link in zip(folders, (SLOW_LINK, FAST_LINK), strict=True):
        folder.mkdir()
        calibration(folder, link)

    def body() -> list[Decision]:
        os.chdir(folders[dist.get_rank()])
        group = dist.new_group(pg_options=zcomm.Options(policy="auto", calibration="cluster.json"))
        whole = torch.zeros(2 * NUM)
        dist.all_gather_single(whole, whole[dist.get_rank() * NUM :][:NUM], group=group)
        return zcomm.stats(group).decisions

    assert [one.compressed for one in same_on_all_ranks(run(body))] == [True]


@pytest.mark.parametrize("planned", [False, True], ids=["by default", "zcomm.fsdp.compress"])
@pytest.mark.parametrize("link", ["slow", "fast", None])
def test_fsdp2_trains_with_what_was_decided(planned: bool, link: str | None, tmp_path: Path) -> None:
    fields = {}
    if link is not None:
        fields["calibration"] = calibration(tmp_path, SLOW_LINK if link == "slow" else FAST_LINK)

    def body() -> tuple[list[Decision], int, int, list[str]]:
        model = sharded()
        if planned:
            zcomm.fsdp.compress(model, all_gather="int4:64")
        for _ in range(2):
            model(batch()).sum().backward()
        stats = zcomm.stats()
        reasons = [*stats.all_gather.exact, *stats.reduce_scatter.exact]
        return stats.decisions, stats.all_gather.calls, stats.reduce_scatter.calls, reasons

    found = run(body, 4, options=options(policy="auto", **fields), nodes=NODES)
    decisions, gathers, reductions, reasons = same_on_all_ranks(found)
    assert {one.format for one in decisions if one.collective == "all_gather"} == {"int4:64" if planned else "int8:256"}
    if link == "slow":
        assert gathers > 0 and reductions > 0 and "no_gain" not in reasons
    if link == "fast":
        assert (gathers, reductions) == (0, 0)


# Where starting an exchange is what takes time, between nodes and inside.
LATENCY = {"bytes_per_second": 1e12, "exchange_seconds": 1e-3, "hop_seconds": 1e-2, "message_bytes": 1 << 20}


@pytest.mark.parametrize("planned", [False, True])
def test_gathers_take_one_hop_where_that_is_faster(planned: bool, tmp_path: Path) -> None:
    """With the bits of two hops. Reductions do not: their bits would be others."""

    def body() -> list[Decision]:
        whole = torch.zeros(4 * NUM)
        own = whole[dist.get_rank() * NUM :][:NUM].copy_(mine())
        if planned:
            plan = backend_of().plan_gather(whole, own)
            assert plan is not None and plan.description.endswith(" in one hop")
            plan.run(whole, own).wait()
        else:
            dist.all_gather_single(whole, own)
        wanted = [data(rank, NUM) for rank in range(4)]
        assert_same_bits(whole, all_gather(wanted, "int8:256"), "gathered")
        scatter(mine(4 * NUM))
        stats = zcomm.stats()
        (hop,) = stats.all_gather.hops
        assert hop.inter_node_bytes == 2 * hop.intra_node_bytes > 0
        assert len(stats.reduce_scatter.hops) == 2
        return stats.decisions

    file = calibration(tmp_path, LATENCY)
    gathers, reductions = same_on_all_ranks(
        run(body, 4, options=zcomm.Options(policy="auto", calibration=file), nodes=NODES)
    )
    assert gathers.compressed and gathers.one_hop and 0 < gathers.one_hop_seconds < gathers.compressed_seconds
    assert "compressed in one hop, as an exact call takes" in str(gathers)
    assert reductions.compressed and not reductions.one_hop and reductions.one_hop_seconds == 0


# Between these nodes a gather gains by compression only if the next one is served by secondary shards.
JUST_TOO_FAST = {**FAST_LINK, "bytes_per_second": 4.4e8}


@pytest.mark.parametrize("rehearsed", [False, True])
def test_later_gathers_from_secondary_shards_count(rehearsed: bool, tmp_path: Path) -> None:
    file = None if rehearsed else calibration(tmp_path, FAST_LINK, inter=JUST_TOO_FAST)

    def body() -> tuple[list[Decision], int]:
        whole = torch.zeros(4 * NUM)
        own = whole[dist.get_rank() * NUM :][:NUM]
        once = backend_of().plan_gather(whole, own)
        twice = backend_of().plan_gather(whole, own, again=True)
        if not rehearsed:
            assert once is None and twice is not None
        return decided(), zcomm.stats().rehearsals.calls

    options = zcomm.Options(policy="auto", calibration=file)
    (once, twice), rehearsals = same_on_all_ranks(run(body, 4, options=options, nodes=NODES))
    assert not once.again and twice.again and ", and again from secondary shards: " in str(twice)
    assert rehearsals == (3 * (once.rounds + 1) + 4 * (twice.rounds + 1) if rehearsed else 0)


def test_fsdp2_says_which_gathers_come_again(tmp_path: Path) -> None:
    """Those of modules that are resharded after the forward pass. The root is not."""
    file = calibration(tmp_path, SLOW_LINK)

    def body() -> tuple[set[bool], set[bool]]:
        model = sharded()
        model(batch()).sum().backward()
        before = {one.again for one in decided() if one.collective == "all_gather"}
        zcomm.fsdp.enable_secondary_shards(model)
        model(batch()).sum().backward()
        return before, {one.again for one in decided() if one.collective == "all_gather"}

    found = run(body, 4, options=options(policy="auto", calibration=file), nodes=NODES)
    assert same_on_all_ranks(found) == ({False}, {False, True})


def test_decisions_are_reported(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    file = calibration(tmp_path, SLOW_LINK)

    def body() -> list[str]:
        gather(mine())
        assert "auto: all_gather of 256 KiB and more" in str(zcomm.stats())
        assert not [name for name in zcomm.metrics() if "decisions" in name]
        zcomm.report(json=tmp_path / f"{dist.get_rank()}.json")
        found: list[str] = json.loads((tmp_path / f"{dist.get_rank()}.json").read_text())["decisions"]
        return found

    (line,) = same_on_all_ranks(run(body, options=zcomm.Options(policy="auto", calibration=file, telemetry_every=1)))
    assert line.startswith(
        "all_gather of 256 KiB and more, float32 in int8:256: compressed, as an exact call takes 131 "
    )
    assert line.endswith("by the calibration")


def test_the_user_has_the_last_word() -> None:
    """exact() is not asked about; a policy of an override counts inside of it."""

    def body() -> None:
        with zcomm.exact():
            assert newly_counted(lambda: gather(mine())) == {"all_gather: format_exact": 1}
        with zcomm.override(policy="always"):
            assert newly_counted(lambda: gather(mine())) == {"all_gather: compressed": 1}
        assert newly_counted(lambda: gather(mine(64))) == {"all_gather: min_bytes": 1}
        assert decided() == [] and zcomm.stats().rehearsals.calls == 0

    run(body, options=AUTO)


def test_ranks_that_call_different_things_are_told() -> None:
    def body() -> None:
        num = NUM * (1 + dist.get_rank())
        expect(zcomm.Error, f"got an all_gather of {8 * num} bytes of float32", lambda: gather(mine(num)))

    run(body, options=AUTO)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "calibration: .*expected a calibration file"),
        ('{"schema": "another"}', "calibration: .*expected the schema 'zcomm-calibration/1', got 'another'"),
    ],
)
def test_a_wrong_file_is_refused_when_the_group_is_made(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(content)
    with pytest.raises(WorldError, match=text):
        run(lambda: None, options=zcomm.Options(policy="auto", calibration=str(tmp_path / "cluster.json")))


def test_what_a_calibration_cannot_predict_is_refused(tmp_path: Path) -> None:
    def uneven() -> None:
        expect(RuntimeError, "expected nodes with equally many ranks in the group, got [1, 2]", lambda: gather(mine()))

    def unmeasured() -> None:
        expect(RuntimeError, "expected 'inter' in it, as this group has 2 nodes of 1 ranks", lambda: gather(mine()))

    def without_codec() -> None:
        expect(RuntimeError, "expected 'codec_bytes_per_second' in it", lambda: gather(mine()))

    auto = {"policy": "auto", "calibration": calibration(tmp_path, SLOW_LINK)}
    run(uneven, 3, options=zcomm.Options(**auto), nodes=[0, 0, 1])
    content = json.loads(Path(auto["calibration"]).read_text())
    for missing, body in (("inter", unmeasured), ("codec_bytes_per_second", without_codec)):
        rest = {name: value for name, value in content.items() if name != missing}
        Path(auto["calibration"]).write_text(json.dumps(rest))
        run(body, 2, options=zcomm.Options(**auto), nodes=[0, 1])
