"""Tests of the GPU side: ``pytest tests/gpu``, or ``make gpu`` for all that there is to run on a real GPU. Without one
they are skipped, or, with TESTS_REQUIRE_GPU=1, refused.

TESTS_GPU_DEVICE=stand-in runs those marked ``stand_in``, and the folder of that name, over a CUDA and an NCCL
that live on the host; ``make test-cuda-host`` builds these. TESTS_GPU_DEVICE=cpu runs those that need no CUDA on
CPU tensors, a check of the tests themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is asked for GPUs: it would start CUDA, and a process that has started CUDA cannot fork ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
HERE = Path(__file__).parent
STAND_IN = os.environ.get("TESTS_GPU_DEVICE") == "stand-in"
IN_PROCESS = ("test_communicator_failures", "test_communicator_threads", "test_lossless_kernels")
SECONDS = 150  # of a test; a world ends before that and says where its ranks hung


if STAND_IN:
    from support import cuda_on_host

    try:
        cuda_on_host.replace_core()
    except RuntimeError as error:
        pytest.exit(f"TESTS_GPU_DEVICE=stand-in: {error}", returncode=2)
else:
    collect_ignore = ["stand_in"]

from support import gpu_world  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU that CUDA sees")
    config.addinivalue_line("markers", "cuda_only: makes no sense on CPU tensors")
    config.addinivalue_line("markers", "stand_in: runs over the CUDA on the host, too")
    config.addinivalue_line("markers", "xdist_group: tests that one process of pytest-xdist runs")
    config.addinivalue_line("markers", "slow: runs only where -m names it")
    config.addinivalue_line("markers", "job: rehearses stages of make gpu; make test-jobs runs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if STAND_IN:
        others = [item for item in items if not runs_on_stand_in(item)]
        config.hook.pytest_deselected(items=others)
        # Last: these use streams in this process itself, which a process that is forked later would miss.
        items[:] = sorted(
            (item for item in items if item not in others),
            key=lambda item: item.path.stem in IN_PROCESS,
        )
        return
    ours = [item for item in items if HERE in item.path.parents]
    missing = gpu_world.missing() if ours else ""
    if missing and os.environ.get("TESTS_REQUIRE_GPU") == "1":
        raise pytest.UsageError(f"TESTS_REQUIRE_GPU=1, and {missing}")
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
        elif item.get_closest_marker("cuda_only") and not gpu_world.IS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs CUDA, and TESTS_GPU_DEVICE is cpu"))


def runs_on_stand_in(item: pytest.Item) -> bool:
    return HERE / "stand_in" in item.path.parents or item.get_closest_marker("stand_in") is not None
