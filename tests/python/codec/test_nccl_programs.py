"""Packages that call NCCL by themselves, unchanged, have their calls compressed by the front."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import expected, nccl_program
from support.tiny_llama import require

BUILT = nccl_program.CORE.parent
needs_front = pytest.mark.skipif(
    not (BUILT / "libzcomm_nccl.so").exists(), reason="the front is not built: make test-cuda-host"
)


@needs_front
@pytest.mark.parametrize("package", ["nccl4py", pytest.param("cupy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("asks", [True, False])
def test_a_package_that_opens_nccl_by_its_name(package: str, asks: bool, tmp_path: Path) -> None:
    if package == "cupy":
        require("cupy")
    else:
        importlib.import_module("nccl.bindings")
    (tmp_path / "libnccl.so.2").symlink_to(BUILT / "libzcomm_nccl.so")
    asked = {"ZCOMM_ALL_REDUCE": "int8:128", "ZCOMM_EXCHANGES": "int8:128"} if asks else {}
    # The first, because packages prefer a wheel of NCCL to what they would find by name, but not to what is loaded.
    names = {
        "LD_PRELOAD": "libnccl.so.2",
        "LD_LIBRARY_PATH": str(tmp_path),
        "ZCOMM_NCCL_LIB": str(BUILT / "libnccl.so.2"),
    }
    env = {**os.environ, **names, **asked, "ZCOMM_NODE_SIZE": "1", "ZCOMM_STATS": str(tmp_path / "stats")}
    program = [sys.executable, nccl_program.__file__, package]
    ranks = [subprocess.Popen([*program, str(rank), str(tmp_path)], env=env, stderr=-1) for rank in range(2)]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors
    values = [torch.as_tensor(nccl_program.values_of(rank)) for rank in range(2)]
    for rank in range(2):
        total, received = torch.as_tensor(np.load(tmp_path / f"out{rank}.npy"))
        right = expected.all_reduce(values, "int8:128", [0, 1]) if asks else values[0] + values[1]
        expected.assert_same_bits(total, right)
        expected.assert_same_bits(
            received, expected.roundtrip(values[1 - rank], "int8:128") if asks else values[1 - rank]
        )
    if not asks:
        assert not (tmp_path / "stats").exists()
        return
    for line in (tmp_path / "stats").read_text().splitlines():
        counts = json.loads(line)["collectives"]
        assert counts["all_reduce"]["calls"] == {"compressed": 1}
        assert counts["message"] == {"calls": {"compressed": 2}, "sent_bytes": 50784, "exact_bytes": 200000}
