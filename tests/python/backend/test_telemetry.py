"""Compression errors in zcomm.report(), compared with the NumPy reference of the codec."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.training import make_batch, make_model
from support.worlds import options, run, sampling
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm.distributed import report
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm_bench import reference

PIECE = 16384  # elements of a sample
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def values(numel: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    """Gaussian, with a block's worth of zeros and a large value, so that some others become 0."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    tensor = torch.randn(numel, generator=generator)
    tensor[64:320] = 0
    tensor[-7] = 200.0
    return tensor.to(dtype)


def gather(shard: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, Any]:
    """All-gather of ``shard``, in place as FSDP2 does it."""
    whole = torch.zeros(dist.get_world_size() * shard.numel(), dtype=shard.dtype)
    own = whole.view(-1, shard.numel())[dist.get_rank()]
    own.copy_(shard)
    return whole, dist.all_gather_into_tensor(whole, own, **fields)


def scatter(whole: torch.Tensor, **fields: Any) -> tuple[torch.Tensor, Any]:
    output = torch.zeros(whole.numel() // dist.get_world_size(), dtype=whole.dtype)
    return output, dist.reduce_scatter_tensor(output, whole, **fields)


def losses() -> list[dict[str, Any]]:
    return backend_of().quantization_errors()


def numpy_of(tensor: torch.Tensor) -> Any:
    """Return values as the reference takes them: bfloat16 as bit patterns."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def expected(sample: torch.Tensor, format: str, decoded: torch.dtype) -> dict[str, float]:
    """Compute the errors of the finite ``sample`` in NumPy and float64, block by block."""
    source = numpy_of(sample)
    wire = reference.encode(source, format)
    result = reference.decode(wire, format, source.size, DTYPES[decoded], wire_dtype=DTYPES[sample.dtype])
    x, y = (reference.widen(array).astype(np.float64) for array in (source, result))
    block = reference.parse_format(format).block_size or 256
    starts = range(0, x.size, block)
    by_block = [
        np.abs(y[i : i + block] - x[i : i + block]).max() / (np.abs(x[i : i + block]).max() or 1.0) for i in starts
    ]
    return {
        "elements": x.size,
        "blocks": len(starts),
        "finite_blocks": len(starts),
        "nonzero": np.count_nonzero(x),
        "zeroed": np.count_nonzero((x != 0) & (y == 0)),
        "signal": math.fsum(x * x),
        "noise": math.fsum((y - x) ** 2),
        "block_errors": math.fsum(by_block),
        "largest_block_error": max(by_block),
    }


def assert_measured(loss: dict[str, Any], *wanted: dict[str, float]) -> None:
    """``loss`` is the sum of ``wanted``, up to the order of additions of float64."""
    for name in wanted[0]:
        join = max if name.startswith("largest") else math.fsum
        # Sums of n terms of one sign: off by n half units in the last place at most, however they are ordered.
        bound = 0.0 if name.startswith("largest") else 2.0**-53 * PIECE * 4
        assert loss[name] == pytest.approx(join(one[name] for one in wanted), rel=bound, abs=0), (name, loss)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_losses_are_those_of_the_numpy_reference(dtype: torch.dtype) -> None:
    """Every collective, several formats, a short last block."""

    def body() -> None:
        numel = 5003
        for format in ["int8:256", "int4:32", *(["bf16"] if dtype == torch.float32 else [])]:
            with zcomm.override(all_gather=format, reduce_scatter=format, all_reduce=format):
                gather(values(numel, dtype))
                scatter(values(2 * numel, dtype))
                dist.all_reduce(values(numel, dtype))
            rows = {loss["collective"]: loss for loss in losses() if loss["format"] == format}
            other = slice((1 - dist.get_rank()) * numel, (2 - dist.get_rank()) * numel)
            assert_measured(rows["all_gather"], expected(values(numel, dtype), format, dtype))
            assert_measured(rows["reduce_scatter"], expected(values(2 * numel, dtype)[other], format, torch.float32))
            assert_measured(rows["all_reduce"], expected(values(numel, dtype), format, torch.float32))
            assert [rows[name]["hop"] for name in ("all_gather", "reduce_scatter")] == ["all", "intra_node"]

    run(body, options=options(all_reduce="int8:32"), env=sampling())


@pytest.mark.parametrize(
    ("nodes", "intra_node", "inter_node"),
    [
        ([0, 0, 1, 1], [1, 3], [2, 2]),  # two hops: first to the local rank of the owner
        ([0, 1, 2], [], [1, 2]),
        ([0, 0, 1], [1, 1], [2, 2]),
    ],
    ids=str,
)
def test_hops_are_measured_on_the_slots_that_take_them(
    nodes: list[int], intra_node: list[int], inter_node: list[int]
) -> None:
    """Two calls of rank 0 sample one slot after the other, each in the format of its hop."""

    def body() -> None:
        numel = 3000
        whole = values(len(nodes) * numel)
        scatter(whole.clone())
        scatter(whole.clone())
        if dist.get_rank() != 0:
            return
        rows = {loss["hop"]: loss for loss in losses()}
        slots = {"intra_node": intra_node, "inter_node": inter_node}
        formats = {"intra_node": "int8:64", "inter_node": "int4:128"}
        assert {hop: row["format"] for hop, row in rows.items()} == {hop: formats[hop] for hop in slots if slots[hop]}
        for hop, row in rows.items():
            samples = [whole[slot * numel : (slot + 1) * numel] for slot in slots[hop]]
            assert_measured(row, *(expected(sample, row["format"], torch.float32) for sample in samples))

    run(body, len(nodes), nodes=nodes, options=options(reduce_scatter="int8:64/int4:128"), env=sampling())


def test_every_third_call_of_a_site_is_sampled_one_piece_after_the_other() -> None:
    def body() -> None:
        shard = values(2 * PIECE + 500)
        small = values(300)
        for _ in range(8):
            gather(shard)
        for _ in range(2):
            gather(small)
        rows = {loss["elements"]: loss for loss in losses()}
        assert {row["calls"]: row["samples"] for row in rows.values()} == {8: 3, 2: 1}
        pieces = [shard[:PIECE], shard[PIECE : 2 * PIECE], shard[2 * PIECE :]]
        assert_measured(rows[shard.numel()], *(expected(piece, "int8:256", torch.float32) for piece in pieces))

    run(body, options=options(), env=sampling(3))


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_blocks_that_are_not_finite_are_counted_and_left_out(dtype: torch.dtype) -> None:
    def body() -> None:
        shard = values(4 * 256, dtype)
        finite = torch.cat([shard[:256], shard[768:]])
        shard[300] = math.nan
        shard[600] = -math.inf
        gather(shard)
        wanted = expected(finite, "int8:256", dtype)
        assert_measured(losses()[0], {**wanted, "elements": 1024, "blocks": 4})
        (site,) = zcomm.report().all_gather
        assert site.nonfinite_blocks == 0.5
        assert site.snr_db == pytest.approx(10 * math.log10(wanted["signal"] / wanted["noise"]))
        assert site.reasons == ["50.00% of the blocks hold or decode to a NaN or an infinity"]

    run(body, options=options(), env=sampling())


def test_blocks_that_decode_to_infinity_are_left_out() -> None:
    """bf16 rounds the largest float32, as in a mask of attention, to infinity."""

    def body() -> None:
        shard = torch.ones(4 * 256)
        shard[300] = torch.finfo(torch.float32).max
        gather(shard)
        (site,) = zcomm.report().all_gather
        assert 0 < site.nonfinite_blocks < 1 and site.largest_block_error == 0
        assert "decode to a NaN or an infinity" in site.reasons[0]

    run(body, options=options(all_gather="bf16"), env=sampling())


def test_sites_are_told_apart_by_name_size_type_and_format() -> None:
    def body() -> None:
        gather(values(400))
        gather(values(400, torch.bfloat16))
        with zcomm.override(all_gather="int4:64"):
            gather(values(400))
        with zcomm.exact():
            gather(values(500))
        scatter(values(800))
        whole = torch.zeros(800)
        own = whole[dist.get_rank() * 400 :][:400]
        parts = [(300, False), (50, True), (50, False)]
        site = _c10d.Site("head", ["weight", "scale"])
        plan = backend_of().plan(whole, own, parts=parts)
        assert isinstance(plan, _c10d.Operation)
        plan.run(whole, own, site=site).wait()
        assert [(row["collective"], row["site"], row["format"], row["calls"]) for row in losses()] == [
            ("all_gather", "all_gather of 800 bfloat16", "int8:256", 1),
            ("all_gather", "all_gather of 800 float32", "int4:64", 2),
            ("all_gather", "all_gather of 800 float32", "int8:256", 2),
            ("all_gather", "head.scale", "int8:256", 1),
            ("all_gather", "head.weight", "int8:256", 1),
            ("reduce_scatter", "reduce_scatter of 800 float32", "int8:128", 1),
        ]

    run(body, options=options(), env=sampling())


def test_sizes_without_end_share_a_site() -> None:
    """A program whose batches differ has a new one in each step."""

    def body() -> None:
        for numel in range(1, 1003):
            gather(torch.ones(numel))
        gather(torch.ones(1))
        rows = {row["site"]: row["calls"] for row in losses()}
        assert len(rows) == 1001
        assert rows["all_gather of 2 float32"] == 2 and rows["all_gather of 2000 float32"] == 1
        assert rows["all_gather of other sizes"] == 2

    run(body, options=options(), env=sampling(10000))


def test_secondary_shards_name_their_modules() -> None:
    def body() -> None:
        model = make_model()
        for block in [*model, model]:
            fully_shard(block)
        zcomm.fsdp.compress(model)
        model(make_batch(dist.get_rank())[0])
        names = {row["site"] for row in losses() if row["collective"] == "all_gather"}
        assert {"0", "1"} <= {name.partition(".")[0] for name in names}

    run(body, options=options(), env=sampling())


def test_nothing_is_sampled_unless_it_is_asked_for() -> None:
    def body() -> None:
        gather(values(400))
        assert losses() == []
        with pytest.raises(ValueError, match=r"expected one that takes samples .* ZCOMM_SAMPLE_ERRORS_EVERY=100"):
            zcomm.report()

    run(body, options=options())


def test_the_environment_switches_it_on_for_groups_too() -> None:
    def body() -> None:
        group = dist.new_group([0, 1])
        dist.barrier(group)
        assert backend_of(group).options.sample_errors_every == 7

    run(body, env=sampling(7))


@pytest.mark.parametrize("text", ["-1", "1.5", "often", "", "9" * 19])
def test_a_wrong_variable_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_SAMPLE_ERRORS_EVERY", text)
    with pytest.raises(ValueError, match=f"^ZCOMM_SAMPLE_ERRORS_EVERY: expected a whole number .* got '{text}'$"):
        dist.init_process_group("zcomm", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1, 1]], ids=str)
def test_results_are_the_same_bits_with_and_without(nodes: list[int]) -> None:
    """Calls in progress during a sample or a report have the same bits, too."""

    def body() -> None:
        fields = {"all_reduce": "int8:64/int4:64", "min_bytes": 1, "forms": "single"}
        groups = []
        for every in (0, 1):
            os.environ.update(sampling(every))
            groups.append(dist.new_group(pg_options=zcomm.Options(**fields)))
        numel = 70001
        results = []
        for group in groups:
            reduced = values(numel)
            gathered, first = gather(values(numel, torch.bfloat16), group=group, async_op=True)
            scattered, second = scatter(values(len(nodes) * numel), group=group, async_op=True)
            third = dist.all_reduce(reduced, group=group, async_op=True)
            if group is groups[1]:
                zcomm.report(group)
            for work in (first, second, third):
                work.wait()
            again = values(numel)
            dist.all_reduce(again, group=group)
            results.append([gathered, scattered, reduced, again])
        assert all(torch.equal(off, on) for off, on in zip(*results, strict=True))
        assert {row["samples"] for row in backend_of(groups[1]).quantization_errors()} == {1, 2}
        assert backend_of(groups[0]).quantization_errors() == []

    run(body, len(nodes), nodes=nodes)


def test_the_report_names_what_is_worth_exempting(tmp_path: Path) -> None:
    """One of five equal sites has blocks in which one value dominates the others."""

    def body() -> tuple[list[str], str, str]:
        for numel in (1024, 2048, 4096, 8192):
            gather(torch.randn(numel))
        bad = torch.randn(3072)
        bad[::256] = 1e4
        gather(bad)
        scatter(torch.ones(2048))
        path = tmp_path / f"rank{dist.get_rank()}.json"
        made = zcomm.report(json=path)
        return made.advice, path.read_text(), str(made)

    for rank, (advice, text, printed) in enumerate(run(body, options=options(), env=sampling())):
        named = "all_gather of 6144 float32"
        assert advice == [
            f"{named}: to exempt its all_gather, name it in the exempt= of zcomm.fsdp.compress (FSDP2), call it in "
            "`with zcomm.override(all_gather='exact'):` on all ranks, or in a group made with "
            "pg_options=zcomm.Options(all_gather='exact')"
        ]
        written = json.loads(text)
        assert list(written) == [
            "zcomm", "rank", "every", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "gather", "scatter",
            "broadcast",
            "advice", "decisions",
        ]  # fmt: skip
        assert (written["rank"], written["every"], written["all_reduce"]) == (rank, 1, [])
        assert [site["site"] for site in written["all_gather"] if site["reasons"]] == [named]
        (bad,) = (site for site in written["all_gather"] if site["site"] == named)
        assert list(bad) == [
            "site", "hop", "format", "calls", "samples", "elements", "snr_db", "largest_block_error",
            "mean_block_error", "zeroed", "nonfinite_blocks", "reasons",
        ]  # fmt: skip
        assert bad["zeroed"] == 255 / 256
        assert bad["reasons"] == ["99.6% of the values become 0"]
        # int8 codes of equal values are exact but for the rounding of the scale, which is that of bfloat16.
        (ones,) = written["reduce_scatter"]
        assert ones["largest_block_error"] <= 2**-8
        assert ones["zeroed"] == 0.0
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{named}  "))
        assert line.endswith("because 99.6% of the values become 0")


def test_a_low_signal_to_noise_ratio_is_a_reason() -> None:
    """A value of 20 in each block of a gaussian: some 7 times the scale, 4 dB more signal."""

    def body() -> list[list[str]]:
        for numel in (1024, 2048, 4096):
            gather(torch.randn(numel))
        spread = torch.randn(8192)
        spread[::256] = 20.0
        gather(spread)
        return [site.reasons for site in zcomm.report().all_gather]

    for reasons in run(body, options=options(), env=sampling()):
        (named,) = [index for index, those in enumerate(reasons) if those]
        assert named == 0  # "all_gather of 16384", the first by name
        assert len(reasons[0]) == 1 and "dB below the median of int8:256" in reasons[0][0]


def test_what_loses_nothing_has_no_ratio() -> None:
    """Zeros, and values that bfloat16 holds; the report can be printed and written for them."""

    def body() -> None:
        gather(torch.zeros(400))
        with zcomm.override(all_gather="bf16"):
            gather(torch.arange(200.0))
        made = zcomm.report()
        assert str(made)
        assert [(site.snr_db, site.largest_block_error, site.reasons) for site in made.all_gather] == [
            (None, 0.0, [])
        ] * 2

    run(body, options=options(), env=sampling())


def test_means_are_over_finite_blocks_and_medians_over_one_hop() -> None:
    loss = {"site": "a", "hop": "all", "format": "int8:256", "calls": 1, "samples": 1, "elements": 8, "signal": 1.0}
    loss |= {"noise": 0.1, "largest_block_error": 0.5, "block_errors": 1.0, "finite_blocks": 2, "blocks": 4}
    loss |= {"zeroed": 0, "nonzero": 8}
    assert report._site_of(loss).mean_block_error == 0.5
    wide = [report._site_of({**loss, "hop": "inter_node", "finite_blocks": 4, "noise": 1e-3}) for _ in range(5)]
    narrow = report._site_of({**loss, "hop": "intra_node", "finite_blocks": 4})
    assert report._advise("reduce_scatter", [*wide, narrow]) == []
