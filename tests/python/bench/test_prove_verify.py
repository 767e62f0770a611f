"""What ``prove --verify`` refuses, and what ``--add`` keeps of a report that holds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from support import proof
from support.proof import Raw, slower
from typer.testing import CliRunner

from zcomm_bench.cli import app
from zcomm_bench.prove import keep, report, verify
from zcomm_bench.prove.claims import PASS


@pytest.fixture(scope="module")
def sound() -> Raw:
    return proof.judged()


def edit(path: str, value: Any) -> Callable[[Raw], None]:
    def change(made: Raw) -> None:
        *parents, last = path.split(".")
        place: Any = made
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place[name]
        place[int(last) if isinstance(place, list) else last] = value

    return change


def changed(made: Raw, change: Callable[[Raw], None]) -> Raw:
    made = copy.deepcopy(made)
    change(made)
    return made


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("verdicts.1.verdict", "FAIL", r"verdicts\.1\.verdict: not what the samples say"),
        ("figures.networks.0.cells.0.speedup.value", 9.0, r"cells\.0\.speedup\.value: not what"),
        ("sweep.cells.0.samples.auto.0", -1.0, "expected seconds above 0, got -1.0"),
        ("sweep.cells.0.samples.auto.0", "fast", "expected seconds above 0, got fast"),
        ("sanity.local.matrix.1.0", 0.0, "expected seconds above 0"),
        ("verdicts.0.why", "all well", r"verdicts\.0\.why: not what the samples say"),
        ("bits.rows.0.expected.0", 7, "not the CRC of the reference"),
        ("bits.rows.52.collective", "gather", "weights by lossless differences are missing"),
        ("bits.rows.0.collective", "gather", "all_gather of float32 in int8:256 is missing"),
        ("rehearsal", "", "rehearsal: expected 'on CPUs' of these ranks, got ''"),
        ("environment.ranks.1.zcomm", "9.9", "zcomm: expected the same on all ranks"),
        ("sanity.rates", None, "a part is missing"),
        ("predictions.calls.0.compressed_link_bytes", 0, "another kind: ZeroDivisionError"),
        ("sweep.cells.0.samples.auto", [1.0] * 3, "another kind: ValueError"),
        ("noise.cells.0.samples", dict.fromkeys(("exact", "again"), [1.0] * 10), "samples: expected at least 6, got 5"),
    ],
    ids=str,
)
def test_a_report_that_its_samples_contradict_is_refused(sound: Raw, path: str, value: Any, message: str) -> None:
    with pytest.raises(verify.NotTrue, match=message):
        verify.check(changed(sound, edit(path, value)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made["sweep"]["cells"].pop(0), "sweep: expected a cell for each"),
        (lambda made: made["sweep"]["cells"].append(made["sweep"]["cells"][0]), "sweep: expected a cell for each"),
        (lambda made: made["noise"]["cells"].pop(), "noise: expected a cell for each"),
        (lambda made: made["sanity"]["cells"].clear(), "sanity: expected a cell for each"),
        (lambda made: made["scale"].update(sizes=[1]), "sanity: expected a cell for each"),
        (lambda made: made["sanity"]["local"].clear(), "sanity: expected matrix and codec of 4 ranks"),
        (lambda made: made["sanity"]["local"]["codec"].pop(), "sanity: expected matrix and codec of 4 ranks"),
        (lambda made: made["environment"]["ranks"].pop(), "environment: expected 2x2 ranks"),
        (lambda made: made["environment"].update(nodes=64), "environment: expected 64x2 ranks"),
        (lambda made: made["environment"].update(nodes=4, ranks_per_node=1), "environment: expected 4x1 ranks"),
        (lambda made: made["environment"].update(node_of=[0, 0, 0, 1]), "environment: expected 2x2 ranks"),
        (lambda made: made["bits"]["rows"].append(made["bits"]["rows"][0]), "bits: expected one row of each"),
        (lambda made: made["scale"].update(models=[]), "steps: expected each model"),
        (lambda made: made.update(drill=drill_of_two()), "drill: expected the ends of 4 ranks"),
        (lambda made: made["networks"]["measured"].append(without_cell(made)), "sweep: expected a cell for each"),
    ],
)
def test_a_report_that_leaves_something_out_is_refused(change: Callable[[Raw], object], message: str) -> None:
    with pytest.raises(verify.NotTrue, match=message):
        verify.check(proof.judged(change))


def drill_of_two() -> Raw:
    ends = [{"error": "lost rank 3", "seconds": 0.5}] * 2
    return {"victim": 3, "limit_seconds": 20.0, "ends": ends}


def without_cell(made: Raw) -> Raw:
    """The same network once more, but for a cell of its sweep."""
    network = {name: copy.deepcopy(made[name]) for name in ("sanity", "predictions", "sweep", "link")}
    del network["sweep"]["cells"][0]
    return {"name": "sockets", **network}


def test_a_report_with_a_loss_of_nan_holds() -> None:
    def fault(made: Raw) -> None:
        made["steps"]["runs"][0]["losses"]["compressed"][-1] = float("nan")

    made = json.loads(json.dumps(proof.judged(fault)))
    assert verify.check(made) == ["made by the sources that are here"]


def test_predictions_that_are_not_the_models_are_refused() -> None:
    def fault(made: Raw) -> None:
        made["predictions"]["calls"][1]["compressed"]["seconds"] *= 1.01

    with pytest.raises(verify.NotTrue, match=r"predictions\.calls\.1\.compressed\.seconds: not what the model says"):
        verify.check(proof.judged(fault))


def test_calls_faster_than_their_bytes_are_refused() -> None:
    def fault(made: Raw) -> None:
        samples = made["sweep"]["cells"][1]["samples"]
        samples["compressed"] = slower(samples["compressed"], 0.5)

    with pytest.raises(verify.NotTrue, match=r"all_gather of 4194304 bytes, compressed: .* than its bytes permit"):
        verify.check(proof.judged(fault))


def test_other_sources_are_told_and_not_kept(sound: Raw) -> None:
    def change(made: Raw) -> None:
        for own in made["environment"]["ranks"]:
            own["zcomm_sources"] = "0" * 64

    made = changed(sound, change)
    assert verify.check(made) == [
        "made by other sources of zcomm than those here: its predictions were not computed again"
    ]
    with pytest.raises(ValueError, match="add: expected a checkout of the commit that made the report"):
        keep.add(made, "nobody")


def test_verify_and_add_from_the_command_line(sound: Raw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, files = tmp_path / "report.json", keep.results_file()
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    report.write(file, sound)
    done = CliRunner().invoke(app, ["prove", "--verify", str(file)])
    assert done.exit_code == 0, done.output
    assert "REHEARSAL" in done.output and "verified: made by the sources that are here" in done.output
    done = CliRunner().invoke(app, ["prove", "--add", str(file), "--by", "a reader"])
    assert done.exit_code == 0, done.output
    (kept,) = tmp_path.glob("prove-*.jsonl")
    assert kept.stat().st_size < 60_000
    found = {one.name: one for one in files.read(kept)}
    assert set(found) == {"claims_2x2_0.1gbit", "calls_2x2_0.1gbit"}
    assert found["claims_2x2_0.1gbit"].facts["by"] == "a reader"
    assert [row["verdict"] for row in found["claims_2x2_0.1gbit"].records] == [PASS] * 5
    assert len(found["calls_2x2_0.1gbit"].rows) == 6
    done = CliRunner().invoke(app, ["prove", "--verify", str(file), "--add", str(file)])
    assert done.exit_code == 2 and "--add checks it, too" in done.output
    done = CliRunner().invoke(app, ["prove", "--verify", str(file), "--by", "a reader"])
    assert done.exit_code == 2 and "--by: expected --add" in done.output
    for measuring in (["--rehearse"], ["--drill"], ["--link", "1gbit"], ["--output", "folder"]):
        for option in ("--verify", "--add"):
            done = CliRunner().invoke(app, ["prove", option, str(file), *measuring])
            assert done.exit_code == 2 and f"{measuring[0]}: expected a run that measures, got" in done.output
    file.write_text(json.dumps(sound).replace('"PASS"', '"FAIL"'))
    for option in ("--verify", "--add"):
        done = CliRunner().invoke(app, ["prove", option, str(file)])
        assert done.exit_code == 1 and "not what the samples say" in done.output
    for text in ("{", '{"schema": "zcomm-bench/1"}', "[]"):
        file.write_text(text)
        done = CliRunner().invoke(app, ["prove", "--verify", str(file)])
        assert done.exit_code == 1 and "refused:" in done.output
