"""The headers of NCCL that are here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
    """Return the folders of the wheels nvidia-nccl-cu12 and -cu13, and those in $NCCL_HOME (separated by colons). Skips
    the test if there are none."""
    folders = [Path(home) / "include" for home in os.environ.get("NCCL_HOME", "").split(":") if home]
    try:
        wheel = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        wheel = None
    if wheel is not None:
        folders += [Path(folder) / "include" for folder in wheel.submodule_search_locations or []]
    found = [folder for folder in folders if (folder / "nccl.h").is_file()]
    if not found:
        pytest.skip("no nccl.h: neither an nvidia-nccl wheel nor $NCCL_HOME")
    return found


def check_compiles(source: Path, folder: Path, stubs: Path) -> None:
    """Compile a C++ source with the nccl.h of a folder, without code. Writes CUDA's headers to the folder ``stubs``."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    for name, text in CUDA_HEADERS.items():
        (stubs / name).write_text(text)
    includes = [f"-I{ROOT}/{each}" for each in ("include", "src", "tests/cpp/compile")]
    includes += [f"-isystem{stubs}", f"-isystem{folder}"]
    done = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", *includes, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{folder}:\n{done.stderr}"
