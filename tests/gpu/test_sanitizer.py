"""NVIDIA's compute-sanitizer finds nothing in the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda_only, pytest.mark.xdist_group("sanitizer")]

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# torch asks the driver for things that it may not have: an error that is no error.
OPTIONS = {"memcheck": ["--report-api-errors", "no"]}
PROGRAM = Path(__file__).with_name("all_kernels.py")
FOUND = 86  # the exit status that says so
SECONDS = 140
DONE = "all kernels ran"


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All tools at once: each takes long, and most of that on its own core."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    # Each tensor an allocation of its own, so that a byte beside it is a byte too many.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = [sys.executable, str(PROGRAM)]
    started = {
        tool: subprocess.Popen(
            [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *OPTIONS.get(tool, ()), *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for tool in TOOLS
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("tool", TOOLS)
def test_compute_sanitizer(tool: str, runs: dict[str, subprocess.Popen[str]]) -> None:
    try:
        output, _ = runs[tool].communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        runs[tool].kill()
        output, _ = runs[tool].communicate()
        pytest.fail(f"still ran after {SECONDS} s:\n{output[-4000:]}")
    if "not supported" in output and DONE not in output:
        pytest.skip(f"compute-sanitizer does not work on this machine: {output.strip().splitlines()[0]}")
    assert runs[tool].returncode == 0 and DONE in output, output[-8000:]
