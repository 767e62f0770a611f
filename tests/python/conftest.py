"""Slow tests run when they are asked for: ``-m slow``. Property tests try the same examples in every run, and others
with ``--hypothesis-profile explore``."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from hypothesis import settings

# With GPUs, autograd would have a thread for each in this process, and ranks that are forked from it could not use it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# torch's stores look up the name of each peer's address: a name server that drops queries holds up each connection.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=5000, deadline=None)
settings.load_profile("repeatable")

# Tests call by the names that torch has since 2.13.
for newer, older in {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}.items():
    if not hasattr(dist, newer):
        setattr(dist, newer, getattr(dist, older))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes long; runs only where -m names it")
    config.addinivalue_line("markers", "job: launches or compiles whole training jobs; make test-jobs runs it")
    config.addinivalue_line("markers", "promise(*numbers): those of docs/promises.md that it holds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="slow: run with -m slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
