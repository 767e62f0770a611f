"""Errors on the GPU path: a peer that is lost or does not come, and a group that is aborted."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.cuda_world import Gather, ReduceScatter, dist, host, run, torch, with_nccl, worlds

RAISING = worlds.options(end_on_failure=False)


def test_a_peer_that_does_not_come_to_a_call() -> None:
    def body() -> str:
        gather = Gather(4096)
        gather()
        host.synchronize()
        if dist.get_rank() == 0:
            ReduceScatter(4096)()  # rank 1 does not
            host.synchronize()  # the watchdog ends it
        else:
            time.sleep(4)
        with pytest.raises(RuntimeError) as caught:
            for _ in range(100):
                gather()
                time.sleep(0.05)
        return str(caught.value)

    texts = run(body, 2, group_seconds=2.0, options=RAISING)
    assert "reduce_scatter" in texts[0] and "2000 ms" in texts[0]
    assert "rank 0" in texts[1] and "reduce_scatter" in texts[1]


def test_a_peer_that_dies() -> None:
    def body() -> str:
        gather = Gather(4096)
        gather()
        host.synchronize()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError) as caught:
            for _ in range(200):
                gather()
                host.synchronize()
                time.sleep(0.05)
        return str(caught.value)

    fields = with_nccl({"group_seconds": 3.0, "options": RAISING})
    outcomes = worlds.collect(body, 2, grace=10.0, **fields)
    assert outcomes[0].finished and outcomes[0].error is None, outcomes[0].trace
    assert "zcomm, rank 0" in outcomes[0].value


def test_waiting_for_a_failed_call_raises() -> None:
    def body() -> None:
        gather = Gather(4096)
        gather()
        host.synchronize()
        if dist.get_rank() == 0:
            work = ReduceScatter(4096)(async_op=True)
            deadline = time.monotonic() + 20
            while work.exception() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            for wait in (work.wait, work.synchronize):
                with pytest.raises(RuntimeError, match="reduce_scatter"):
                    wait()
            assert not work.is_success()
        else:
            time.sleep(3)

    run(body, 2, group_seconds=1.0, options=RAISING)


def fail_after_returning(seconds: float) -> None:
    """A call that rank 1 does not make: it has returned long before the watchdog ends it."""
    gather = Gather(4096)
    gather()
    host.synchronize()
    if dist.get_rank() == 0:
        ReduceScatter(4096)()
        host.synchronize()
        time.sleep(2)  # the stream goes on before the group knows
    else:
        time.sleep(seconds)


def test_after_a_failure_no_call_of_the_group_takes_its_results() -> None:
    """Exact calls, barriers and compressed calls of a group that has failed raise, on CPU tensors, too."""

    def body() -> None:
        fail_after_returning(8)
        if dist.get_rank() == 1:
            return
        calls = [
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.all_reduce(host.as_cuda(torch.ones(1))),
            dist.barrier,
            lambda: dist.broadcast(torch.ones(1), 0),
            lambda: dist.send(torch.ones(1), 1),
            Gather(4096),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="reduce_scatter"):
                call()

    run(body, 2, group_seconds=4.0, options=RAISING)


def test_a_failure_whose_calls_have_returned_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Unless it is told otherwise: what the calls left is undefined, and looks like any other result."""

    def body() -> None:
        fail_after_returning(20)
        time.sleep(20)

    outcomes = worlds.collect(body, 2, grace=1.0, **with_nccl({"group_seconds": 4.0}))
    assert outcomes[0].exit_code == -signal.SIGABRT and not outcomes[0].finished
    assert "reduce_scatter" in (text := capfd.readouterr().err) and "undefined results" in text


def test_abort() -> None:
    def body() -> None:
        gather = Gather(4096)
        gather()
        host.synchronize()
        dist.group.WORLD._get_backend(gather.output.device).abort()
        with pytest.raises(RuntimeError, match=r"shut down|aborted"):
            gather()

    run(body, 2)


def test_destroying_a_group_ends_what_is_under_way() -> None:
    def body() -> None:
        gather = Gather(4096)
        for call in (Gather(4096), ReduceScatter(4096), gather):
            call(async_op=True)
        dist.destroy_process_group()
        gather.check()

    run(body, 2)
