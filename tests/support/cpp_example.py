"""Builds examples/cpp/collectives.cpp against a core that is already built."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")


def build(program: Path, core: Path, *flags: str) -> None:
    """``core``: the folder of libzcomm_core.so."""
    source = ROOT / "examples/cpp/collectives.cpp"
    given = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *flags, f"-I{ROOT / 'include'}"]
    linked = [f"-L{core}", "-lzcomm_core", f"-Wl,-rpath,{core}"]
    subprocess.run([str(CXX), *given, str(source), "-o", str(program), *linked], check=True)
