"""The measurement of a cluster: what it writes is what the planner reads. No time decides anything here."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("pyroute2")

from typer.testing import CliRunner

from zcomm.cli import app
from zcomm.lab import network
from zcomm.planner.cluster import load_calibration

RATE = 100e6 / 8
BURST = 1.25  # a limited link lets a little more through at first


def test_a_limited_link_is_measured_and_planned_with(tmp_path: Path) -> None:
    file, config = tmp_path / "cluster.json", tmp_path / "config.json"
    command = [sys.executable, "-m", "zcomm", "measure", "--output", str(file)]
    launched = network.launch(command, nodes="2x2", rate="100mbit", timeout=110)
    calibration = load_calibration(file)
    assert (calibration["nodes"], calibration["ranks_per_node"], calibration["backend"]) == (2, 2, "gloo")
    for name in ("intra", "inter"):
        assert all(value > 0 for value in calibration[name].values())
    assert calibration["exact_reduce_factor"] >= 1
    assert calibration["codec_bytes_per_second"] > 0
    assert calibration["difference_bytes_per_second"] > 0
    if launched.isolated:
        assert calibration["inter"]["bytes_per_second"] <= BURST * RATE
    config.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "vocab_size": 99, "n_positions": 8})
    )
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--calibration", str(file), "--json"])
    assert result.exit_code == 0, result.output
    planned = json.loads(result.output)["cluster"]
    assert planned["inter"]["bandwidth"] == {"value": calibration["inter"]["bytes_per_second"], "source": "measured"}


def test_it_needs_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["measure", "--output", str(tmp_path / "cluster.json")])
    assert result.exit_code == 2
    assert "torchrun" in result.output
