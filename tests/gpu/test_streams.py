"""Streams, graphs and memory on a GPU: the semantics of ProcessGroupNCCL."""

from __future__ import annotations

import contextlib
import datetime
import gc

import pytest
import torch
import torch.distributed as dist
from support.gpu_world import (
    DEVICE,
    GPU,
    KIND,
    Gather,
    ReduceScatter,
    assert_same_bits,
    gathered,
    on_device,
    on_host,
    run,
    synchronize,
    values,
)
from support.worlds import options

import zcomm

pytestmark = pytest.mark.cuda_only

NUM = 50_003 if KIND == "cuda" else 4099


def connected(num: int = NUM) -> Gather:
    """A gather that has been used in both ways: what follows allocates nothing and loads no kernel."""
    gather = Gather(num)
    gather()
    gather(async_op=True).wait()
    gather.check()
    dist.barrier()
    return gather


@pytest.mark.stand_in
@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_come_after_what_their_stream_held_before(asynchronous: bool) -> None:
    """And what their stream gets afterwards comes after them, without any wait of the host."""

    def body() -> None:
        gather = connected()
        fresh, sevens = on_device(values(NUM, seed=5)), on_device(torch.full_like(gather.blank, -7.0))
        for scope in (contextlib.nullcontext(), GPU.on(GPU.new_stream())):
            late = on_device(gather.blank)
            gather.set(1)
            synchronize()
            with scope, GPU.late():
                GPU.copy(gather.source, fresh)
                work = gather(async_op=asynchronous)
                if work is not None:
                    work.wait()
                GPU.copy(late, gather.whole)
                GPU.copy(gather.whole, sevens)
            gather.seed = 5
            gather.check(late)
            assert_same_bits(on_host(gather.whole), on_host(sevens))

    run(body, 2)


@pytest.mark.stand_in
def test_the_host_never_waits_for_the_gpu() -> None:
    """Calls and wait() return while a kernel before them still runs."""

    def body() -> None:
        gather, scatter = connected(), ReduceScatter(NUM)
        scatter()
        scatter(async_op=True).wait()
        gather.set(2)
        synchronize()
        dist.barrier()
        with GPU.held_up():
            for _ in range(3):
                gather()
                scatter()
            works = [gather(async_op=True), scatter(async_op=True)]
            assert not works[0].is_completed()
            for work in works:
                work.wait()
            assert not works[1].is_completed()
        gather.check()
        assert works[0].is_completed() and works[1].is_completed()

    run(body, 2)


@pytest.mark.stand_in
def test_calls_on_two_streams_do_not_share_scratch() -> None:
    def body() -> None:
        connected()
        gathers = [Gather(NUM, seed=seed) for seed in range(8)]
        synchronize()
        streams = [GPU.new_stream(), GPU.new_stream()]
        for number, gather in enumerate(gathers):
            with GPU.on(streams[number % 2]):
                if dist.get_rank() == number % 2:
                    GPU.dawdle()
                work = gather(async_op=number % 3 == 0)
                if work is not None:
                    work.wait()
        for gather in gathers:
            gather.check()

    run(body, 2)


@pytest.mark.stand_in
def test_a_future_is_ordered_on_the_stream_of_its_waiter() -> None:
    def body() -> None:
        gather = connected()
        gather.set(3)
        copy = on_device(gather.blank)
        future = gather(async_op=True).get_future()
        with GPU.on(GPU.new_stream()):
            (result,) = future.wait()
            GPU.copy(copy, result)
        assert result.data_ptr() == gather.whole.data_ptr()
        gather.check(copy)

    run(body, 2)


@pytest.mark.stand_in
def test_wait_with_a_timeout_blocks_the_host() -> None:
    def body() -> None:
        gather = connected()
        gather.set(2)
        with GPU.held_up():
            work = gather(async_op=True)
            with pytest.raises(RuntimeError, match="not done within the 50 ms"):
                work.wait(datetime.timedelta(milliseconds=50))
            assert not work.is_completed()
        work.wait(datetime.timedelta(seconds=30))
        assert work.is_completed()
        assert_same_bits(GPU.now(gather.whole), gathered(2, NUM, torch.float32, 2))

    run(body, 2)


def test_dropped_works_keep_their_tensors_until_the_gpu_is_done() -> None:
    """The memory of what was dropped is overwritten as soon as it is free, in a process that has little: what the other
    rank gets shows whether it was too soon."""
    num, rounds = 1 << 20, 24

    def body() -> None:
        connected()
        total = torch.cuda.get_device_properties(0).total_memory
        room = torch.cuda.memory_reserved() + (96 << 20)
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / total))
        kept = []
        for seed in range(rounds):
            gather = Gather(num, torch.bfloat16, seed=seed)
            work = gather(async_op=True)
            if seed % 2 == dist.get_rank():
                if len(kept) == 4:
                    earlier, flight = kept.pop(0)
                    flight.wait()
                    earlier.check()
                kept.append((gather, work))
            del gather, work
            for _ in range(4):
                torch.full((2 * num,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        gc.collect()
        for gather, work in kept:
            work.wait()
            gather.check()

    run(body, 2)


def test_the_steady_state_allocates_nothing_from_the_driver() -> None:
    def body() -> None:
        gather, scatter = connected(), ReduceScatter(NUM)

        def round_of_calls() -> None:
            gather()
            scatter()
            works = [gather(async_op=True), scatter(async_op=True)]
            for work in works:
                work.wait()
            torch.cuda.synchronize()

        def count() -> dict[str, int]:
            stats = torch.cuda.memory_stats()
            names = ("num_device_alloc", "num_device_free", "num_alloc_retries", "segment.all.allocated")
            return {name: stats[name] for name in names if name in stats}

        for _ in range(4):
            round_of_calls()
        before = count()
        assert before, "torch tells no counts of its allocator"
        dist.barrier()
        for _ in range(12):
            round_of_calls()
        dist.barrier()
        assert count() == before
        gather.check()

    run(body, 2)


@pytest.mark.stand_in
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("size", "node_size"), [(2, 2), (4, 2)], ids=["1x2", "2x2"])
def test_graphs_replay_with_new_values(asynchronous: bool, size: int, node_size: int) -> None:
    def body() -> None:
        gather, scatter = Gather(NUM), ReduceScatter(NUM)

        def calls() -> None:
            for call in (gather, scatter):
                work = call(async_op=asynchronous)
                if work is not None:
                    work.wait()

        graph = GPU.captured(calls)
        blank = on_device(torch.full((NUM,), -1.0))
        for seed in (3, 4, 5):
            gather.set(seed)
            GPU.copy(scatter.own, blank)
            graph.replay()
            gather.check()
            replayed = on_host(scatter.own)
            GPU.copy(scatter.own, blank)
            scatter()
            assert_same_bits(replayed, on_host(scatter.own), seed)
            GPU.copy(scatter.whole, values(size * NUM, seed=seed))
        del graph
        synchronize()

    run(body, size, options=options(node_size=node_size))


@pytest.mark.stand_in
def test_a_group_is_not_connected_inside_a_capture() -> None:
    def body() -> None:
        gather = Gather(NUM)
        synchronize()
        with pytest.raises(RuntimeError, match=r"before .*captur"), GPU.refused_capture():
            gather()
        gather()  # and can be used afterwards
        gather.check()

    run(body, 2)


def test_variables_for_streams() -> None:
    """A stream of high priority; a wait() that blocks the host."""

    def body() -> None:
        gather = connected()
        gather.set(2)
        work = gather(async_op=True)
        work.wait()
        assert work.is_completed()
        assert_same_bits(gather.whole.cpu(), gathered(2, NUM, torch.float32, 2))
        assert zcomm.stats().all_gather.calls == 3

    run(body, 2, env={"TORCH_NCCL_HIGH_PRIORITY": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"})
