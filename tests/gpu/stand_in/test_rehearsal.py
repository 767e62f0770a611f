"""The stages of `make gpu` that have a rehearsal, in processes of their own: they run, and their files have what the
planner reads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from bench import gpu_model, results_file
from bench.results_file import Measurement
from zcomm_bench.planner import measured, report

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.job

# A kernel as the toolkit lists it; and a profiler that only runs what it is given.
TOOLS = {
    "cuobjdump": r"printf ' Function _ZN5zcomm3gpu13finish_kernelIvEEvi:\n  REG:87 STACK:8 SHARED:34816\n'",
    "ncu": 'for part in "$@"; do shift; case "$part" in */python*) exec "$part" "$@";; esac; done',
}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, script in TOOLS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def rehearsed(stages: str, folder: Path) -> dict[str, Measurement]:
    """What each stage keeps."""
    command = [sys.executable, str(ROOT / "tools" / "run_gpu.py"), "--rehearse", "--only", stages, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in stages.split(","):
        assert f"{name}: passed" in done.stdout
    return {name: results_file.read(folder / f"{name}-stand-in.jsonl")[0] for name in stages.split(",")}


@pytest.mark.timeout(260)
@pytest.mark.usefixtures("tools")
def test_the_planner_reads_what_the_stages_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rehearsed("beside_gemm,chains,nccl_host_cost,real_shapes,fsdp_copies,floors", tmp_path)
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    machine = measured.applied(gpu_model.MACHINES["8, NVLink"], "stand-in")
    figures = [
        each for each in report.gpu_figures(machine) if "channels" not in each[0]
    ]  # which several GPUs alone have
    sources = {figure.source.partition(",")[0] for _, figure, _ in figures}
    assert {source.partition(" (")[0] for source in sources} == {"measured on stand-in"}
    assert machine.compute.codec_share.value > 0 and machine.launch.group + machine.launch.message > 0
    copies = {row["pass"] for row in found["fsdp_copies"].records}
    assert {"split_with_sizes_copy", "decode into parameters", "chunk_cat", "encode of gradients"} <= copies
    chains = {(row["streams"], row["chunks"]) for row in found["chains"].records}
    assert chains == {(streams, chunks) for streams in ("one", "lanes") for chunks in (1, 2)}
    assert {row["pieces"] for row in found["real_shapes"].records} >= {10, 63}
    assert len({row["floor"] for row in found["floors"].records}) == 5
    (listing,) = results_file.read(tmp_path / "listing-stand-in.jsonl")
    assert listing.rows == [["finish<void>", 87, 8, 34816, 20]]  # 5 of 88 registers' warps on each of 4 schedulers
    assert "no counters" not in (tmp_path / "floors.log").read_text()


@pytest.mark.timeout(260)
def test_processes_share_memory_and_meet(tmp_path: Path) -> None:
    rows = rehearsed("ipc", tmp_path)["ipc"].records
    assert {row["outcome"] for row in rows} == {"the same values", "met", "read", "closed", "freed"}
    assert {row["ranks"] for row in rows if row["what"] == "meeting, streams"} == {2, 3, 4}


@pytest.mark.timeout(260)
def test_calls_of_several_gpus_are_compared(tmp_path: Path) -> None:
    found = {name: one.records for name, one in rehearsed("channels,sizes", tmp_path).items()}
    calls = {(row["layout"], row["what"]) for row in found["channels"]}
    assert calls == set(itertools.product(("1x4", "2x2", "2x2 hosts"), ("all_gather", "reduce_scatter")))
    ways = {(row["layout"], row["chunks"]) for row in found["sizes"]}
    assert ways == {("exact", None), *itertools.product(("1x4", "2x2"), (None, 2))}
    assert {row["max_ctas"] for row in found["sizes"]} == {"8"}
    assert {row["collective"] for row in found["sizes"]} == {"all_gather", "reduce_scatter"}
    assert all(row["alone_ms"] > 0 and row["beside_ms"] > 0 for row in found["sizes"])
    assert all(row["alone_ratio"] == row["beside_ratio"] == 1 for row in found["sizes"] if row["layout"] == "exact")


@pytest.mark.timeout(260)
def test_steps_of_several_gpus_are_compared(tmp_path: Path) -> None:
    rows = rehearsed("steps", tmp_path)["steps"].records
    steps = {(row["kind"], row["way"], row["layout"]): row["loss"] for row in rows}
    fsdp2, hsdp = (("torch", "1x4"), ("zcomm", "1x4"), ("zcomm", "2x2")), (("torch", "2x2"), ("zcomm", "2x2"))
    assert [*steps] == [*(("FSDP2", *way) for way in fsdp2), *(("HSDP", *way) for way in hsdp)]
    for kind, layout in (("FSDP2", "1x4"), ("HSDP", "2x2")):  # after two steps, with gradients that are rounded
        assert steps[kind, "zcomm", layout] == pytest.approx(steps[kind, "torch", layout], rel=0.01)


@pytest.mark.timeout(260)
def test_a_study_compares_what_its_time_allows(tmp_path: Path) -> None:
    rows = rehearsed("study_100m", tmp_path)["study_100m"].records
    runs = {(row["configuration"], row["seed"]): row for row in rows}
    assert len(runs) == 8 and len({row["steps"] for row in rows}) == 1 and rows[0]["steps"] >= 1
    assert all(row["low"] <= row["gap_percent"] <= row["high"] for row in rows)
    assert runs["exact", 0]["gap_percent"] == 0 != runs["int4:2048", 0]["gap_percent"]
