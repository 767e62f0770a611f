"""The benchmark: its definitions, its options, and one small run. Nothing here asserts a time."""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import zcomm
from bench import results_file
from zcomm_bench import report as bench_report
from zcomm_bench import report_file
from zcomm_bench.cli import app
from zcomm_bench.run import FIGURES, merge
from zcomm_bench.spec import Spec, algbw, bus_factor, parse_backend, shard_elements, sweep

needs_ranks = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "pyroute2", "zcomm._core")),
    reason="needs torch, pyroute2 and the torch.distributed backend",
)
WIDE = {"COLUMNS": "1000"}  # no line of an error is broken
RECORD_KEYS = {
    *("size", "count", "type", "redop", "backend", "format", "exact_reason", "algbw", "busbw", "ratio", "link_busy"),
    *("launch_medians_us", "hops", *FIGURES),
}


def test_sweeps() -> None:
    assert sweep(8, 64) == [8, 16, 32, 64]
    assert sweep(8, 63, factor=4) == [8, 32]
    assert sweep(1024, 4096, step=1536) == [1024, 2560, 4096]
    for wrong in ((0, 8), (16, 8), (8, 16, 1), (8, 16, 2, 0)):
        with pytest.raises(ValueError, match="expected"):
            sweep(*wrong)


def test_every_size_has_a_shard() -> None:
    assert shard_elements(8, "float", 4) == 1
    assert shard_elements(1 << 20, "bfloat16", 4) == 1 << 17
    # Sizes that round to the same shard are measured once.
    assert Spec("all_gather", [8, 16, 32], nodes="4x1").shards == [1, 2]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    assert algbw(2e9, 0.5) == 4.0
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_reduce", 1) == 0.0


def test_backends_parse() -> None:
    assert parse_backend("gloo") == ("gloo", None)
    assert parse_backend("zcomm=int4:128") == ("zcomm", "int4:128")
    for text in ("nccl", "gloo=int8:32", "zcomm=", ""):
        with pytest.raises(ValueError, match="expected backends"):
            parse_backend(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "int"}, "dtype: expected one of float, bfloat16, half"),
        ({"op": "max"}, "op: expected one of sum, avg"),
        ({"op": "avg"}, "op: expected sum for all_gather, got 'avg'"),
        ({"iters": 0}, "iters: expected at least 1"),
        ({"backends": ["gloo", "gloo"]}, "no backend twice"),
        ({"backends": ["exact_all_to_all"]}, "not for all_gather"),
        ({"nodes": "4"}, "NODESxRANKS"),
        ({"link": "fast"}, "expected a rate"),
        ({"nodes": "65x1"}, "nodes: expected at most 64 behind links, got 65x1"),
        ({"seconds": float("inf")}, "seconds: expected at least 0, and no infinity, got inf"),
    ],
)
def test_a_spec_refuses_what_cannot_be_run(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec("all_gather", [1024], **wrong)  # type: ignore[arg-type]


def test_sums_in_place_stay_finite() -> None:
    """Eight ranks multiply values of up to 10 by 8 in each call: 8^4 is 4096, and half ends at 65504."""
    Spec("all_reduce", [1024], dtype="half", nodes="8x1", calls=4)
    with pytest.raises(ValueError, match="calls: expected at most 4 sums in place, got 5"):
        Spec("all_reduce", [1024], dtype="half", nodes="8x1", calls=5)
    for more in ({"op": "avg"}, {"nodes": "1x1"}):
        Spec("all_reduce", [1024], **{"dtype": "half", "nodes": "8x1", "calls": 50, **more})  # type: ignore[arg-type]
    Spec("reduce_scatter", [1024], dtype="half", nodes="8x1", calls=50)


def sample(**changes: object) -> dict[str, object]:
    """What a rank reports of a size: 1 MB gathered by 4 ranks in 10 ms."""
    figures: dict[str, object] = dict.fromkeys(FIGURES)
    figures |= {"median_us": 10_000.0, "min_us": 9_000.0, "p90_us": 12_000.0, "speedup": 1.0, "calls": 1}
    known = {
        "size": 1_000_000,
        "count": 62_500,
        "backend": "gloo",
        "format": "exact",
        "exact_reason": None,
        "hops": None,
    }
    return {**known, **figures, **changes}


def test_records_merge_launches() -> None:
    spec = Spec("all_gather", [1_000_000], nodes="4x1", link="1gbit", launches=3)
    samples = [sample(median_us=us, wire_bytes=250_000, link_bytes=500_000) for us in (8_000.0, 10_000.0, 30_000.0)]
    record = merge(spec, samples)
    assert record.keys() == RECORD_KEYS
    assert record["median_us"] == 10_000.0
    assert record["launch_medians_us"] == [8_000.0, 10_000.0, 30_000.0]
    assert record["algbw"] == pytest.approx(0.1)
    assert record["busbw"] == pytest.approx(0.075)
    assert record["ratio"] == pytest.approx(3.0)
    assert record["link_busy"] == pytest.approx(0.4)  # 4 Mbit in 10 ms, of 1 Gbit/s
    assert record["hops"] is None
    spread = [sample(min_us=us, max_error=error) for us, error in ((3.0, 0.1), (1.0, None), (4.0, 0.9))]
    assert (merge(spec, spread)["min_us"], merge(spec, spread)["max_error"]) == (1.0, 0.9)
    assert math.isnan(merge(spec, [*spread, sample(max_error=math.nan), *spread])["max_error"])


def test_the_ratio_of_a_broadcast_is_that_of_its_bytes() -> None:
    """Of 4 ranks in a chain the last sends nothing, so that a byte per value is 3/4 of one on average."""
    spec = Spec("broadcast", [1_000_000], nodes="4x1")
    record = merge(spec, [sample(wire_bytes=0.75 * 250_000)])
    assert record["ratio"] == pytest.approx(4.0)
    assert record["busbw"] == record["algbw"]


def test_hops_are_medians_of_launches() -> None:
    launches = [[hop(0.0, 8.0, wait), hop(4.0, 0.0, None)] for wait in (3.0, 9.0, 5.0)]
    record = merge(Spec("all_gather", [1_000_000], launches=3), [sample(hops=hops) for hops in launches])
    assert record["hops"] == [hop(0.0, 8.0, 5.0), hop(4.0, 0.0, None)]


def hop(intra_node: float, inter_node: float, wait_us: float | None) -> dict[str, float | None]:
    return {"intra_node_bytes": intra_node, "inter_node_bytes": inter_node, "wait_us": wait_us}


def test_reports_are_saved_loaded_and_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    spec = Spec("all_gather", [1 << 10, 1 << 20], backends=["gloo", "zcomm"])
    samples = [sample(size=size, backend=name) for size in spec.sizes for name in spec.backends]
    report = {
        "schema": report_file.SCHEMA,
        "command": [],
        "machine": report_file.machine(),
        "note": "",
        "config": dataclasses.asdict(spec),
        "results": [merge(spec, [one]) for one in samples],
    }
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        report_file.save(report, file)
    assert report_file.load(files[0]) == report
    done = CliRunner().invoke(app, ["plot", *map(str, files), "-o", str(tmp_path / "plot.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    seen: list[str] = []
    monkeypatch.setattr(bench_report, "plot", lambda reports, path: seen.extend(reports))
    (tmp_path / "other").mkdir()
    same = tmp_path / "other" / "one.json"
    report_file.save(report, same)
    done = CliRunner().invoke(app, ["plot", *map(str, [*files, same]), "-o", str(tmp_path / "plot.png")])
    assert done.exit_code == 0, done.output
    assert seen == [str(files[0]), "two", str(same)]
    without = json.dumps({name: value for name, value in report.items() if name != "results"})
    for text in ("[]", "{", without):
        files[1].write_text(text)
        done = CliRunner().invoke(app, ["plot", str(files[1]), "-o", str(tmp_path / "plot.png")], env=WIDE)
        assert done.exit_code == 2 and f"{files[1]}: expected a report of zcomm-bench/1" in done.output
    without_times = [{name: value for name, value in one.items() if name != "min_us"} for one in report["results"]]
    for change in ({"config": {**report["config"], "speed": 1}}, {"results": without_times}):
        report_file.save({**report, **change}, files[1])
        done = CliRunner().invoke(app, ["plot", str(files[1]), "-o", str(tmp_path / "plot.png")], env=WIDE)
        assert done.exit_code == 2 and f"{files[1]}: expected a report of " in done.output


@pytest.mark.parametrize("command", [[], ["all_gather"], ["overhead"], ["plot"]])
def test_help(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.output


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (["--op", "max"], "op: "),
        (["-b", "1T"], "--minbytes"),
        (["-e", "1T"], "--maxbytes"),
        (["-i", "1T"], "--stepbytes"),
        (["--backends", "nccl"], "backends"),
        (["--backends", "zcomm=int8"], "all_gather: "),
        (["--backends", "zcomm=exact"], "in a format that compresses"),
        (["--backends", "naive=fp8:64"], "naive: "),
        (["--all-gather", "int4:100"], "all_gather: "),
        (["--link", "fast"], "--link"),
        (["--nodes", "4"], "--nodes"),
        (["--plot", "plot.xyz"], "--plot"),
        (["--json", "."], "--json"),
        (["--all-reduce", "int4:128"], "all_reduce: "),
        (["--backends", "gloo,naive", "--min-bytes", "1"], "min_bytes: "),
        (["--backends", "zcomm=int8:128", "--all-gather", "int4:128"], "all_gather: "),
    ],
)
def test_wrong_options_end_with_the_reason(wrong: list[str], name: str) -> None:
    done = CliRunner().invoke(app, ["all_gather", *wrong], env=WIDE)
    assert done.exit_code == 2
    assert "expected" in done.output and name in done.output


def test_a_folder_that_cannot_be_made_ends_the_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ["all_gather", "--json", str(tmp_path / "file" / "report.json")]
    done = CliRunner().invoke(app, arguments, env=WIDE)
    assert done.exit_code == 2 and "--json" in done.output


def test_the_version_is_shown() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.strip()) == (0, zcomm.__version__)


@needs_ranks
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_step_with_lossless_weights_is_that_with_exact_weights(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "bench" / "training_step.py"
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (kept,) = results_file.load("training_step", tmp_path).values()
    (measurement,) = kept.values()
    assert measurement.facts["turns"] == 3
    ways = {record["way"]: record for record in measurement.records}
    assert list(ways) == ["exact", "int8", "lossless"]
    assert 0 < ways["lossless"]["bits_per_weight"] < 8
    exact, int8, difference = (record["inter_node_bytes"] for record in ways.values())
    if exact is not None:  # None without network namespaces
        assert exact > int8 > difference


@needs_ranks
def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "made" / "report.json"
    options = "--backends gloo,zcomm,exact_all_to_all,naive --nodes 2x1 --link none -n 2 -w 1 -m 1"
    sizes = "-b 8 -e 8K -f 1024 --min-bytes 4096 -d bfloat16 -o avg --reduce-scatter int8:128"
    done = CliRunner().invoke(app, ["reduce_scatter", *options.split(), *sizes.split(), "--json", str(file)])
    assert done.exit_code == 0, done.output
    report = report_file.load(file)
    assert report.keys() == {"schema", "command", "machine", "note", "config", "results"}
    assert json.dumps(report["config"]["sizes"]) == "[8, 8192]"
    records = report["results"]
    assert [record["size"] for record in records] == [8] * 4 + [8192] * 4
    assert [record["backend"] for record in records[:4]] == ["gloo", "zcomm", "exact_all_to_all", "naive"]
    assert all(record.keys() == RECORD_KEYS for record in records)
    tiny, large = records[1], records[5]
    assert (tiny["exact_reason"], tiny["wire_bytes"]) == ("min_bytes", None)
    # One shard of 2048 values: a byte each, and a scale of two bytes for every 128.
    assert (large["exact_reason"], large["wire_bytes"], large["format"]) == (None, 2048 + 32, "int8:128")
    assert large["ratio"] == pytest.approx(4096 / 2080)
    (hop,) = large["hops"]
    assert (hop["intra_node_bytes"], hop["inter_node_bytes"]) == (0, 2048 + 32) and hop["wait_us"] > 0
    assert tiny["hops"] is None and records[0]["hops"] is None
    for record in records:
        assert 0 < record["min_us"] <= record["median_us"] <= record["p90_us"]
        assert record["max_error"] < 0.1
    # One code in 127 of a block's maximum, which is below five times the root mean square; and bfloat16 values.
    assert 0 < large["mean_error"] < 5 / 127


@needs_ranks
@pytest.mark.parametrize("collective", ["all_to_all", "broadcast"])
def test_exchanges_are_measured(collective: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    options = "--nodes 2x1 --link none -n 2 -w 1 -m 1 -b 8K -e 8K --min-bytes 4096 -d bfloat16 --exchanges int8:128"
    done = CliRunner().invoke(app, [collective, *options.split(), "--json", str(file)])
    assert done.exit_code == 0, done.output
    exact, compressed = report_file.load(file)["results"]
    assert (exact["backend"], exact["redop"], exact["size"], exact["max_error"]) == ("gloo", "none", 8192, 0.0)
    # Averaged over ranks: 2048 values to the other, or 4096 from one of the two. A scale of two bytes for every 128.
    assert (compressed["wire_bytes"], compressed["format"]) == (2048 + 32, "int8:128")
    assert compressed["ratio"] == pytest.approx(4096 / 2080)
    assert 0 < compressed["mean_error"] < compressed["max_error"] < 0.1


@needs_ranks
def test_a_backend_that_does_nothing_fails_the_check_and_sums_stay_finite() -> None:
    import torch
    import torch.distributed as dist
    from support.worlds import run

    from zcomm_bench.contenders import Contender
    from zcomm_bench.worker import Bench

    class Idle(Contender):
        def call(self, problem: object) -> None:
            pass

    def body() -> tuple[list[float], bool]:
        errors, finite = [], True
        for collective in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"):
            spec = Spec(collective, [4096], dtype="half", link="none", nodes="1x2", warmup=20)
            contenders = [make("some", dist.group.WORLD) for make in (Contender, Idle)]
            bench = Bench(spec, torch.device("cpu"), contenders)
            problem = bench.make_problem(1024)
            bench.warm_up(problem)
            finite &= bool(problem.whole.isfinite().all())
            errors.append([mean for _, mean in bench._check(problem)])
        return errors, finite

    for errors, finite in run(body, backend="gloo"):
        assert all(exact < 1e-3 and idle > 0.1 for exact, idle in errors), errors
        assert finite


@pytest.mark.parametrize("backend", ["naive", "exact_all_to_all"])
def test_baselines_of_sums_are_not_for_exchanges(backend: str) -> None:
    for collective in ("all_to_all", "broadcast"):
        with pytest.raises(ValueError, match=f"{backend} is a baseline for .*not for {collective}"):
            Spec(collective, [1024], [backend])


@needs_ranks
def test_the_largest_error_is_that_of_all_ranks_and_sums_in_place_begin_anew() -> None:
    import torch
    import torch.distributed as dist
    from support.worlds import run

    from zcomm_bench.contenders import Contender, Problem
    from zcomm_bench.worker import Bench

    class Wrong(Contender):
        by = 100.0

        def call(self, problem: Problem) -> None:
            super().call(problem)
            if dist.get_rank() == 1:
                problem.whole[0] += self.by

    def body() -> tuple[list[float | None], bool]:
        spec = Spec("all_reduce", [4096], dtype="half", link="none", nodes="1x2")
        wrong = Wrong("some", dist.group.WORLD)
        bench = Bench(spec, torch.device("cpu"), [wrong])
        problem = bench.make_problem(1024)
        found = []
        for wrong.by in (100.0, math.nan):
            found.append(bench._check(problem)[0][0])
        wrong.by = 0.0
        bench._take_turns(problem, [1], 20)
        return found, bool(problem.whole.isfinite().all())

    for (large, not_a_number), finite in run(body, backend="gloo"):
        assert large > 10 and math.isnan(not_a_number) and finite
