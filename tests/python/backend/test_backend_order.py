"""Order of calls and waits: callbacks, first calls, coalesced calls, and groups that end during calls."""

from __future__ import annotations

import datetime
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, gathered, start_gather
from support.expected import assert_same_bits
from support.worlds import options, run

import zcomm


@pytest.mark.parametrize("in_callback", ["a compressed call", "a call's future", "an exact call", "a barrier"])
def test_a_callback_may_call_its_own_group_and_wait(in_callback: str) -> None:
    """The group's own thread runs the callback, and must not wait for itself. PowerSGD waits for a future."""

    def call(_: torch.futures.Future) -> torch.Tensor:
        if in_callback == "a barrier":
            dist.barrier()
        elif in_callback == "an exact call":
            dist.all_reduce(torch.ones(3))
        whole, work = start_gather(1)
        (work.get_future() if in_callback == "a call's future" else work).wait()
        return whole

    def body() -> None:
        whole, work = start_gather(0)
        third, third_work = start_gather(2)  # before the callback on all ranks: calls are in the same order
        second = work.get_future().then(call)
        assert_same_bits(second.wait(), gathered(1))
        third_work.wait()
        assert_same_bits(whole, gathered(0))
        assert_same_bits(third, gathered(2))

    run(body)


def test_a_callback_may_wait_for_calls_made_before() -> None:
    def body() -> None:
        ready = threading.Event()  # the callback runs on the group's thread, with the other call behind it
        first = start_gather(0)[1].get_future().then(lambda _: ready.wait())
        whole, work = start_gather(1)
        second = first.then(lambda _: work.wait())
        ready.set()
        assert second.wait()
        assert_same_bits(whole, gathered(1))

    run(body)


def test_a_chain_of_callbacks_goes_on() -> None:
    """Each starts a call whose callback is the next: they do not run inside each other until the stack is full."""

    def body() -> None:
        tensor, done, calls = torch.ones(8), threading.Event(), iter(range(2000))

        def start(_: Any = None) -> None:
            if next(calls, None) is None:
                done.set()
            else:
                dist.all_reduce(tensor, async_op=True).get_future().then(start)

        start()
        assert done.wait(60)

    run(body, options=options(all_reduce="int8:128"))


def test_a_first_collective_does_not_wait_for_peers_that_come_later() -> None:
    """Valid on gloo: one rank starts a collective before it sends what the other is waiting for."""

    def body() -> None:
        tensor = torch.ones(4)
        if dist.get_rank() == 0:
            work = dist.all_reduce(tensor, async_op=True)
            dist.send(torch.zeros(2), 1)
            work.wait()
        else:
            dist.recv(torch.zeros(2), 0)
            dist.all_reduce(tensor)
        assert tensor.sum() == 8

    run(body)


def test_a_coalesced_call_is_checked_whole_before_any_byte_moves() -> None:
    """A wrong second tensor raises on its rank alone; the group stays usable and nothing is counted."""

    def body() -> None:
        rank = dist.get_rank()
        good, bad = torch.zeros(2 * NUM), torch.zeros(2 * NUM + 1)
        group = dist.group.WORLD
        with pytest.raises(ValueError, match="output: expected 2 times the"):
            group.allgather_into_tensor_coalesced([good, bad], [good[:NUM].clone(), bad[:NUM].clone()])
        assert zcomm.stats().all_gather.calls == 0
        whole, work = start_gather(3)
        work.wait()
        assert_same_bits(whole, gathered(3), rank)

    run(body, options=options(forms="in_place,coalesced"))


def test_the_future_of_a_coalesced_call_has_its_tensors_in_order() -> None:
    """Though exact ones go out in one call, after the compressed ones."""

    def body(backend: str) -> None:
        for sizes in ([3, 2 * NUM], [2 * NUM, 3], [2 * NUM, 3, 2 * NUM]):
            tensors = [torch.full((size,), float(size)) for size in sizes]
            work = dist.group.WORLD.allreduce_coalesced(tensors)
            if backend == "zcomm":
                assert [one.data_ptr() for one in work.result()] == [one.data_ptr() for one in tensors]
            then = work.get_future().then(lambda future: [one.numel() for one in future.value()])
            assert then.wait() == sizes, backend

    run(lambda: body("gloo"), backend="gloo")
    run(lambda: body("zcomm"), options=zcomm.Options(forms="coalesced", all_reduce="int8:128"))


@pytest.mark.parametrize("size", [NUM, NUM // 64], ids=["compressed", "in part"])
def test_the_future_of_a_work_that_was_waited_for_is_done(size: int) -> None:
    def body() -> None:
        for turn in range(400):
            tensors = [torch.ones(size), torch.ones(NUM)]
            work = (
                dist.group.WORLD.allreduce_coalesced(tensors)
                if turn % 2
                else dist.all_reduce(tensors[1], async_op=True)
            )
            future = work.get_future()
            if turn % 3:
                work.wait()
            while not work.is_completed():
                pass
            assert future.done(), turn

    run(body, options=options(forms="coalesced", all_reduce="int8:128", min_bytes=NUM))


def test_a_batch_that_raised_takes_no_later_call_along() -> None:
    """torch keeps the calls of a block that raised, for ever, of backends that coalesce: not of Gloo, nor of zcomm."""

    def body() -> None:
        other = 1 - dist.get_rank()
        with pytest.raises(RuntimeError, match="contiguous"):
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(8)[::2], other)])
        for dtype in (torch.float64, torch.float32):
            values = torch.ones(NUM, dtype=dtype)
            dist.all_reduce(values)
            assert values.unique().tolist() == [2]

    run(body)


def test_a_block_takes_no_call_of_another_thread_along() -> None:
    def body() -> None:
        def broadcast() -> None:
            for number in range(3000):
                values = torch.full((4,), dist.get_rank() or number, dtype=torch.float64)
                dist.broadcast(values, 0)
                assert values.tolist() == [number] * 4

        other, block_of = 1 - dist.get_rank(), dist.distributed_c10d._coalescing_manager
        sent, box = torch.ones(4), torch.empty(4)
        with ThreadPoolExecutor(1) as aside:
            done = aside.submit(broadcast)
            for _ in range(3000):
                with block_of(device=sent.device, async_ops=True) as block:
                    dist.isend(sent, other)
                    dist.irecv(box, other)
                block.wait()
            done.result()

    run(body)


def test_premul_sum_of_float64_is_exact() -> None:
    """The exact path loses no bit of a factor that float32 cannot hold."""

    def body() -> None:
        values = torch.arange(6, dtype=torch.float64) / 7
        out = torch.empty(3, dtype=torch.float64)
        dist.reduce_scatter_single(out, values, op=dist._make_nccl_premul_sum(1 / 3))
        half = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
        assert_same_bits(out, (values * (1 / 3) + values * (1 / 3))[half])

    run(body)


@pytest.mark.parametrize("waits", ["wait", "synchronize"])
@pytest.mark.parametrize("ask", ["is_success", "exception", "is_completed"])
def test_a_message_that_a_thread_waits_for_can_be_asked_for(waits: str, ask: str) -> None:
    """The answer never waits: the message may depend on what this thread does next."""

    def body() -> None:
        ping, pong = torch.zeros(1), torch.zeros(1)
        if dist.get_rank() == 1:
            dist.recv(ping, 0)
            dist.send(pong, 0)
            return
        work = dist.irecv(pong, 1)
        waiting = threading.Thread(target=getattr(work, waits))
        waiting.start()
        time.sleep(0.2)
        assert not getattr(work, ask)()
        with pytest.raises(RuntimeError, match="within 100 ms"):
            work.wait(datetime.timedelta(milliseconds=100))
        dist.send(ping, 1)
        waiting.join()
        assert work.is_success() and work.exception() is None

    run(body, group_seconds=20)


def test_destroying_a_group_with_an_unanswered_call_ends() -> None:
    """A rank that fails and destroys its group in a `finally` does not wait for the group's timeout."""

    def body() -> None:
        start_gather(0)[1].wait()
        if dist.get_rank() == 0:
            start_gather(1)
        dist.destroy_process_group()

    run(body, group_seconds=3600)


def test_a_combined_future_holds_tensors() -> None:
    """The future of a call that was compressed in part has the tensors of both parts."""

    def body() -> None:
        big, small = torch.zeros(2 * NUM), torch.zeros(2)
        opts = (
            dist.AllgatherOptions()
            if hasattr(dist, "AllgatherOptions")
            else torch._C._distributed_c10d.AllgatherOptions()
        )
        opts.timeout = datetime.timedelta(seconds=30)
        work = dist.group.WORLD.allgather_into_tensor_coalesced([big, small], [torch.ones(NUM), torch.ones(1)], opts)
        values = work.get_future().wait()
        assert sorted(value.numel() for value in values)[-1] == 2 * NUM
        assert all(isinstance(value, torch.Tensor) for value in values)

    run(body, options=options(forms="in_place,coalesced", min_bytes=1024))
