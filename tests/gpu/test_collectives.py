"""The collectives on a GPU give the bits of those on the CPU, within the bounds that the formats promise."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import calls
from support.expected import roundtrip
from support.gpu_world import (
    DEVICE,
    DTYPES,
    Gather,
    LocalWorld,
    ReduceScatter,
    alone,
    assert_same_bits,
    enter,
    half_step,
    nodes_of,
    on_device,
    on_host,
    reduce_bound,
    run,
    synchronize,
    values,
)
from support.worlds import options
from support.worlds import run as run_on_hosts

import zcomm

FORMATS = "int8:128/int4:64"
GATHER_FORMAT = "int8:256"
CHUNK_BYTES = 1 << 16  # the largest size travels as several pieces
SIZES = (1, 1009, 40_009)  # of a shard
SHAPES = {"1x2": (2, 2), "2x1": (2, 1), "1x4": (4, 4), "2x2": (4, 2), "4x1": (4, 1)}
EIGHT = {"2x4": (8, 4), "4x2": (8, 2)}
each_shape = pytest.mark.parametrize(
    ("size", "node_size"),
    [
        *(pytest.param(*shape, id=name) for name, shape in SHAPES.items()),
        *(pytest.param(*shape, id=name, marks=pytest.mark.slow) for name, shape in EIGHT.items()),
    ],
)


def compressing(node_size: int, **fields: Any) -> Any:
    formats = {"all_gather": GATHER_FORMAT, "reduce_scatter": FORMATS, "all_reduce": FORMATS}
    return options(node_size=node_size, chunk_bytes=CHUNK_BYTES, **{**formats, **fields})


def cpu_world(size: int, node_size: int) -> LocalWorld:
    return LocalWorld(nodes_of(size, node_size), chunk_bytes=CHUNK_BYTES)


def operations(size: int) -> dict[str, tuple[Any, float, float]]:
    """Return the operation, the factor of each rank's tensor, which rounds to its dtype as in NCCL, and the sum's."""
    return {
        "sum": (dist.ReduceOp.SUM, 1.0, 1.0),
        "avg": (dist.ReduceOp.AVG, 1.0, 1.0 / size),
        "premul_sum": (dist._make_nccl_premul_sum(0.25), 0.25, 1.0),
    }


def test_ranks_scale_by_factors_of_their_own() -> None:
    """As NCCL's PREMUL_SUM does; the codec's sums have one factor."""

    def body() -> None:
        scale = dist._make_nccl_premul_sum(1.0 + 2.0 * dist.get_rank())
        whole = on_device(torch.full((2 * 4096,), 1.0 + dist.get_rank()))
        own = on_device(torch.zeros(4096))
        dist.reduce_scatter_tensor(own, whole, op=scale)
        dist.all_reduce(whole, op=scale)
        for got in (own, whole):
            assert torch.allclose(on_host(got), torch.full((len(got),), 7.0), rtol=2**-6)
        stats = zcomm.stats()
        assert not stats.reduce_scatter.exact and not stats.all_reduce.exact

    run(body, 2, options=compressing(1))


def assert_bounded(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor, what: Any) -> None:
    """``want`` and ``bound`` in float64, the rounding to the output's type not counted."""
    bound = bound + want.abs() * torch.finfo(got.dtype).eps + torch.finfo(got.dtype).tiny
    error = (got.cpu().double() - want).abs()
    assert (error <= bound).all(), f"{what}: worst {(error / bound).max():.3f} of the bound"


@each_shape
def test_all_gather(size: int, node_size: int) -> None:
    def body() -> None:
        for seed, (num, dtype) in enumerate((num, dtype) for num in SIZES for dtype in DTYPES):
            shards = [values(num, dtype, seed, rank) for rank in range(size)]
            world = cpu_world(size, node_size)
            want = world.run(
                lambda rank, shards=shards: rank.all_gather(
                    shards[rank.rank], torch.zeros(size * len(shards[0]), dtype=shards[0].dtype), GATHER_FORMAT
                )
            )[0]
            gather = Gather(num, dtype, seed)
            work = gather(async_op=bool(seed % 2))
            if work is not None:
                work.wait()
            synchronize()
            assert_same_bits(gather.whole.cpu(), want, (num, dtype))
            bound = torch.cat([half_step(shard, GATHER_FORMAT) for shard in shards])
            assert_bounded(gather.whole, torch.cat(shards).double(), bound, (num, dtype))
        assert zcomm.stats().all_gather.calls == len(SIZES) * len(DTYPES)

    run(body, size, options=compressing(node_size))


@each_shape
def test_reduce_scatter(size: int, node_size: int) -> None:
    nodes = nodes_of(size, node_size)

    def body() -> None:
        me = dist.get_rank()
        for seed, (num, dtype) in enumerate((num, dtype) for num in SIZES for dtype in DTYPES):
            given = [values(size * num, dtype, seed, rank) for rank in range(size)]
            for name, (op, before, factor) in operations(size).items():
                inputs = [tensor * before for tensor in given]
                terms = [tensor[me * num :][:num].double() for tensor in inputs]
                bound = reduce_bound(terms, me, nodes, FORMATS)
                want = cpu_world(size, node_size).run(
                    lambda rank, inputs=inputs, factor=factor, num=num: rank.reduce_scatter(
                        inputs[rank.rank], torch.zeros(num, dtype=inputs[0].dtype), FORMATS, factor=factor
                    )
                )[me]
                whole, out = on_device(given[me]), torch.full((num,), -1.0, dtype=dtype, device=DEVICE)
                dist.reduce_scatter_tensor(out, whole, op=op)
                synchronize()
                assert_same_bits(out.cpu(), want, (name, num, dtype))
                assert_bounded(out, sum(terms) * factor, bound * factor, (name, num, dtype))

    run(body, size, options=compressing(node_size))


@each_shape
def test_all_reduce(size: int, node_size: int) -> None:
    """Sums as above, gathered in the format of a node."""
    nodes, inside = nodes_of(size, node_size), FORMATS.split("/")[0]

    def body() -> None:
        me = dist.get_rank()
        for seed, (num, dtype) in enumerate((num, dtype) for num in SIZES for dtype in DTYPES):
            given = [values(num, dtype, seed, rank) for rank in range(size)]
            name, (op, before, factor) = list(operations(size).items())[seed % 3]
            inputs = [tensor * before for tensor in given]
            want = cpu_world(size, node_size).run(
                lambda rank, inputs=inputs, factor=factor: rank.all_reduce(
                    inputs[rank.rank].clone(), FORMATS, factor=factor
                )
            )[me]
            tensor = on_device(given[me])
            dist.all_reduce(tensor, op=op)
            synchronize()
            assert_same_bits(tensor.cpu(), want, (name, num, dtype))
            terms = [one.double() for one in inputs]
            # Of any owner; and of what is gathered, whose blocks are no larger than that.
            bound = sum(reduce_bound(terms, owner, nodes, FORMATS) for owner in range(size)) * factor
            total = sum(terms) * factor
            assert_bounded(tensor, total, bound + half_step(total.abs() + bound, inside), (name, num, dtype))

    run(body, size, options=compressing(node_size))


def _world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.stand_in
@each_shape
def test_exchanges(size: int, node_size: int) -> None:
    """All-to-alls, even and uneven, gathers and scatters: each part encoded once, in the format of its link. A
    broadcast leaves the same bits everywhere."""
    nodes = nodes_of(size, node_size)
    inside, between = FORMATS.split("/")
    slowest = between if len(set(nodes)) > 1 else inside

    def arrives(part: torch.Tensor, source: int, to: int) -> torch.Tensor:
        if source == to or not part.numel():
            return part
        return roundtrip(part, inside if nodes[source] == nodes[to] else between)

    def lengths(source: int, num: int) -> list[int]:
        return [(num, 0, 1, num + 7)[(source + to) % 4] for to in range(size)]

    def body() -> None:
        me = dist.get_rank()
        for seed, (num, dtype) in enumerate((num, dtype) for num in SIZES for dtype in DTYPES):
            parts = [list(values(sum(lengths(r, num)), dtype, seed, r).split(lengths(r, num))) for r in range(size)]
            received = [parts[r][me].numel() for r in range(size)]
            out = on_device(torch.full((sum(received),), -1.0, dtype=dtype))
            dist.all_to_all_single(out, on_device(torch.cat(parts[me])), received, lengths(me, num))
            root = seed % size
            mine = values(num, dtype, seed)
            gathered = [on_device(torch.zeros(num, dtype=dtype)) for _ in range(size)] if me == root else None
            dist.gather(on_device(mine), gathered, dst=root)
            scattered = on_device(torch.zeros(num, dtype=dtype))
            dist.scatter(scattered, gathered, src=root)
            published = on_device(values(num, dtype, seed))
            _world_group().broadcast(published, root).wait()  # torch.distributed asks for the GPU's capability first
            assert_same_bits(on_host(published), roundtrip(values(num, dtype, seed, root), slowest), (num, dtype))
            assert_same_bits(on_host(out), torch.cat([arrives(parts[r][me], r, me) for r in range(size)]), (num, dtype))
            assert_same_bits(
                on_host(scattered), arrives(arrives(mine, me, root), root, me), ("there and back", num, dtype)
            )

    run(body, size, options=compressing(node_size, exchanges=FORMATS))


def test_replicas_agree_and_runs_are_deterministic() -> None:
    def body() -> list[bytes]:
        gather = Gather(30_011, torch.bfloat16)
        reduced = on_device(values(30_011, seed=1))
        gather()
        dist.all_reduce(reduced)
        synchronize()
        return [gather.whole.cpu().view(torch.uint8).numpy().tobytes(), reduced.cpu().numpy().tobytes()]

    first, second = (run(body, 4, options=compressing(2)) for _ in range(2))
    assert all(rank == first[0] for rank in first + second)


def test_many_calls_in_flight() -> None:
    """Compressed and exact ones, waited for in any order."""

    def body() -> None:
        gathers = [Gather(5003, seed=seed) for seed in range(6)]
        works = [gather(async_op=True) for gather in gathers]
        ones = torch.ones(8, device=DEVICE)
        reduction = dist.all_reduce(ones, async_op=True)
        for index in (5, 0, 3, 1, 2, 4):
            works[index].wait()
            gathers[index].check()
        reduction.wait()
        synchronize()
        assert ones.sum().item() == 8 * dist.get_world_size()

    run(body, 2)


def test_what_is_not_compressed_is_the_inner_groups() -> None:
    """Integers, small tensors, exact(): the results of the same calls on NCCL (Gloo), to the last bit."""

    def body() -> None:
        group = dist.new_group(backend="nccl" if DEVICE.type == "cuda" else "gloo")
        numbers = torch.arange(8, device=DEVICE) * dist.get_rank()
        dist.broadcast(numbers, src=1)
        assert numbers.tolist() == list(range(8))
        dist.all_reduce(numbers)
        assert numbers.tolist() == [2 * i for i in range(8)]
        for dtype in DTYPES:
            mine, theirs = ReduceScatter(3001, dtype), ReduceScatter(3001, dtype)
            with zcomm.exact():
                mine()
            theirs(group=group)
            synchronize()
            assert_same_bits(mine.own.cpu(), theirs.own.cpu(), dtype)
        stats = zcomm.stats()
        assert stats.reduce_scatter.calls == 0
        assert stats.reduce_scatter.exact["format_exact"].calls == len(DTYPES)
        dist.barrier()
        dist.destroy_process_group(group)

    run(body, 2)


@pytest.mark.cuda_only
@pytest.mark.stand_in
def test_one_group_serves_both_devices() -> None:
    def body() -> None:
        gather = Gather(2000)
        gather()
        gather.check()
        ReduceScatter(2000)()
        on_cpu = torch.zeros(2, 2000)
        on_cpu[dist.get_rank()] = values(2000)
        with zcomm.override(forms="in_place"):
            dist.all_gather_into_tensor(on_cpu.view(-1), on_cpu[dist.get_rank()])
        assert_same_bits(on_cpu.view(-1), on_host(gather.whole))
        exact = torch.ones(3)
        dist.all_reduce(exact)
        assert exact.tolist() == [2, 2, 2]

    run(body, 2)


@pytest.mark.stand_in
def test_lists_and_coalesced_calls() -> None:
    def body() -> None:
        size = dist.get_world_size()
        gather = Gather(3000)
        source = on_device(values(3000))
        outputs = [on_device(torch.zeros(3000)) for _ in range(size)]
        dist.all_gather(outputs, source)
        gather()
        gather.check()
        assert_same_bits(torch.cat([on_host(output) for output in outputs]), on_host(gather.whole))
        again = Gather(3000, seed=2)
        with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
            again()
        manager.wait()
        again.check()
        assert zcomm.stats().all_gather.calls == 3

    run(body, 2, options=options(forms="single,in_place,list,coalesced"))


def test_exact_calls_around_a_compressed_one_in_one_block() -> None:
    """NCCL's group of the exact ones ends before the compressed one."""

    def body() -> None:
        rank = dist.get_rank()
        shared = [on_device(torch.full((1000,), float(rank + number))) for number in range(2)]
        gathers = [Gather(3000, seed=seed) for seed in range(2)]
        for gather in gathers:
            with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
                dist.broadcast(shared[0], 1)
                dist.all_gather(list(gather.whole.chunk(2)), gather.source)
                dist.broadcast(shared[1], 0)
            manager.wait()
            gather.check()
        assert [on_host(each).unique().tolist() for each in shared] == [[1.0], [1.0]]

    run(body, 2, options=options(forms="list"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_seen_by_every_receiver(bad: float) -> None:
    def body() -> None:
        size, rank, num = dist.get_world_size(), dist.get_rank(), 256
        for dtype in DTYPES:
            tensor = torch.ones(size * num, dtype=dtype)
            if rank == 1:
                tensor[40::num] = bad  # block 1 of each shard
            whole = on_device(tensor)
            own = whole[rank * num :][:num]
            scattered = torch.zeros(num, dtype=dtype, device=DEVICE)
            dist.reduce_scatter_tensor(scattered, whole)
            reduced = whole.clone()
            dist.all_reduce(reduced)
            with zcomm.override(forms="in_place"):
                dist.all_gather_into_tensor(whole, own)
            synchronize()
            seen = whole.cpu().isnan().view(size, num // 32, 32)
            assert seen[1, 1].all() and seen.sum() == 32, dtype
            for result in (scattered, reduced):
                blocks = result.cpu().isfinite().view(-1, num // 32, 32)
                assert not blocks[:, 1, 40 % 32].any(), dtype
                assert blocks[:, [0, *range(2, num // 32)]].all(), dtype

    formats = {"all_gather": "int8:32", "reduce_scatter": "int8:32/int4:32", "all_reduce": "int8:32"}
    run(body, 4, options=options(node_size=2, **formats))


def test_groups_of_a_mesh() -> None:
    """Sub-groups have the options of the world, and communicators of their own."""

    def body() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))
        for name in ("shard", "replicate"):
            group = mesh.get_group(name)
            gather = Gather(3001, seed=3, group=group)
            gather()
            gather.check()
            assert zcomm.stats(group).all_gather.calls == 1, name

    run(body, 4)


@pytest.mark.cuda_only
def test_ranks_are_refused_by_a_parent_that_has_started_cuda() -> None:
    """What keeps the tests honest: the ranks of all others were forked before CUDA started."""

    def body() -> int:
        torch.cuda.init()
        child = os.fork()
        if child == 0:
            try:
                enter()
            except AssertionError:
                os._exit(7)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert alone(body) == 7


@pytest.mark.cuda_only
def test_cpu_tensors_beside_nccl() -> None:
    run_on_hosts(lambda: calls.gather(calls.mine()).sum(), backend="cpu:zcomm,cuda:nccl")
