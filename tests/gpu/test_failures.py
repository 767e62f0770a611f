"""Errors on a GPU: ranks that do not come, die or abort. Every rank ends by itself, soon; none takes the test along."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from support import gpu_world
from support.gpu_world import DEVICE, KIND, SOON, Gather, ReduceScatter, fails, on_device, synchronize

import zcomm

pytestmark = [pytest.mark.cuda_only, pytest.mark.stand_in]

IN_TIME = 30.0
NUM = 4096

RAISING = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
run = functools.partial(gpu_world.run, env=RAISING)
collect = functools.partial(gpu_world.collect, env=RAISING)


def used() -> Gather:
    gather = Gather(NUM)
    gather()
    gather.check()
    dist.barrier()
    return gather


@pytest.mark.parametrize(
    "env",
    [RAISING, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}],
    ids=["0", "2", "blocking wait"],
)
def test_a_peer_that_does_not_come_to_a_call(env: dict[str, str]) -> None:
    """The call ends with the timeout, on the GPU, too, and says what this rank called; the peer learns of it."""

    def body() -> str:
        gather, scatter = used(), ReduceScatter(NUM)
        if dist.get_rank() == 1:
            time.sleep(SOON + 4)
            return fails(gather)
        scatter()  # rank 1 does not
        synchronize()  # which the watchdog ends
        return fails(gather)

    texts = run(body, 2, group_seconds=SOON, env=env)
    assert "reduce_scatter" in texts[0] and f"{SOON * 1000:.0f} ms" in texts[0], texts[0]
    assert "rank 0" in texts[1] and "reduce_scatter" in texts[1], texts[1]


def test_a_peer_that_does_not_come_to_the_first_call() -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            time.sleep(SOON + 2)
            return "ranks [1]"
        return fails(Gather(NUM))

    for text in run(body, 2, group_seconds=SOON):
        assert "ranks [1]" in text or "rank 1" in text, text


def test_ranks_that_compress_differently() -> None:
    """Messages of both formats have equal sizes, so every transfer succeeds."""

    def body() -> str:
        gather = used()
        with zcomm.override(all_gather="fp8:128" if dist.get_rank() else "int8:128"):
            return fails(gather)

    for rank, text in enumerate(run(body, 2, group_seconds=SOON)):
        assert f'ranks called different things: rank {rank} "all_gather float32[2 x 4096]' in text, text
        assert "fp8:128" in text and "int8:128" in text, text


def test_checksums_are_refused() -> None:
    def body() -> None:
        values = on_device(torch.ones(NUM))
        for call in (Gather(NUM), lambda: dist.send(values, 1 - dist.get_rank())):
            with pytest.raises(ValueError, match="verify: expected False for a tensor on a GPU, got True"):
                call()

    run(body, 2, options=zcomm.Options(verify=True, exchanges="int8:128", min_bytes=0))


def test_a_peer_that_is_killed() -> None:
    def body() -> str:
        gather = used()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fails(gather)

    outcomes = collect(body, 2, grace=IN_TIME, group_seconds=SOON)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].finished and outcomes[0].error is None, outcomes[0].trace
    named = ("zcomm, rank 0",) if KIND == "stand-in" else ("rank 0", "rank 1")
    assert any(name in outcomes[0].value for name in named), outcomes[0].value


def test_a_peer_that_raises() -> None:
    """Its process ends with an exception, in the middle of the others' call."""

    def body() -> str:
        gather = used()
        if dist.get_rank() == 1:
            raise LookupError("on purpose")
        return fails(gather)

    outcomes = collect(body, 2, grace=IN_TIME, group_seconds=SOON)
    assert outcomes[1].error == "LookupError: on purpose"
    assert outcomes[0].finished and outcomes[0].error is None, outcomes[0].trace


def test_abort_ends_a_call_that_waits_for_a_peer() -> None:
    """From another thread, long before the timeout; the peer can no longer use the group either."""

    def body() -> None:
        gather = used()
        group = dist.group.WORLD
        if dist.get_rank() == 1:
            time.sleep(3)
            assert "rank 0" in fails(gather) or "abort" in fails(gather)
            return
        gather()  # rank 1 does not
        threading.Timer(1.0, group._get_backend(DEVICE).abort).start()
        synchronize()
        with pytest.raises(RuntimeError, match=r"shut down|abort"):
            gather()

    for outcome in collect(body, 2, grace=IN_TIME, group_seconds=30.0):
        assert not outcome.stuck and outcome.error is None, outcome.trace


@pytest.mark.parametrize("waited", [False, True], ids=["synchronous", "waited for"])
def test_destroying_a_group_does_not_wait_for_a_peer_that_does_not_come(waited: bool) -> None:
    def body() -> float:
        used()
        store = dist.distributed_c10d._get_default_store()
        start = time.monotonic()
        if dist.get_rank() == 0:
            work = ReduceScatter(NUM)(async_op=waited)  # rank 1 does not
            if waited:
                work.wait()
            dist.destroy_process_group()
            store.set("ended", "")
        else:
            store.wait(["ended"])
        return time.monotonic() - start

    assert run(body, 2, group_seconds=60.0)[0] < 30.0


def test_waiting_for_a_failed_call_raises() -> None:
    def body() -> None:
        used()
        if dist.get_rank() == 1:
            time.sleep(SOON + 2)
            return
        work = ReduceScatter(NUM)(async_op=True)
        deadline = time.monotonic() + IN_TIME
        while work.is_success() and time.monotonic() < deadline:
            time.sleep(0.05)
        for wait in (work.wait, work.synchronize):
            with pytest.raises(RuntimeError, match="reduce_scatter"):
                wait()
        assert not work.is_success()

    run(body, 2, group_seconds=SOON)


def test_a_failure_whose_calls_have_returned_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """The default: what the calls left is undefined, and looks like any other result."""

    def body() -> None:
        used()
        if dist.get_rank() == 0:
            ReduceScatter(NUM)()
        time.sleep(IN_TIME)

    outcomes = gpu_world.collect(body, 2, grace=1.0, group_seconds=SOON)
    assert outcomes[0].exit_code == -signal.SIGABRT and not outcomes[0].finished
    assert "reduce_scatter" in (text := capfd.readouterr().err) and "undefined results" in text


def test_after_a_failure_a_new_group_works() -> None:
    def body() -> None:
        group = dist.new_group([0, 1])
        gather = Gather(NUM, group=group)
        gather()
        gather.check()
        if dist.get_rank() == 0:
            group._get_backend(DEVICE).abort()
        fails(gather)
        dist.destroy_process_group(group)
        again = Gather(NUM, seed=1, group=dist.new_group([0, 1]))
        again()
        again.check()

    run(body, 2, group_seconds=SOON)


def test_wrong_arguments_raise_before_anything_moves() -> None:
    def body() -> None:
        gather = used()
        whole, shard, doubles = (
            on_device(torch.zeros(num, dtype=dtype))
            for num, dtype in ((2 * NUM, torch.float32), (NUM, torch.float32), (NUM, torch.float64))
        )
        if dist.get_rank() == 0:
            with pytest.raises((ValueError, RuntimeError)):
                dist.all_gather_into_tensor(whole, shard[1:])
            with pytest.raises((ValueError, RuntimeError)):
                dist.reduce_scatter_tensor(shard, whole[2:])
            with pytest.raises((ValueError, RuntimeError, TypeError)):
                dist.all_gather_into_tensor(whole, doubles)
        gather.set(4)
        gather()
        gather.check()
        assert zcomm.stats().all_gather.calls == 2

    run(body, 2)


@pytest.mark.parametrize("connected", [True, False])
def test_destroying_a_group_ends_what_is_under_way(connected: bool) -> None:
    def body() -> None:
        if connected:
            used()
        gathers = [Gather(NUM, seed=6), Gather(NUM, seed=7)]
        scatter = ReduceScatter(NUM)
        for call in (gathers[0], scatter, gathers[1]):
            call(async_op=True)
        dist.destroy_process_group()
        for gather in gathers:
            gather.check()

    run(body, 2)
