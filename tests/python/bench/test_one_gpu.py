"""What the planner makes of what `make gpu` has measured; tests/gpu/stand_in/test_rehearsal.py makes such files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from bench import gpu_model, results_file
from zcomm_bench.cli import app
from zcomm_bench.planner import measured, report, step
from zcomm_bench.planner.cluster import ON_GPU, calibrated, processor

ASSUMED = processor("h100")
MADE_UP = {
    "nccl_host_cost": [
        {"what": "kernel", "messages": 0, "ready_us": 3.0},
        {"what": "event", "messages": 0, "ready_us": 0.25},
        *({"what": "non-blocking", "messages": num, "ready_us": 20 + 0.1 * num} for num in (2, 16, 1022)),
        {"what": "blocking", "messages": 2, "ready_us": 5.0},
        {"what": "captured, non-blocking", "messages": 2, "ready_us": 500.0},
    ],
    "real_shapes": [
        {"operation": "encode", "moved_bytes": 2_680_000_000, "median_us": 1000.0},
        {"operation": "decode", "moved_bytes": 670_000_000, "median_us": 1000.0},
    ],
    "beside_gemm": [
        {"priority": "high", "format": "int8:256", "products_ms": 60.0, "alone_ms": 20.0, "slowed_ms": 72.0},
        {"priority": "high", "format": "int8:128", "products_ms": 60.0, "alone_ms": 20.0, "slowed_ms": 70.0},
        # A copy does not count, nor what runs on a stream that zcomm does not have by default.
        {"priority": "high", "format": "", "products_ms": 60.0, "alone_ms": 20.0, "slowed_ms": 100.0},
        {"priority": "normal", "format": "int8:256", "products_ms": 60.0, "alone_ms": 20.0, "slowed_ms": 90.0},
    ],
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of bench/results."""
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path


def make_up(folder: Path) -> None:
    for subject, rows in MADE_UP.items():
        one = results_file.measured(subject, "H100 (16 cores)", list(rows[0]), rows, date="2026-11-30")
        results_file.keep(folder / f"{subject}-h100-80gb-hbm3.jsonl", [one])


def test_what_was_not_measured_is_assumed(results: Path) -> None:
    machine = gpu_model.cluster(8, 8, "nvlink4", 400)
    assert machine.launch == ON_GPU and machine.compute == ASSUMED
    assert {figure.source for _, figure, _ in report.gpu_figures(machine)} == {"assumed"}


def test_measured_figures_replace_the_assumed_ones(results: Path) -> None:
    before = gpu_model.cluster(8, 8, "nvlink4", 400)
    make_up(results)
    machine = gpu_model.cluster(8, 8, "nvlink4", 400)
    launch, source = machine.launch, "measured on H100 (16 cores), 2026-11-30"
    assert (launch.kernel, launch.event) == pytest.approx((3e-6, 0.25e-6))
    assert (launch.group, launch.message) == pytest.approx((20e-6, 0.1e-6))
    assert launch.start == ON_GPU.start
    assert machine.compute.codec_share.value == pytest.approx(0.5)  # 3.35 GB in 2 ms, of 3.35 TB/s
    assert machine.compute.taken_share.value == pytest.approx(0.55)  # 22 of 40 ms
    of_one = [figure for name, figure, _ in report.gpu_figures(machine) if "channels" not in name]
    assert {figure.source for figure in of_one} == {source}
    # Another GPU keeps its assumptions, and one's own links are measured beside these.
    assert gpu_model.cluster(1, 72, "nvlink5", 400, "b200").compute == processor("b200")
    assert calibrated(machine, {}).launch == launch
    size = 1 << 20
    calls = [gpu_model.collectives.gather(size, "bfloat16", gpu_model.GATHER, one) for one in (before, machine)]
    assert calls[1].seconds < calls[0].seconds


def test_what_was_not_finished_is_not_read(results: Path) -> None:
    one = results_file.measured("real_shapes, unfinished", "H100", ["us"], [{"us": 1.0}], date="2026-11-30")
    results_file.keep(results / "real_shapes-h100.jsonl", [one])
    assert gpu_model.cluster(8, 8, "nvlink4", 400).compute == ASSUMED


def test_only_what_is_taken_lengthens_a_step_that_hides_its_calls() -> None:
    cost = gpu_model.collectives.Cost(seconds=0.5, codec=0.2)
    assert step.combine(1.0, cost, 1.0) == pytest.approx(1.2)
    assert step.combine(1.0, cost, 1.0, 0.25) == pytest.approx(1.05)
    assert step.combine(1.0, cost, 1.0, hidden_seconds=1.5) == pytest.approx(1.5)  # they wait for products


def test_the_command_says_where_its_figures_come_from(results: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**gpu_model.LLAMA_70B, "num_hidden_layers": 2}))
    arguments = ["plan", "--model", str(config), "--scale"]
    assert "group 50 us, message 0.3 us, kernel 4 us, event 0.5 us (assumed)" in said(arguments)
    make_up(results)
    text = said(arguments)
    assert "group 20 us, message 0.1 us, kernel 3 us, event 0.25 us (measured on H100 (16 cores), 2026-11-30)" in text
    assert "55% of the codec's time (measured on H100" in text
    assert "(assumed)" in said([*arguments, "--gpu", "b200"])


def said(arguments: list[str]) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())
