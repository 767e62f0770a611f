"""Streams, graphs and memory on a GPU: the semantics of ProcessGroupNCCL."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from support.gpu_world import DEVICE, Gather, ReduceScatter, assert_same_bits, gathered, run, values
from support.worlds import options

import zcomm

pytestmark = pytest.mark.cuda_only

NUM = 50_003
LONG = 4_000_000_000  # cycles of a kernel that does nothing: two seconds or so, far more than the host needs
SHORT = 100_000_000


def connected(num: int = NUM) -> Gather:
    """A gather that has been used in both ways: what follows allocates nothing and loads no kernel."""
    gather = Gather(num)
    gather()
    gather(async_op=True).wait()
    gather.check()
    dist.barrier()
    return gather


@pytest.mark.parametrize("asynchronous", [False, True])
def test_calls_come_after_what_their_stream_held_before(asynchronous: bool) -> None:
    """And what their stream gets afterwards comes after them, without any wait of the host."""

    def body() -> None:
        gather = connected()
        fresh = values(NUM, seed=5).to(DEVICE)
        late = torch.empty_like(gather.whole)
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            gather.whole.zero_()
            late.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SHORT)
                gather.source.copy_(fresh)
                work = gather(async_op=asynchronous)
                if work is not None:
                    work.wait()
                late.copy_(gather.whole)
                gather.whole.fill_(-7.0)
            torch.cuda.synchronize()
            gather.seed = 5
            gather.check(late)

    run(body, 2)


def test_the_host_never_waits_for_the_gpu() -> None:
    """Calls and wait() return while a kernel before them still runs."""

    def body() -> None:
        gather, scatter = connected(), ReduceScatter(NUM)
        scatter()
        scatter(async_op=True).wait()
        torch.cuda.synchronize()
        dist.barrier()
        marker = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        marker.record()
        for _ in range(3):
            gather()
            scatter()
        works = [gather(async_op=True), scatter(async_op=True)]
        for work in works:
            work.wait()
        assert not marker.query(), "the host waited for the GPU"
        assert not works[0].is_completed()
        gather.check()
        assert works[0].is_completed() and works[1].is_completed()

    run(body, 2)


def test_calls_on_two_streams_do_not_share_scratch() -> None:
    def body() -> None:
        connected()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        gathers = [Gather(NUM, seed=seed) for seed in range(8)]
        torch.cuda.synchronize()
        for number, gather in enumerate(gathers):
            with torch.cuda.stream(streams[number % 2]):
                if dist.get_rank() == number % 2:
                    torch.cuda._sleep(SHORT // 10)
                work = gather(async_op=number % 3 == 0)
                if work is not None:
                    work.wait()
        for gather in gathers:
            gather.check()

    run(body, 2)


def test_a_future_is_ordered_on_the_stream_of_its_waiter() -> None:
    def body() -> None:
        gather = connected()
        gather.set(3)
        future = gather(async_op=True).get_future()
        with torch.cuda.stream(torch.cuda.Stream()):
            (result,) = future.wait()
            copy = result.clone()
        gather.check(copy)

    run(body, 2)


def test_wait_with_a_timeout_blocks_the_host() -> None:
    def body() -> None:
        import datetime

        gather = connected()
        torch.cuda._sleep(LONG)
        work = gather(async_op=True)
        with pytest.raises(RuntimeError, match="50 ms"):
            work.wait(datetime.timedelta(milliseconds=50))
        work.wait(datetime.timedelta(seconds=30))
        assert work.is_completed()
        gather.check()

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


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("size", "node_size"), [(2, 2), (4, 2)], ids=["1x2", "2x2"])
def test_graphs_replay_with_new_values(asynchronous: bool, size: int, node_size: int) -> None:
    def body() -> None:
        gather, scatter = Gather(NUM), ReduceScatter(NUM)
        stream = torch.cuda.Stream()

        def calls() -> None:
            for call in (gather, scatter):
                work = call(async_op=asynchronous)
                if work is not None:
                    work.wait()

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                calls()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: others, such as watchdogs, ask CUDA things that a capture must not meet.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            calls()
        dist.barrier()
        for seed in (3, 4, 5):
            gather.set(seed)
            scatter.own.fill_(-1.0)
            graph.replay()
            gather.check()
            replayed = scatter.own.clone()
            scatter.own.fill_(-1.0)
            scatter()
            torch.cuda.synchronize()
            assert_same_bits(replayed.cpu(), scatter.own.cpu(), seed)
            scatter.whole.mul_(-1.5)
        del graph
        torch.cuda.synchronize()

    run(body, size, options=options(node_size=node_size))


def test_a_group_is_not_connected_inside_a_capture() -> None:
    def body() -> None:
        gather = Gather(NUM)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match=r"before .*captur"),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            gather()
        gather()  # and can be used afterwards
        gather.check()

    run(body, 2)


def test_options_for_streams() -> None:
    """A stream of high priority; a wait() that blocks the host."""

    def body() -> None:
        gather = connected()
        gather.set(2)
        work = gather(async_op=True)
        work.wait()
        assert work.is_completed()
        assert_same_bits(gather.whole.cpu(), gathered(2, NUM, torch.float32, 2))
        assert zcomm.stats().all_gather.calls == 3

    run(body, 2, options=options(high_priority_stream=True, blocking_wait=True))
