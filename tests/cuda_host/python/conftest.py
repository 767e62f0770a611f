"""The torch backend on GPU tensors, without a GPU: CUDA and NCCL live on the host (see ``tests/cuda_host``).

Run by ``make test``, after it has built them: ``pytest tests/cuda_host/python``. The core of the library that the
installed modules load is replaced by one of the same name over that CUDA, so this is a pytest run of its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "build" / "plain" / "cuda_host"

sys.path.insert(0, str(BUILT))
if not (BUILT / "libzcomm_core.so").exists():
    pytest.exit(f"{BUILT} is not built: run 'make build/plain/zcomm_tests'", returncode=2)
ctypes.CDLL(str(BUILT / "libzcomm_core.so"))  # before the modules ask for a library of this name
os.environ["ZCOMM_NCCL_LIB"] = str(BUILT / "libnccl.so.2")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Last: these use streams in this process itself, which a process that is forked later would miss.
    items.sort(key=lambda item: item.path.stem in ("test_communicator", "test_difference_kernels"))
