"""Features of torch around collectives: async work, coalescing, objects, groups, meshes, splits."""

from __future__ import annotations

import datetime
import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, expect, gather, gathered, logged, mine, newly_counted, scatter, start_gather
from support.expected import all_gather, all_reduce, assert_same_bits
from support.worlds import options, run
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed.distributed_c10d import AllgatherOptions

import zcomm
from zcomm.distributed.backend import create_backend

CPU = torch.device("cpu")


def test_async_calls_in_flight() -> None:
    """Many compressed and exact calls at once may be waited for in any order; a barrier comes after all of them."""

    def body() -> None:
        flights = [start_gather(seed) for seed in range(8)]
        exact = torch.ones(8)
        reduction = dist.all_reduce(exact, async_op=True)
        for seed in (5, 0, 7, 1, 2, 3, 4, 6):
            whole, work = flights[seed]
            work.wait()
            assert work.is_completed()
            assert_same_bits(whole, gathered(seed), seed)
        reduction.wait()
        assert exact.sum() == 16
        whole, work = start_gather(9)
        dist.barrier()
        assert work.is_completed()
        assert_same_bits(whole, gathered(9))

    run(body)


def test_work_may_be_dropped_at_once() -> None:
    """The result arrives on the other rank even if the caller keeps neither the Work nor the tensors."""

    def body() -> None:
        for seed in range(20):
            start_gather(seed)
        gc.collect()
        whole, work = start_gather(99)
        work.wait()
        assert_same_bits(whole, gathered(99))

    run(body)


def test_futures() -> None:
    """get_future() holds the outputs; then() runs after the result is there, also when added late."""

    def body() -> None:
        whole, work = start_gather(1)
        future = work.get_future()
        first = future.then(lambda done: done.value()[0].sum())
        assert_same_bits(future.wait()[0], gathered(1))
        assert first.wait() == whole.sum()
        assert future.then(lambda done: len(done.value())).wait() == 1
        assert work.result()[0].data_ptr() == whole.data_ptr()
        failing = future.then(lambda done: 1 // 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            failing.wait()

    run(body)


@pytest.mark.parametrize("opted_in", [False, True])
@pytest.mark.parametrize("device", [None, CPU], ids=["no device", "device"])
@pytest.mark.parametrize("async_ops", [False, True], ids=["sync", "async"])
def test_coalescing_manager(opted_in: bool, device: torch.device | None, async_ops: bool) -> None:
    """All calls of a block are done after it (after wait(), if async), compressed or not."""

    @contextmanager
    def coalescing() -> Iterator[None]:
        with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
            yield
        if async_ops:
            manager.wait()

    def body() -> None:
        rank = dist.get_rank()
        format = "int8:256" if opted_in else "exact"
        wholes = [torch.empty(2 * NUM) for _ in range(3)]
        with coalescing():
            for seed, whole in enumerate(wholes):
                dist.all_gather_single(whole, whole[rank * NUM :][:NUM].copy_(data(rank, NUM, seed=seed)))
        for seed, whole in enumerate(wholes):
            assert_same_bits(whole, all_gather([data(r, NUM, seed=seed) for r in range(2)], format), seed)

        sums = [data(rank, NUM, seed=seed) for seed in range(3)]
        with coalescing():
            for tensor in sums:
                dist.all_reduce(tensor)
        for seed, tensor in enumerate(sums):
            want = all_reduce([data(r, NUM, seed=seed) for r in range(2)], format, [0, 0])
            assert_same_bits(tensor, want, seed)

        outputs = [torch.empty(NUM) for _ in range(2)]
        with coalescing():
            for output in outputs:
                dist.reduce_scatter_single(output, torch.full((2 * NUM,), 2.0))
        assert all(((output - 4).abs() < 0.1).all() for output in outputs)

    fields: dict[str, Any] = (
        {"forms": "in_place,coalesced", "all_reduce": "int8:256"} if opted_in else {"all_gather": "exact"}
    )
    run(body, options=zcomm.Options(**fields))


def test_coalescing_ends_with_an_exception() -> None:
    """A block that raises leaves the group usable."""

    def body() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match="output"), dist._coalescing_manager(device=CPU, async_ops=True):
                group = dist.group.WORLD
                group._allgather_base(torch.empty(1), mine(), AllgatherOptions())
            dist.distributed_c10d._world.pg_coalesce_state.clear()  # torch's own record of the block
        assert_same_bits(gather(mine()), gathered(0))

    run(body, options=options(forms="in_place,out_of_place"))


def test_object_collectives() -> None:
    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        own = {"rank": rank, "tensor": mine(5), "long": "x" * 200_000}
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, own)
        assert [one["rank"] for one in everything] == list(range(size))
        assert_same_bits(everything[1]["tensor"], data(1, 5))
        at_one: list[Any] | None = [None] * size if rank == 1 else None
        dist.gather_object(own, at_one, dst=1)
        assert rank != 1 or [one["rank"] for one in at_one or []] == list(range(size))
        shared = [own, rank] if rank == 1 else [None, None]
        dist.broadcast_object_list(shared, src=1)
        assert shared[1] == 1 and len(shared[0]["long"]) == 200_000
        mine_only: list[Any] = [None]
        dist.scatter_object_list(mine_only, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
        assert mine_only == [f"for {rank}"]
        if rank == 0:
            dist.send_object_list(["hello"], 1)
        elif rank == 1:
            received: list[Any] = [None]
            dist.recv_object_list(received, 0)
            assert received == ["hello"]

    run(body, 3, options=options(forms="in_place,out_of_place,list"))


@pytest.mark.promise(5)
def test_subgroups_and_meshes() -> None:
    """Groups of some ranks compress with their own options; a 2-D mesh works along both dimensions."""

    def body() -> None:
        rank = dist.get_rank()
        odd = dist.new_group([1, 3], pg_options=zcomm.Options(all_gather="int4:32", node_size=2))
        own = dist.new_group([rank], use_local_synchronization=True)
        assert newly_counted_in(own, lambda: gather_in(own, 0)) == 0
        if rank % 2:
            shards = [data(r, NUM) for r in range(2)]
            assert_same_bits(gather_in(odd, 0), all_gather(shards, "int4:32"))
            sent = zcomm.stats(odd).all_gather  # virtual nodes are of the world: ranks 1 and 3 are on two
            assert sent.inter_node_bytes > 0 and sent.intra_node_bytes == 0
        else:
            expect(
                ValueError, "group: expected one that this rank is in, got NON_GROUP_MEMBER", lambda: zcomm.stats(odd)
            )
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name in ("replicate", "shard"):
            group = mesh.get_group(name)
            assert_same_bits(gather_in(group, 3), gathered(3))
            assert zcomm.stats(group).all_gather.calls == 1
        assert zcomm.stats().all_gather.calls == 0

    run(body, 4)


def gather_in(group: Any, seed: int) -> torch.Tensor:
    whole, work = start_gather(seed, group=group)
    work.wait()
    return whole


def newly_counted_in(group: Any, call: Callable[[], Any]) -> int:
    call()
    return zcomm.stats(group).all_gather.calls


def test_two_groups_from_two_threads() -> None:
    """Calls of different groups need not be in the same order on all ranks."""

    def body() -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        failures: list[BaseException] = []

        def work(index: int) -> None:
            try:
                for seed in range(10):
                    assert_same_bits(gather_in(groups[index], seed), gathered(seed))
            except BaseException as error:
                failures.append(error)

        order = (0, 1) if dist.get_rank() == 0 else (1, 0)
        threads = [threading.Thread(target=work, args=(index,)) for index in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    run(body)


@pytest.mark.parametrize("backend", ["zcomm", "cpu:zcomm", "cpu:zcomm,cuda:gloo"])
def test_backend_names(backend: str) -> None:
    """A name per device is accepted, and statistics are found under it."""

    def body() -> None:
        assert newly_counted(lambda: gather(mine())) == {"all_gather: compressed": 1}

    run(body, backend=backend)


def test_lazy_connections_of_gloo() -> None:
    """Contexts that connect lazily must not share a device: Gloo tells their connections apart by rank alone."""

    def body() -> None:
        dist.barrier()
        assert_same_bits(gather(mine()), gathered(0, size=3))
        dist.barrier()

    run(body, 3, env={"TORCH_GLOO_LAZY_INIT": "1"})


def test_debug_level_detail() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the group: calls, statistics and its own shape check work."""

    def body() -> None:
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        assert_same_bits(gather(mine()), gathered(0))
        assert zcomm.stats().all_gather.calls == 1
        with pytest.raises(RuntimeError, match=r"mismatch|Detected"):
            scatter(torch.ones(2 * NUM * (1 + dist.get_rank())))

    run(body, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def test_a_group_can_end_while_its_threads_let_go_of_a_tensor() -> None:
    """The end of a group waits for its threads. To free a tensor of Python's they need the lock of the interpreter,
    which the thread that ends the group must not hold then."""

    def body() -> None:
        wanted = _DistributedBackendOptions()
        wanted.store = dist.PrefixStore("dropped", dist.distributed_c10d._get_default_store())
        wanted.group_rank, wanted.group_size = dist.get_rank(), dist.get_world_size()
        wanted.timeout, wanted.group_id = datetime.timedelta(seconds=60), "dropped"
        group = create_backend(wanted, zcomm.Options())
        group.allreduce([torch.ones(9)]).wait()  # connects the ranks
        if dist.get_rank() == 1:
            time.sleep(1)  # rank 0 is at its end by then
        work = group.allreduce([torch.ones(9)])
        if dist.get_rank() == 1:
            work.wait()
        group.shutdown()
        alone = object()
        assert sys.getrefcount(group) == sys.getrefcount(alone)  # before Python 3.14 the argument counts, too
        del work, group

    run(body, 2)


def test_groups_can_be_destroyed_and_made_again() -> None:
    """Groups in one process may follow each other, with other options; threads and files are given back."""

    def body() -> None:
        store = dist.FileStore(os.environ["AGAIN"], 2)
        rank, tasks = dist.get_rank(), 0
        dist.destroy_process_group()
        for number in range(5):
            format = ("int8:64", "int4:64")[number % 2]
            dist.init_process_group(
                "zcomm",
                store=dist.PrefixStore(str(number), store),
                rank=rank,
                world_size=2,
                pg_options=options(all_gather=format),
            )
            assert_same_bits(gather(data(rank, NUM)), all_gather([data(r, NUM) for r in range(2)], format))
            dist.destroy_process_group()
            gc.collect()
            now = len(os.listdir("/proc/self/task"))
            tasks = tasks or now
            deadline = time.monotonic() + 10
            while now > tasks and time.monotonic() < deadline:  # the kernel lists a joined thread a little longer
                time.sleep(0.01)
                now = len(os.listdir("/proc/self/task"))
            assert now <= tasks, "a destroyed group leaves threads behind"

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run(body, env={"AGAIN": f"{folder}/store"})


def test_log_line_at_the_end() -> None:
    """ZCOMM_LOG=info: one line for each group on each rank when it is destroyed."""

    def body() -> list[str]:
        lines = logged()
        logging.getLogger("zcomm").setLevel(logging.INFO)
        part = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=part)
        gather(mine())
        dist.destroy_process_group()
        return lines

    for rank, lines in enumerate(run(body, env={"ZCOMM_LOG": "info"})):
        assert len(lines) == 2
        assert any("all_gather 1 calls" in line and f"rank {rank}" in line for line in lines)
        assert any("all_reduce exact: 1 format_exact" in line for line in lines)


def test_timeouts_and_monitored_barrier() -> None:
    """set_timeout reaches all calls; a monitored barrier is gloo's."""

    def body() -> None:
        group = dist.group.WORLD
        group.set_timeout(datetime.timedelta(seconds=9))
        backend = group._get_backend(CPU)
        assert backend.options._timeout == datetime.timedelta(seconds=9)
        group.monitored_barrier(datetime.timedelta(seconds=9))
        gather(mine())

    run(body)


def test_trainers_set_timeouts() -> None:
    """torchtitan and Megatron do so after their first step. Before torch 2.14 torch left zcomm's groups out."""

    def body() -> None:
        part = dist.new_group([0, 1])
        for group, seconds in ((None, 7), (part, 8)):
            timeout = datetime.timedelta(seconds=seconds)
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                if hasattr(dist, "set_timeout"):
                    dist.set_timeout(timeout, group)
                else:
                    dist.distributed_c10d._set_pg_timeout(timeout, group)
            assert (group or dist.group.WORLD)._get_backend(CPU).options._timeout == timeout

    run(body)


def test_a_barrier_of_a_numbered_device_needs_no_gpu() -> None:
    """torch's own test bases and torchtitan call it so, also in jobs on CPUs. After the first fake tensor, torch with
    CUDA pretends that there is a GPU."""

    def body() -> None:
        assert newly_counted(lambda: dist.barrier(device_ids=[0])) == {"others": 1}
        torch._C._ensureCUDADeviceGuardSet()
        assert newly_counted(lambda: dist.barrier(device_ids=[0])) == {"others": 1}

    run(body)
