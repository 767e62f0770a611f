"""The ranks that tests start: tests/support/worlds.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.calls import gather, mine
from support.worlds import WorldError, run


def test_worlds_report_failures() -> None:
    """What one rank raises is what the test shows."""

    def body() -> None:
        assert dist.get_rank() == 0, "only rank 0 is fine"
        gather(mine())

    with pytest.raises(WorldError, match="only rank 0 is fine"):
        run(body, group_seconds=3.0)


def test_ranks_may_use_threads_after_the_process_that_forks_them_has_computed() -> None:
    def compute() -> None:
        torch.ones(1 << 20).add_(1)

    def body() -> None:
        torch.set_num_threads(3)
        compute()

    compute()
    run(body, seconds=20.0)
