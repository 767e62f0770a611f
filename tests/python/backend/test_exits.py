"""How processes end: with the exit code of their failure, and without a crash on the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import exits


@pytest.fixture(scope="module")
def endings() -> dict[str, list[tuple[int | None, str]]]:
    """Return the exit codes and outputs of the ranks of each scenario in exits.py."""
    program = Path(exits.__file__)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=540, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.job
@pytest.mark.timeout(600)  # the fixture runs all scenarios, in processes of their own
@pytest.mark.parametrize("scenario", exits.SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_processes_end_cleanly(scenario: Callable[[], None], endings: dict[str, list[tuple[int | None, str]]]) -> None:
    """Processes end by themselves, soon, with the exit code of their failure, and without a crash on the way out."""
    ends = endings[scenario.__name__]
    for rank, (code, output) in enumerate(ends):
        assert code is not None, f"rank {rank} did not end:\n{output}"
        for crash in ("terminate called", "Fatal Python error", "Segmentation fault"):
            assert crash not in output, f"rank {rank}:\n{output}"
    assert [code for code, _ in ends] == exits.SCENARIOS[scenario], "\n".join(output for _, output in ends)
    idle = [scenario in (exits.never_used, exits.given_to_gloo), False]
    assert ["zcomm compressed nothing in this job of 2 ranks" in output for _, output in ends][:2] == idle
    if scenario is exits.one_raises:
        assert all("lost rank 1" in output for _, output in (ends[0], ends[2]))
