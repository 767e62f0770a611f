"""A store that does not answer: its process is stopped, or a thread waits in the connection to it."""

from __future__ import annotations

import datetime
import os
import signal
import threading

import pytest
import torch.distributed as dist
from support.calls import gather, mine
from support.worlds import collect

SOON = 2.0  # the timeout of groups
LATE = 30.0  # well after that


def stop_rank_0(first: bool) -> None:
    """Stops the process that serves the store, before or after the group's first call."""
    if not first:
        gather(mine())
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.promise(9)
@pytest.mark.parametrize("first", [False, True], ids=["later", "at the first call"])
def test_a_stopped_peer_that_serves_the_store_times_out(first: bool) -> None:
    def body() -> None:
        stop_rank_0(first)
        gather(mine())

    outcomes = collect(body, 3, tcp=True, group_seconds=SOON, grace=10, seconds=LATE)
    assert outcomes[0].stuck
    for outcome in outcomes[1:]:
        assert not outcome.stuck and outcome.error, outcome
        said = "store does not answer" if first else "rank 0 did not answer"
        assert said in outcome.error or "lost rank" in outcome.error, outcome


@pytest.mark.promise(9)
@pytest.mark.parametrize("first", [False, True], ids=["later", "at the first call"])
def test_abort_returns_although_the_store_hangs(first: bool) -> None:
    """abort() and the waiting call both return well before the group's timeout."""

    def body() -> None:
        stop_rank_0(first)
        group = dist.group.WORLD
        assert group is not None
        aborting = threading.Timer(1, group.abort)
        aborting.start()
        with pytest.raises(RuntimeError):
            gather(mine())
        aborting.join(LATE)
        assert not aborting.is_alive()
        os._exit(1)  # ends the wait for rank 0

    outcomes = collect(body, 2, tcp=True, group_seconds=4 * LATE, grace=1, seconds=2 * LATE)
    assert outcomes[1].exit_code == 1 and outcomes[1].error is None, outcomes[1]


@pytest.mark.promise(9)
@pytest.mark.parametrize("first", [False, True], ids=["later", "at the first call"])
def test_another_threads_wait_in_the_store_delays_no_call(first: bool) -> None:
    """Calls and the news of a lost peer do not wait for the store."""

    def body() -> bool:
        if not first:
            gather(mine())
        store = dist.distributed_c10d._get_default_store()
        patient = threading.Thread(target=lambda: wait_in_vain(store), daemon=True)
        if dist.get_rank() == 0:
            patient.start()
        gather(mine())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="lost rank 1"):
            gather(mine())
        return patient.is_alive()

    outcomes = collect(body, 2, tcp=True, grace=LATE, seconds=2 * LATE)
    assert outcomes[0].value is True, outcomes[0]


def wait_in_vain(store: dist.Store) -> None:
    with pytest.raises(RuntimeError):
        store.wait(["nobody sets it"], datetime.timedelta(seconds=LATE))
