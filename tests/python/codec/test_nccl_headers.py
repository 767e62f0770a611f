"""The core declares NCCL's functions itself; here they are compared with each nccl.h that is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Stubs of the CUDA headers that nccl.h includes, so that no toolkit is needed here.
CUDA_HEADERS = {
    "cuda_runtime.h": """
        #pragma once
        #include <stddef.h>
        typedef struct CUstream_st* cudaStream_t;
        typedef struct CUevent_st* cudaEvent_t;
    """,
    "cuda_fp16.h": "#pragma once\nstruct __half;\n",
    "cuda_bf16.h": "#pragma once\nstruct __nv_bfloat16;\n",
}


def include_folders() -> list[Path]:
    """Return the folders of the wheels nvidia-nccl-cu12 and -cu13, and those in $NCCL_HOME (separated by colons)."""
    folders = [Path(home) / "include" for home in os.environ.get("NCCL_HOME", "").split(":") if home]
    try:
        wheel = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        wheel = None
    if wheel is not None:
        folders += [Path(folder) / "include" for folder in wheel.submodule_search_locations or []]
    return [folder for folder in folders if (folder / "nccl.h").is_file()]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_declarations_are_those_of_nccl_h(tmp_path: Path) -> None:
    folders = include_folders()
    if not folders:
        pytest.skip("no nccl.h: neither an nvidia-nccl wheel nor $NCCL_HOME")
    for name, text in CUDA_HEADERS.items():
        (tmp_path / name).write_text(text)
    for folder in folders:
        includes = [f"-I{ROOT}/include", f"-I{ROOT}/src", f"-isystem{tmp_path}", f"-isystem{folder}"]
        source = ROOT / "tests/cpp/compile/nccl_header_check.cpp"
        done = subprocess.run(
            ["g++", "-std=c++20", "-fsyntax-only", *includes, source], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{folder}:\n{done.stderr}"
