"""Ray Train over zcomm: the program of its page."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_the_program_of_the_page(tmp_path: Path) -> None:
    """The program's two workers train with FSDP2, and print what was compressed."""
    tiny_llama.require("ray")
    tiny_llama.run_program("ray.md", [], tmp_path, RAY_USAGE_STATS_ENABLED="0")
