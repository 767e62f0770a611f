"""`compress="auto"` on GPU tensors: rehearsals wait for the stream, and are refused where that cannot be."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.stand_in import Gather, ReduceScatter, dist, host, run, torch, values, worlds, zcomm

AUTO = worlds.options(compress="auto", all_reduce="int8:64")


def exact_calls_are_free() -> None:
    """The exact group of the device: none of its calls does anything."""
    import zcomm.distributed.backend

    def make(store: Any, rank: int, size: int, options: Any) -> Any:
        return torch._C._distributed_c10d.FakeProcessGroup._create_internal(rank, size)

    zcomm.distributed.backend._make_nccl = make


def exact_calls_are_slow() -> None:
    """Each of them goes in hundreds of messages of 32 values: tens of times the work of a compressed call, however busy
    the machine is."""
    import zcomm.distributed.backend

    def make(store: Any, rank: int, size: int, options: Any) -> Any:
        pieces = worlds.options(chunk_bytes=128)
        pieces._timeout, pieces.group_name = options._timeout, "exact"
        return zcomm.distributed.backend._Group(lambda: store, rank, size, pieces).make()

    zcomm.distributed.backend._make_nccl = make


def test_calls_that_gain_are_compressed() -> None:
    def body() -> list[Any]:
        exact_calls_are_slow()
        gather = Gather(20000)
        gather()
        gather.check()
        (decision,) = zcomm.stats().decisions
        assert decision.compressed and decision.rounds > 0
        assert decision.exact_seconds > decision.compressed_seconds > 0
        assert zcomm.stats().rehearsals.calls == 2 * (decision.rounds + 1)
        again = Gather(20000, seed=1)
        host.take_log()
        again()
        assert not [line for line in host.take_log() if line.startswith("synchronize")]
        again.check()
        gathers = zcomm.stats().all_gather
        assert gathers.calls == 2 and gathers.exact == {}
        assert zcomm.stats().decisions == [decision]
        return [decision]

    first, second = run(body, 2, options=AUTO)
    assert first == second


def test_without_scratch_the_group_ends_as_ranks_count_their_calls() -> None:
    """A retry would count twice, on one rank alone."""

    def body() -> None:
        exact_calls_are_slow()
        Gather(20000)()
        ReduceScatter(1 << 18)()
        host.synchronize()
        assert all(decision.compressed for decision in zcomm.stats().decisions)
        if dist.get_rank() == 1:
            host.set_memory_limit(host.bytes_made())
            with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
                ReduceScatter(3 << 17)(async_op=True)  # of the same class, on a stream that has no scratch yet
            host.set_memory_limit(-1)
        with pytest.raises(RuntimeError, match="out of memory, and with compress='auto' ranks decide"):
            for _ in range(100):
                Gather(20000)()
                host.synchronize()
                time.sleep(0.1)

    run(body, 2, options=AUTO, group_seconds=60.0, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})


def test_the_first_call_rehearses() -> None:
    """A call that is free is the faster one; the host waits for rehearsals alone."""

    def body() -> list[Any]:
        exact_calls_are_free()
        host.set_delays(1 + dist.get_rank(), 50)
        memory = values(40000)
        tensor = host.as_cuda(memory)
        host.take_log()
        dist.all_reduce(tensor)
        (decision,) = zcomm.stats().decisions
        assert not decision.compressed and decision.rounds > 0
        assert decision.compressed_seconds > decision.exact_seconds > 0
        assert zcomm.stats().rehearsals.calls == 2 * (decision.rounds + 1)
        assert zcomm.stats().all_reduce.exact["no_gain"].calls == 1
        waits = [line for line in host.take_log() if line.startswith("synchronize s")]
        assert len(waits) == 4 * (decision.rounds + 1)  # before and after each call, both ways
        dist.all_reduce(tensor)
        assert not [line for line in host.take_log() if line.startswith("synchronize")]
        return [decision]

    first, second = run(body, 2, options=AUTO)
    assert first == second


def test_a_rehearsal_is_not_captured() -> None:
    def body() -> None:
        exact_calls_are_free()
        gather = Gather(20000)
        host.set_stream(7)
        host.begin_capture()
        with pytest.raises(RuntimeError, match=r"before the capture of a CUDA graph.*got the first all_gather"):
            gather()
        host.end_capture()
        assert zcomm.stats().decisions == []

    run(body, 2, options=AUTO)


def test_a_rehearsal_is_not_coalesced() -> None:
    def body() -> None:
        exact_calls_are_free()
        gather = Gather(20000)
        with (
            pytest.raises(RuntimeError, match=r"that is not coalesced.*got the first all_gather"),
            dist._coalescing_manager(device=torch.device("cuda", 0)),
        ):
            gather()

    run(body, 2, options=worlds.options(compress="auto", forms="in_place,coalesced"))


def test_steps_wait_for_the_gpu_at_the_marks_of_blocks_alone() -> None:
    """Before the counted steps of a block of four and after them; once a way is chosen, never."""

    def body() -> tuple[list[int], int]:
        exact_calls_are_free()
        memory = values(40000)
        tensor = host.as_cuda(memory)
        for _ in range(4):
            dist.all_reduce(tensor)
            zcomm.codec.set_step(0)
        host.take_log()
        waits = []
        while zcomm.stats().by_steps is None:
            dist.all_reduce(tensor)
            zcomm.codec.set_step(0)
            waits.append(len([line for line in host.take_log() if line.startswith("synchronize")]))
        for _ in range(40):
            dist.all_reduce(tensor)
            zcomm.codec.set_step(0)
        assert not [line for line in host.take_log() if line.startswith("synchronize")]
        return waits, zcomm.stats().by_steps.steps

    (waits, steps), other = run(body, 2, options=AUTO)
    assert other == (waits, steps)
    assert set(waits) == {0, 1} and len(waits) >= 4 * steps / 3
    assert all(sum(waits[i : i + 4]) == 2 for i in range(len(waits) - 4))


def test_a_capture_in_a_trial_keeps_the_way_of_calls() -> None:
    """Its replays have one way, whatever the block is; nothing waits."""

    def body() -> list[bool]:
        exact_calls_are_free()
        memory = values(40000)
        tensor = host.as_cuda(memory)
        dist.all_reduce(tensor)
        (by_itself,) = [one.compressed for one in zcomm.stats().decisions]
        ways = []
        for _ in range(24):
            dist.all_reduce(tensor)
            host.set_stream(7)
            host.begin_capture()
            before = zcomm.stats().all_reduce.calls
            dist.all_reduce(tensor)
            ways.append(zcomm.stats().all_reduce.calls > before)
            host.end_capture()
            host.set_stream(0)
            zcomm.codec.set_step(0)
        assert zcomm.stats().by_steps is None
        assert set(ways) == {by_itself}
        return ways

    first, second = run(body, 2, options=AUTO)
    assert first == second
