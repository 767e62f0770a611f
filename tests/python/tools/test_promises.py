"""Every promise of docs/promises.md has a test in C++ and one with processes, and the page lists them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "tools" / "promise_map.py"


def test_the_list_of_tests_is_current() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
