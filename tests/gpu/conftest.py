"""Tests on a real GPU: ``pytest tests/gpu``, or ``make gpu`` for all that there is to run. Without a GPU they are
skipped, or, with ZCOMM_REQUIRE_GPU=1, refused.

ZCOMM_GPU_TESTS_DEVICE=cpu runs those that need no CUDA on CPU tensors: a check of the tests themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is asked for GPUs: it would start CUDA, and a process that has started CUDA cannot fork ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HERE = Path(__file__).parent

import pytest  # noqa: E402
from support import gpu_world  # noqa: E402

SECONDS = 150  # of a test; a world ends before that and says where its ranks hung


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU that CUDA sees")
    config.addinivalue_line("markers", "cuda_only: makes no sense on CPU tensors")
    config.addinivalue_line("markers", "xdist_group: tests that one process of pytest-xdist runs")
    config.addinivalue_line("markers", "slow: runs only where -m names it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    missing = gpu_world.missing() if ours else ""
    if missing and os.environ.get("ZCOMM_REQUIRE_GPU") == "1":
        raise pytest.UsageError(f"ZCOMM_REQUIRE_GPU=1, and {missing}")
    if not missing and (broken := gpu_world.broken()):
        raise pytest.UsageError(broken)
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
        elif item.get_closest_marker("slow") and "slow" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        elif item.get_closest_marker("cuda_only") and gpu_world.DEVICE.type != "cuda":
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and ZCOMM_GPU_TESTS_DEVICE is cpu"))
