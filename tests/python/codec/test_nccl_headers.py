"""The core declares NCCL's functions itself; here they are compared with each nccl.h that is installed."""

from __future__ import annotations

from pathlib import Path

from support.nccl_headers import ROOT, check_compiles, include_folders


def test_declarations_are_those_of_nccl_h(tmp_path: Path) -> None:
    for folder in include_folders():
        check_compiles(ROOT / "tests/cpp/compile/nccl_header_check.cpp", folder, tmp_path)
