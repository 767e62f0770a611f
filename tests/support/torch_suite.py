"""torch's own suites, over zcomm or gloo. A program: ``torch_suite.py BACKEND [TEST ...]``.

They are those that torch's wheel has: the one for distributed backends, and DDP's under distributed autograd.

The suite chooses tests by the backend's name, so zcomm poses as gloo: its decorators see "gloo", and every group that
is made under that name is one of zcomm. Writes JSON to the file that SUITE_RESULTS names: test -> "passed", "skipped"
or what failed.
"""

# ruff: noqa: E402

from __future__ import annotations

import json
import os
import sys
import types
import unittest
from typing import Any

os.environ.update(BACKEND="gloo", WORLD_SIZE="3", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

# torch.testing derives its test cases from this package's, and uses nothing else of it here.
sys.modules.setdefault("expecttest", types.ModuleType("expecttest")).__dict__.setdefault("TestCase", unittest.TestCase)

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.distributed import ddp_under_dist_autograd_test, distributed_test
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

import zcomm.distributed.backend  # noqa: F401


def pose_as_gloo() -> None:
    """Every group called gloo is one of zcomm, and says that it is gloo."""
    make, name_of = distributed_c10d._new_process_group_helper, distributed_c10d.get_backend

    def make_ours(size: Any, rank: Any, ranks: Any, backend: Any, *rest: Any, **fields: Any) -> Any:
        return make(size, rank, ranks, "zcomm" if str(backend) == "gloo" else backend, *rest, **fields)

    def named_gloo(group: Any = None) -> str:
        name = name_of(group)
        return "gloo" if name == "zcomm" else name

    distributed_c10d._new_process_group_helper = make_ours
    for module in (distributed_c10d, dist, distributed_test):
        if hasattr(module, "get_backend"):
            module.get_backend = named_gloo


class TestSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Suite composed as by torch's own runner, with forked ranks: 0.5 s a test instead of 10."""

    def setUp(self) -> None:
        super(distributed_test.TestDistBackend, self).setUp()
        distributed_test.initialize_temp_directories()
        distributed_test.Barrier.init()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Forked(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class TestDdpUnderAutograd(
    ddp_under_dist_autograd_test.DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, Forked
):
    """DDP on some ranks of a job with remote modules."""


class TestDdpComparison(ddp_under_dist_autograd_test.DdpComparisonTest, TensorPipeRpcAgentTestFixture, Forked):
    """Distributed autograd gives the gradients that local autograd gives."""


SUITES = (TestSuite, TestDdpUnderAutograd, TestDdpComparison)


class Record(unittest.TextTestResult):
    """Remembers what became of each test."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.outcomes: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        self.outcomes[getattr(test, "_testMethodName", str(test))] = outcome

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._note(test, "skipped")

    def addFailure(self, test: Any, error: Any) -> None:
        super().addFailure(test, error)
        self._note(test, self.failures[-1][1])

    def addError(self, test: Any, error: Any) -> None:
        super().addError(test, error)
        self._note(test, self.errors[-1][1])


def main() -> None:
    backend, *names = sys.argv[1:]
    if backend == "zcomm":
        pose_as_gloo()
    sys.argv[1:] = []
    known = [(suite, name) for suite in SUITES for name in unittest.defaultTestLoader.getTestCaseNames(suite)]
    chosen = unittest.TestSuite(suite(name) for suite, name in known if name in names or not names)
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2, resultclass=Record).run(chosen)
    assert isinstance(result, Record)
    with open(os.environ["SUITE_RESULTS"], "w") as file:
        json.dump(result.outcomes, file)


if __name__ == "__main__":
    main()
