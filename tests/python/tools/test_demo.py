"""The demonstration job, very small: it trains, and it says what it promises to say."""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("pyroute2")

from demo_plan import Job, inter_node_bytes
from train_gpt import GPT

import zcomm

DEMO = Path(__file__).parents[3] / "examples" / "demo.py"
KEYS = {
    "steps_per_second",
    "tokens_per_second",
    "final_loss",
    "validation_loss",
    "gradient_error",
    "inter_node_bytes_per_step",
    "world_size",
    "link",
}
MODEL = ["--steps", "16", "--batch", "4", "--sequence", "64", "--width", "64", "--layers", "1"]
SMALL = ["--nodes", "2x1", "--link", "1gbit", *MODEL]


needs_zcomm = pytest.mark.skipif(
    not importlib.metadata.entry_points(group="torch.backends", name="zcomm"),
    reason="the zcomm backend is not installed",
)


@pytest.mark.job
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "backends", [pytest.param(["gloo"], marks=pytest.mark.slow), pytest.param(["gloo", "zcomm"], marks=needs_zcomm)]
)
def test_the_job_trains_and_reports(backends: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--backends", ",".join(backends), "--out", str(tmp_path), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = json.loads((tmp_path / "summary.json").read_text())
    assert list(summaries) == backends
    for summary in summaries.values():
        assert summary.keys() >= KEYS
        assert summary["world_size"] == 2
        assert summary["final_loss"] < summary["first_loss"] - 0.1
        # Machines without network namespaces have no link and unknown bytes.
        assert (summary["inter_node_bytes_per_step"] is None) == (summary["link"] is None)
    assert summaries["gloo"]["gradient_error"] == 0.0
    if "zcomm" in backends:
        # A zero would mean that no gradient was compressed.
        assert 0.0 < summaries["zcomm"]["gradient_error"] < 0.2
        assert abs(summaries["zcomm"]["final_loss"] - summaries["gloo"]["final_loss"]) < 0.1
    assert (tmp_path / "loss.png").stat().st_size > 0


def run_example(name: str, *arguments: str) -> None:
    command = [sys.executable, str(DEMO.with_name(name)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.job
@needs_zcomm
@pytest.mark.timeout(300)
def test_secondary_shards_save_bytes_on_the_wire(tmp_path: Path) -> None:
    small = ["--nodes", "2x2", "--link", "1gbit", *MODEL[2:], "--steps", "4", "--micro-batches", "3"]
    ways = ["--secondary-shards", "--lossless"]
    run_example("demo.py", "--backends", "zcomm", *ways, "--out", str(tmp_path), *small)
    summary = json.loads((tmp_path / "summary.json").read_text())["zcomm"]
    bits = summary["bits_per_weight"]  # of the steps after the first one, which sends whole weights
    assert all(0 < each < 16 for each in bits) and len(bits) == 3
    if summary["inter_node_bytes_per_step"] is not None:
        without = inter_node_bytes(Job("2x2", "1gbit", 4, 4, 64, 64, 1, 3, "float32"), zcomm.Options())
        # One of six gathers in a step crosses nodes: whole weights in the first step, differences in the others.
        assert summary["inter_node_bytes_per_step"] < 0.5 * without


@needs_zcomm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generation_moves_no_weights_between_nodes_after_the_first_token(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    small = ["--rounds", "1", "--tokens", "5", "--width", "64", "--layers", "2", "--link", "1gbit"]
    run_example("rlhf_generation.py", "--out", str(out), *small)
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 3
    plain, secondary = (runs[name]["parts"]["further tokens"]["bytes"] for name in list(runs)[1:])
    if plain == plain:  # not a number where the machine allows no network namespaces
        assert secondary < 0.05 * plain


def test_the_plan_knows_the_bytes_that_will_move() -> None:
    """Compares the plan with the interface counts in docs/performance.md. The plan omits the packets' overhead."""
    job = Job("2x2", "100mbit", 40, 2, 128, 256, 4, 1, "float32")
    assert inter_node_bytes(job) == pytest.approx(59.3e6, rel=0.03)
    assert inter_node_bytes(job, zcomm.Options()) == pytest.approx(8.3e6, rel=0.03)
    assert inter_node_bytes(job, zcomm.Options(), secondary_shards=True) == pytest.approx(5.1e6, rel=0.03)
    differences = inter_node_bytes(job, zcomm.Options(), secondary_shards=True, lossless=True)
    assert differences < inter_node_bytes(job, zcomm.Options(), secondary_shards=True)
    assert inter_node_bytes(replace(job, micro_batches=4)) == pytest.approx(117.7e6, rel=0.03)
    assert inter_node_bytes(replace(job, nodes="1x4")) == 0


@pytest.mark.job
@pytest.mark.timeout(300)
def test_a_step_over_the_limit_ends_the_run_with_a_reason() -> None:
    job = ["--steps", "1", "--batch", "1", "--sequence", "16", "--width", "64", "--layers", "1"]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, str(DEMO.with_name("train_gpt.py")), *job, "--step-limit", "1e-6"]
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=290)
    assert done.returncode == 1
    assert "step 1 was not done after" in done.stderr


def test_a_matrix_dtype_changes_how_weights_are_multiplied_and_not_what_they_are() -> None:
    models = []
    for dtype in (None, torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        models.append(GPT(64, 1, 16, dtype).bfloat16())
    text = torch.arange(17)[None]
    losses = [model(text) for model in models]
    for loss in losses:
        loss.backward()
    for model in models:
        assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in model.parameters() if p.grad is not None)
    plain, bfloat16, float32 = (loss.item() for loss in losses)
    assert plain == bfloat16  # the same operations
    # Operations round their results to bfloat16 in either case, by 2^-9 of them at most.
    assert plain == pytest.approx(float32, rel=0.01)
