"""Each GPU has a rank. One rank is killed, stopped or out of memory while all make compressed calls. The others end
soon, with an error that names a rank or the time-out, and no process is left."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import gpu_world
from support.gpu_world import GPU, KIND, Gather, ReduceScatter, fails
from support.worlds import Outcome

pytestmark = [pytest.mark.cuda_only, pytest.mark.stand_in]

SIZE = max(2, torch.cuda.device_count() // 2 * 2) if KIND == "cuda" else 4
SOON = 15.0 if KIND == "cuda" else 8.0  # a group's timeout
LIMIT = SOON + 45.0  # of all that a world does
NUM, CALLS = 1 << 14, 20  # elements of a call, and calls that are under way at once
BIG = 1 << 24 if KIND == "cuda" else 1 << 18  # elements whose scratch no block of the allocator holds
VICTIM = SIZE - 1

layout = pytest.mark.parametrize("num_nodes", [1, 2], ids=[f"1x{SIZE}", f"2x{SIZE // 2}"])


def outcomes(body: Any, num_nodes: int) -> list[Outcome]:
    return gpu_world.collect(
        body,
        SIZE,
        tcp=True,  # a rank that stops may hold the lock of a file
        nodes=gpu_world.nodes_of(SIZE, SIZE // num_nodes),
        grace=LIMIT,
        seconds=LIMIT,
        group_seconds=SOON,
        env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    )


def calling() -> str:
    """Return the error that ends calls. Many calls are under way at a time."""
    gather = Gather(NUM)
    return fails(lambda: [gather() for _ in range(CALLS)])


def ready() -> None:
    gather = Gather(NUM)
    gather()
    gather.check()
    dist.barrier()


def leave() -> None:
    """Wait for all but the victim on rank 0, which serves the store."""
    store = dist.distributed_c10d._get_default_store()
    store.add("ended", 1)
    while dist.get_rank() == 0 and store.add("ended", 0) < SIZE - 1:
        time.sleep(0.05)


def check(ended: list[Outcome]) -> None:
    assert not multiprocessing.active_children()
    for rank, one in enumerate(ended):
        if rank != VICTIM:
            named = rf"rank (?!{rank}\b)\d|ranks \[|{SOON * 1000:.0f} ms|remote process"  # the last is NCCL's word
            assert one.finished and one.error is None, (rank, one.trace)
            assert re.search(named, one.value), (rank, one.value)


@layout
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_gets_a_signal(number: signal.Signals, num_nodes: int) -> None:
    def body() -> str:
        store = dist.distributed_c10d._get_default_store()
        ready()
        if dist.get_rank() == VICTIM:
            store.set("victim", str(os.getpid()))
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
        text = calling()
        leave()
        if dist.get_rank() == 0 and number == signal.SIGSTOP:
            os.kill(int(store.get("victim")), signal.SIGKILL)
        return text

    ended = outcomes(body, num_nodes)
    assert ended[VICTIM].exit_code == -signal.SIGKILL and not ended[VICTIM].stuck, ended[VICTIM]
    check(ended)


@layout
def test_a_rank_runs_out_of_memory(num_nodes: int) -> None:
    def body() -> str:
        ready()
        big = ReduceScatter(BIG)
        if dist.get_rank() == VICTIM:
            take_memory()
            big()
        text = fails(big)
        leave()
        return text

    ended = outcomes(body, num_nodes)
    assert (ended[VICTIM].error or "").startswith("OutOfMemoryError"), ended[VICTIM]
    check(ended)


def take_memory() -> None:
    """Leave nothing to torch's allocator but what it has."""
    if KIND == "stand-in":
        GPU.host.set_memory_limit(GPU.host.bytes_made())
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
