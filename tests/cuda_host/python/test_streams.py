"""The stream semantics of ProcessGroupNCCL, event by event."""

from __future__ import annotations

import gc

import pytest
import torch
from support import worlds
from support.cuda_world import Gather, ReduceScatter, dist, host, run, values


def connect() -> Gather:
    """A group that has been used, so that what follows is the steady state; and a call to make in it, once, as it
    replaces its own input."""
    Gather(4096)(async_op=True).wait()
    host.synchronize()
    host.set_stream(7)
    host.restart_log()
    return Gather(4096)


def test_a_synchronous_call_is_on_the_callers_stream_and_touches_no_event() -> None:
    def body() -> None:
        gather = connect()
        gather()
        assert host.take_log() == []
        gather.check()

    run(body, 2)


def test_an_asynchronous_call_is_on_the_groups_stream() -> None:
    def body() -> None:
        gather = connect()
        work = gather(async_op=True)
        # Behind what stream 7 holds; the end of the work; the end of its future.
        assert host.take_log() == ["record e1 s7", "block s101 e1", "record e2 s101", "record e3 s101"]
        host.set_stream(9)
        work.wait()
        assert host.take_log() == ["block s9 e2"]
        gather.check()

    run(body, 2)


def test_wait_with_a_timeout_blocks_the_host() -> None:
    def body() -> None:
        import datetime

        gather = connect()
        host.close_gate()
        work = gather(async_op=True)
        with pytest.raises(RuntimeError, match="not done within the 50 ms"):
            work.wait(datetime.timedelta(milliseconds=50))
        assert not work.is_completed()
        host.open_gate()
        work.wait(datetime.timedelta(seconds=20))
        assert work.is_completed()
        assert torch.equal(gather.memory, gather.expected)  # with no synchronization

    run(body, 2)


def test_a_future_is_ordered_on_the_stream_of_its_waiter() -> None:
    def body() -> None:
        gather = connect()
        future = gather(async_op=True).get_future()
        host.take_log()
        host.set_stream(9)
        result = future.wait()
        assert [line for line in host.take_log() if line.startswith("block")] == ["block s9 e3"]
        assert result[0].data_ptr() == gather.output.data_ptr()
        gather.check()

    run(body, 2)


def test_the_host_never_waits_for_the_device() -> None:
    def body() -> None:
        gather, scatter = connect(), ReduceScatter(4096)
        host.close_gate()  # stream 7 is stuck from here on: a call that waited for it would never return
        for _ in range(5):
            Gather(4096)()
            scatter()
        works = [gather(async_op=True), scatter(async_op=True)]
        assert not works[0].is_completed()
        for work in works:
            work.wait()
        assert not works[1].is_completed()
        host.open_gate()
        gather.check()
        assert works[1].is_completed()

    run(body, 2)


def test_calls_come_after_what_their_stream_held_before() -> None:
    def body() -> None:
        gather = connect()
        fresh = values(4096, seed=5)
        expected = Gather(4096, seed=5).expected
        for asynchronous in (False, True):
            gather.shard.zero_()
            host.set_delays(dist.get_rank() + 1, 200)
            host.close_gate()
            host.copy(gather.input, fresh)  # while the gate is closed, the shard holds zeros
            work = gather(async_op=asynchronous)
            late = torch.zeros_like(gather.memory)
            if work is not None:
                work.wait()
            host.copy(host.as_cuda(late), gather.memory)  # on stream 7, without any wait of the host
            host.open_gate()
            host.synchronize()
            assert torch.equal(late, expected), asynchronous

    run(body, 2)


def test_calls_on_two_streams_of_one_group_do_not_share_scratch() -> None:
    def body() -> None:
        connect()
        gathers = [Gather(4096, seed=seed) for seed in range(6)]
        host.set_delays(dist.get_rank() + 1, 200)
        for number, gather in enumerate(gathers):
            host.set_stream(7 + number % 2)
            gather(async_op=number % 3 == 0)
        for gather in gathers:
            gather.check()

    run(body, 2)


def test_tensors_of_a_dropped_work_live_until_the_device_is_done() -> None:
    def body() -> None:
        connect()
        freed = []
        gather = Gather(4096)
        gather.memory = None

        class Owner:
            def __del__(self) -> None:
                freed.append(True)

        gather.output.owner = Owner()  # goes with the last reference to the tensor
        host.close_gate()
        gather(async_op=True)
        del gather
        gc.collect()
        Gather(16)(async_op=True)  # a call looks for tensors to release
        gc.collect()
        assert not freed
        host.open_gate()
        host.synchronize()
        Gather(16)(async_op=True)
        gc.collect()
        assert freed

    run(body, 2)


def test_the_steady_state_creates_nothing() -> None:
    def body() -> None:
        gather, scatter = connect(), ReduceScatter(4096)
        for _ in range(3):
            host.close_gate()  # both calls are under way at once: the most that the loop below can need
            gather()
            scatter()
            host.open_gate()
            host.synchronize()
        before = (host.num_creations(), host.num_made_pieces(), host.num_live_pieces())
        for _ in range(10):
            gather()
            scatter()
            host.synchronize()
        assert (host.num_creations(), host.num_made_pieces(), host.num_live_pieces()) == before

    run(body, 2)


@pytest.mark.parametrize("is_high", [True, False])
def test_high_priority_is_asked_of_torch(is_high: bool) -> None:
    def body() -> None:
        Gather(4096)(async_op=True).wait()
        assert ("pool s101 high" in host.take_log()) == is_high
        host.synchronize()

    run(body, 2, options=worlds.options(**({} if is_high else {"high_priority_stream": False})))
