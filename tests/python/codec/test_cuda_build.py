"""A package built where nvcc is installed has the kernels for all targets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from zcomm import _core


@pytest.mark.skipif(
    "ZCOMM_CUDA=OFF" in os.environ.get("SKBUILD_CMAKE_DEFINE", ""), reason="the build was asked for without CUDA"
)
def test_every_kernel_is_compiled_for_every_target_where_nvcc_is() -> None:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        assert _core.cuda_toolkit() == ""
        pytest.skip("no nvcc: a package for CPUs, which says so")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", text)
    assert release is not None
    toolkit = int(release[1]), int(release[2])
    assert _core.cuda_toolkit() == f"{toolkit[0]}.{toolkit[1]}"
    newest = "80-real 90-real 100-real 120" if toolkit >= (12, 8) else "80-real 90"
    assert _core.cuda_targets() in (newest, os.environ.get("CUDAARCHS", newest).replace(";", " "))
