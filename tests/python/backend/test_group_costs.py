"""What a group takes of its process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.calls import gather, mine
from support.worlds import run


def test_a_group_costs_what_gloos_does_until_it_compresses() -> None:
    """docs/jobs.md has the figures, with a store on rank 0."""

    def body() -> None:
        def counts() -> tuple[int, int]:
            descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
            return descriptors, threads

        def cost(use: Callable[[], Any], most: tuple[int, int]) -> tuple[int, int]:
            """What is left when threads have ended that only ask the store, or after some seconds."""
            before = counts()
            use()
            for _ in range(100):
                now = counts()
                if now[0] - before[0] <= most[0] and now[1] - before[1] <= most[1]:
                    break
                time.sleep(0.05)
            return now[0] - before[0], now[1] - before[1]

        def used(backend: str) -> Any:
            group = dist.new_group(backend=backend)
            dist.all_reduce(torch.ones(4), group=group)
            return group

        gather(mine())
        dist.barrier()
        gloos = cost(lambda: used("gloo"), (5, 3))
        assert gloos == cost(lambda: used("zcomm"), gloos) == (5, 3)
        group = used("zcomm")
        descriptors, threads = cost(lambda: gather(mine(), group=group), (10, 2))
        assert descriptors <= 10 and threads == 2, (descriptors, threads)

    run(body, 2)
