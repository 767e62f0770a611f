"""The C++ example with a GPU per rank."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.cpp_example import ROOT, build, needs_compiler

from zcomm import _nccl


@needs_compiler
@pytest.mark.timeout(300)
def test_it_runs_on_gpus(tmp_path: Path) -> None:
    program = tmp_path / "collectives"
    library = _nccl.load()[0]
    build(program, Path(library).parent, "-DZCOMM_EXAMPLE_CUDA", f"-isystem{ROOT / 'tests/cuda_host/include'}")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ZCOMM_NCCL_LIB": library}
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, env=environment)

    done = run("4", "5000")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "4 ranks on GPUs, in nodes 2x2, 5000 float32 per shard"
    assert lines[-1] == "all ranks hold the same bits"
    wrong = run("9")
    assert (wrong.returncode, "a GPU per rank, got 9, 1000000 and 8 GPUs" in wrong.stderr) == (2, True)
