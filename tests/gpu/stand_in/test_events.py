"""The stream semantics of ProcessGroupNCCL, event by event."""

from __future__ import annotations

import gc

import pytest
from support.stand_in import Gather, ReduceScatter, dist, host, run, torch


def connect() -> Gather:
    """A group that has been used, so that what follows is the steady state; and a call to make in it, once, as it
    replaces its own input."""
    Gather(4096)(async_op=True).wait()
    host.synchronize()
    host.set_stream(7)
    host.restart_log()
    return Gather(4096)


def test_a_synchronous_call_is_on_the_callers_stream() -> None:
    def body() -> None:
        gather = connect()
        gather()
        assert host.take_log() == ["record e1 s7"]  # the end of the call, for the end of the group
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

    run(body, 2, env={} if is_high else {"TORCH_NCCL_HIGH_PRIORITY": "0"})


def test_a_barrier_of_the_gpu_follows_asynchronous_calls() -> None:
    """As in ProcessGroupNCCL, whose calls share a stream."""

    def body() -> None:
        import zcomm.distributed.backend

        fake = torch._C._distributed_c10d.FakeProcessGroup._create_internal(dist.get_rank(), 2)
        zcomm.distributed.backend._make_nccl = lambda *arguments: fake
        gather = connect()
        work = gather(async_op=True)
        host.take_log()
        dist.barrier(device_ids=[0])
        assert "block s7 e2" in host.take_log()
        work.wait()
        gather.check()

    run(body, 2)
