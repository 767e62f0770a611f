"""What a group that has failed still does: nothing."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import worlds
from support.stand_in import NCCL, Gather, ReduceScatter, dist, host, run, torch, values, with_nccl

RAISING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


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

    run(body, 2, group_seconds=4.0, env=RAISING)


def begin_capture_of(call: Gather) -> None:
    call()
    host.synchronize()
    host.set_stream(5)
    host.begin_capture()
    call()


def test_a_call_beside_the_capture_of_another_thread_is_refused_and_the_group_goes_on() -> None:
    def body() -> None:
        captured, beside = Gather(4096), Gather(4096, seed=1)
        begin_capture_of(captured)
        with ThreadPoolExecutor(1) as pool:
            for fields in ({}, {"async_op": True}):
                error = pool.submit(beside, **fields).exception()
                assert isinstance(error, ValueError) and "stream: expected one of the CUDA graph" in str(error), error
        graph = host.end_capture()
        captured.memory.zero_()
        captured.shard.copy_(values(4096))
        graph.replay()
        captured.check()
        beside()
        beside.check()

    run(body, 2, env=RAISING)


def test_a_call_is_not_refused_for_a_later_capture_without_the_group() -> None:
    """Captures share a stream by default."""

    def body() -> None:
        captured, beside = Gather(4096), Gather(4096, seed=1)
        begin_capture_of(captured)
        host.end_capture()
        with ThreadPoolExecutor(1) as pool:
            host.begin_capture()
            pool.submit(beside).result()
            host.end_capture()
        host.synchronize()
        beside.check()

    run(body, 2, env=RAISING)


def test_asynchronous_calls_leave_the_capture_of_another_thread_whole() -> None:
    """The capture has nothing of the group; a call looks whether those before it are done."""

    def body() -> None:
        calls = [Gather(4096, seed=seed) for seed in range(3)]
        calls[0]()
        host.synchronize()
        with ThreadPoolExecutor(1) as pool:
            first = calls[1](async_op=True)
            pool.submit(host.set_stream, 5).result()
            pool.submit(host.begin_capture).result()
            second = calls[2](async_op=True)
            assert isinstance(first.is_completed(), bool)
            pool.submit(host.end_capture).result()
        for work, call in ((first, calls[1]), (second, calls[2])):
            work.wait()
            call.check()

    run(body, 2, env=RAISING)


@pytest.mark.parametrize("name", ["cudaEventQuery", "ncclCommGetAsyncError"])
def test_a_watchdog_that_cuda_keeps_ends_the_process(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where failures do not: nobody else would end what waits for the same lock."""
    nccl = ctypes.CDLL(NCCL)
    keep, num_kept = {
        "cudaEventQuery": (host.keep_event_queries, host.num_kept_event_queries),
        "ncclCommGetAsyncError": (nccl.nccl_host_keep_error_queries, nccl.nccl_host_num_kept_error_queries),
    }[name]

    def body() -> None:
        Gather(4096)()
        host.synchronize()
        if dist.get_rank() == 0:
            ReduceScatter(4096)()  # rank 1 does not
            keep(True)
            deadline = time.monotonic() + 30
            while num_kept() == 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert num_kept() > 0
            print("planted", file=sys.stderr, flush=True)
        time.sleep(30)

    env = {**RAISING, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2"}
    outcomes = worlds.collect(body, 2, **with_nccl({"grace": 1.0, "group_seconds": 60.0, "env": env}))
    assert outcomes[0].exit_code == -signal.SIGABRT and not outcomes[0].finished, outcomes[0].trace
    text = capfd.readouterr().err
    assert "planted" in text and f"{name} has kept the watchdog" in text and "in reduce_scatter" in text, text


def test_without_scratch_torchs_error_arrives_and_the_group_goes_on() -> None:
    """As a search for the largest batch expects: the same call succeeds once there is room, and no peer has failed."""

    def body() -> None:
        small, big = Gather(4096, seed=1), ReduceScatter(1 << 20)
        Gather(4096)()
        host.synchronize()
        if dist.get_rank() == 1:
            host.set_memory_limit(host.bytes_made())
            for async_op in (False, True):
                with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
                    big(async_op=async_op)
            host.set_memory_limit(-1)
        for call in (big, small):
            call()
        small.check()

    run(body, 2, group_seconds=60.0)
