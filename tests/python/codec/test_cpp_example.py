"""The C++ example builds against the installed core alone, and runs where there is no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.cpp_example import ROOT, build, needs_compiler

from zcomm import _core


@needs_compiler
@pytest.mark.timeout(300)
def test_it_runs_on_the_cpu(tmp_path: Path) -> None:
    program = tmp_path / "collectives"
    build(program, Path(str(_core.__file__)).parent)

    def told(*arguments: str) -> str:
        return subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout

    for size, nodes in [("4", "2x2"), ("3", "2+1"), ("1", "1x1")]:
        lines = told(size, "5000").splitlines()
        assert lines[0] == f"{size} ranks on the CPU, in nodes {nodes}, 5000 float32 per shard"
        assert lines[-1] == "all ranks hold the same bits"
    for line in told("4", "100000").splitlines()[2:4]:
        name, sent, exact, _, error = line.split()
        # 8 bits inter-node, and intra-node, where the other node's shard is forwarded; 4 bits inter-node.
        assert int(exact) / int(sent) > {"all_gather": 3.8, "reduce_scatter": 4.0}[name]
        assert float(error) < 0.3

    wrong = subprocess.run([program, "0"], capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, "expected 1 or more ranks" in wrong.stderr) == (2, True)


def test_the_cupy_example_says_what_it_lacks() -> None:
    import sys

    try:
        import cupy  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("CuPy is here")
    command = [sys.executable, str(ROOT / "examples/cupy_allgather.py")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    assert "this example needs CuPy, and there is none" in told.stderr
