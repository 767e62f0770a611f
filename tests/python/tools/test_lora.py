"""The example of LoRA adapters, very small: all its trainings learn alike, and move the bytes that the page says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny_llama

EXAMPLE = Path(__file__).parents[3] / "examples" / "lora.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_frozen_weights_cross_nodes_once(tmp_path: Path) -> None:
    tiny_llama.require("peft", "transformers")
    out = tmp_path / "figures.json"
    # Wide enough that blocks and the adapters of a block are compressed: a unit of less than 64 KiB is not.
    small = ["--link", "unlimited", "--steps", "2", "--width", "256", "--layers", "2", "--sequence", "16"]
    command = [sys.executable, str(EXAMPLE), *small, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {(run["backend"], "own" in run["units"]): run for run in json.loads(out.read_text())["runs"]}
    assert len(runs) == 6
    losses = [run["loss"] for run in runs.values()]
    assert max(losses) < 1.01 * min(losses)
    moved = {key: run["bytes"] for key, run in runs.items()}
    if not any(math.isnan(count) for count in moved.values()):  # NaN without network namespaces
        secondary = "zcomm, secondary shards"
        assert moved["zcomm", False] < 0.5 * moved["gloo", False]
        assert moved[secondary, False] < 0.7 * moved["zcomm", False]
        assert moved[secondary, True] < 0.2 * moved[secondary, False]
