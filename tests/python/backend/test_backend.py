"""The promises about values (docs/promises.md), one test each or more, on real processes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import data, gather, scatter
from support.expected import HALF_STEP, all_gather, all_reduce, assert_same_bits, digest, reduce_scatter
from support.worlds import options, run

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 31, 128, 257, 1009, 8191)  # of a shard; with 4 KiB chunks: none, one, several, cut ones
# The node of each rank.
WORLDS = {
    "two ranks": [0, 0],
    "two nodes": [0, 1],
    "three ranks": [0, 0, 0],
    "uneven nodes": [0, 0, 1],
    "two by two": [0, 0, 1, 1],
    "two by two, interleaved": [0, 1, 0, 1],
    "two by two, mirrored": [1, 0, 0, 1],
    "four nodes": [0, 1, 2, 3],
}
each_world = pytest.mark.parametrize("nodes", WORLDS.values(), ids=WORLDS.keys())


def cases(formats: str) -> Iterator[tuple[int, int, torch.dtype]]:
    """Seed, elements, dtype. For 16-bit values bf16 saves nothing and is the exact path."""
    dtypes = FLOATS[:1] if formats == "bf16" else FLOATS
    return ((seed, num, dtype) for seed, num in enumerate(SIZES) for dtype in dtypes)


@pytest.mark.promise(2, 5)
@each_world
@pytest.mark.parametrize("format", ["int8:256", "int4:128", "bf16"])
def test_all_gather_gives_the_bits_of_the_reference(nodes: list[int], format: str) -> None:
    """Replicas agree, on any shape, dtype, node layout and rank order; chunks change nothing."""

    given = {
        (seed, num, dtype): [data(rank, num, dtype, seed) for rank in range(len(nodes))]
        for seed, num, dtype in cases(format)
    }
    wanted = {case: all_gather(shards, format) for case, shards in given.items()}  # once: no rank computes it again

    def body() -> None:
        for case, want in wanted.items():
            assert_same_bits(gather(given[case][dist.get_rank()]), want, (format, case))

    run(body, len(nodes), nodes=nodes, options=options(all_gather=format, chunk_bytes=4096))


@pytest.mark.promise(2, 5)
@each_world
@pytest.mark.parametrize("formats", ["int8:128/int4:128", "int4:32/int8:96", "exact/int8:64", "int8:64/exact", "bf16"])
def test_reduce_scatter_gives_the_bits_of_the_reference(nodes: list[int], formats: str) -> None:
    """Sums in float32 in a fixed order, one quantization per hop, the own contribution in full precision."""

    def body() -> None:
        size, rank = len(nodes), dist.get_rank()
        for seed, num, dtype in cases(formats):
            op, factor = ((dist.ReduceOp.SUM, 1.0), (dist.ReduceOp.AVG, 1.0 / size))[seed % 2]
            inputs = [data(sender, size * num, dtype, seed) for sender in range(size)]
            own = [tensor[rank * num :][:num] for tensor in inputs]
            want = reduce_scatter(own, rank, formats, nodes, factor)
            assert_same_bits(scatter(inputs[rank], op), want, (formats, num, dtype, op))

    run(body, len(nodes), nodes=nodes, options=options(reduce_scatter=formats, chunk_bytes=4096))


@pytest.mark.promise(1, 2, 5)
@each_world
@pytest.mark.parametrize("formats", ["int8:128/int4:128", "exact/int8:32", "bf16"])
def test_all_reduce_gives_the_bits_of_the_reference(nodes: list[int], formats: str) -> None:
    """Every rank holds the same bits, for any number of elements."""

    size = len(nodes)
    given = {
        (seed, num, dtype): [data(rank, num, dtype, seed) for rank in range(size)]
        for seed, num, dtype in cases(formats)
    }
    wanted = {case: all_reduce(inputs, formats, nodes, 1.0 / size) for case, inputs in given.items()}

    def body() -> None:
        for case, want in wanted.items():
            tensor = given[case][dist.get_rank()].clone()
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            assert_same_bits(tensor, want, (formats, case))

    run(body, size, nodes=nodes, options=options(all_reduce=formats, chunk_bytes=4096))


@pytest.mark.promise(1, 2)
def test_replicas_agree_and_runs_are_deterministic() -> None:
    """The same inputs give the same bits on every rank, in every run, with any threads, on every instruction set."""

    def body() -> list[str]:
        torch.set_num_threads(int(os.environ["THREADS"]))
        gathered = gather(data(dist.get_rank(), 300_007, torch.bfloat16))
        reduced = data(dist.get_rank(), 300_007, seed=1)
        dist.all_reduce(reduced)
        scattered = scatter(data(dist.get_rank(), 4 * 100_003, seed=2))
        everybody = [torch.empty_like(scattered) for _ in range(4)]
        dist.all_gather(everybody, scattered)
        return [digest(gathered), digest(reduced), digest(torch.cat(everybody))]

    fields = options(all_reduce="int8:128/int4:128", node_size=2)
    runs = [run(body, 4, nodes=[0, 0, 1, 1], options=fields, env={"THREADS": threads}) for threads in ("1", "1", "3")]
    runs += [
        run(body, 4, nodes=[0, 0, 1, 1], options=fields, env={"THREADS": "1", "ZCOMM_ISA": isa})
        for isa in available_isas()
    ]
    assert {tuple(rank) for ranks in runs for rank in ranks} == {tuple(runs[0][0])}


def available_isas() -> list[str]:
    """Return the instruction sets that this machine can run, as ZCOMM_ISA names them."""
    if platform.machine() == "aarch64":
        return ["baseline", "neon"]
    best = torch.backends.cpu.get_cpu_capability()
    return {"AVX512": ["baseline", "avx2", "avx512"], "AVX2": ["baseline", "avx2"]}.get(best, ["baseline"])


def block_max(values: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude of each element's block (n,) -> (n,)."""
    padded = torch.nn.functional.pad(values.abs().double(), (0, -values.numel() % block))
    return padded.view(-1, block).amax(1).repeat_interleave(block)[: values.numel()]


@pytest.mark.promise(3)
@pytest.mark.parametrize(("format", "qmax", "block"), [("int8:256", 127, 256), ("int4:64", 7, 64)])
def test_all_gather_is_bounded_per_element(format: str, qmax: int, block: int) -> None:
    """No element is further off than half a step of its own block."""

    def body() -> None:
        for dtype in FLOATS:
            shards = [data(rank, 10_007, dtype) for rank in range(2)]
            want = torch.cat(shards).double()
            error = (gather(shards[dist.get_rank()]).double() - want).abs()
            bound = torch.cat([block_max(shard, block) for shard in shards]) / qmax * HALF_STEP
            bound += want.abs() * torch.finfo(dtype).eps
            assert (error <= bound).all(), f"{dtype}: worst {(error / bound).max():.3f} of the bound"
            assert (error / bound).max() > 0.5, "not compressed at all?"

    run(body, options=options(all_gather=format))


@pytest.mark.promise(3)
@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1], [0, 0, 1, 1]], ids=str)
def test_reduce_scatter_is_bounded_per_element(nodes: list[int]) -> None:
    """One quantization per hop: half a step of each sender's block, and of each other node's sum."""

    def body() -> None:
        size, rank, num = len(nodes), dist.get_rank(), 10_007
        inputs = [data(sender, size * num) for sender in range(size)]
        got = scatter(inputs[rank])
        own = [tensor[rank * num :][:num].double() for tensor in inputs]
        two_hops = nodes == [0, 0, 1, 1]
        bound = torch.zeros(num, dtype=torch.float64)
        for node in set(nodes):
            senders = [sender for sender in range(size) if nodes[sender] == node]
            if not two_hops:
                qmax = 127 if node == nodes[rank] else 7
                bound += sum(block_max(own[s], 128) / qmax * HALF_STEP for s in senders if s != rank)
                continue
            summing = senders[rank % 2]  # has the local rank of the owner
            first = sum(block_max(own[s], 128) / 127 * HALF_STEP for s in senders if s != summing)
            bound += first
            if node != nodes[rank]:
                bound += (block_max(sum(own[s] for s in senders), 128) + first) / 7 * HALF_STEP
        bound += sum(tensor.abs() for tensor in own) * size * torch.finfo(torch.float32).eps
        error = (got.double() - sum(own)).abs()
        assert (error <= bound).all(), f"worst {(error / bound).max():.3f} of the bound"
        assert (error / bound).max() > 0.2, "not compressed at all?"

    run(body, len(nodes), nodes=nodes, options=options(reduce_scatter="int8:128/int4:128"))


EXACTLY = {"int8:32": 127, "int4:32": 7}


@pytest.mark.promise(4)
@pytest.mark.parametrize("format", EXACTLY)
@pytest.mark.parametrize("nodes", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [0, 1]], ids=str)
@pytest.mark.parametrize("exact", [False, True], ids=["compressed", "exact"])
def test_sum_avg_and_premul_sum_mean_the_same_everywhere(nodes: list[int], format: str, exact: bool) -> None:
    """All paths give the exact sum, mean and scaled sum of values that the format holds exactly, padded or not."""

    def body() -> None:
        size, rank, num = len(nodes), dist.get_rank(), 77
        generator = torch.Generator().manual_seed(7)
        codes = torch.randint(-EXACTLY[format], EXACTLY[format] + 1, (size * num,), generator=generator).float()
        codes[torch.arange(0, size * num, 1) % num % 32 == 0] = EXACTLY[format]  # each block's scale: a power of two
        mine = codes[rank * num :][:num]
        ops: dict[str, tuple[Callable[[], Any], float]] = {
            "SUM": (lambda: dist.ReduceOp.SUM, size),
            "AVG": (lambda: dist.ReduceOp.AVG, 1),
            "PREMUL_SUM": (lambda: dist._make_nccl_premul_sum(0.125), size / 8),
            "PREMUL_SUM of a tensor": (lambda: dist._make_nccl_premul_sum(torch.tensor([0.25])), size / 4),
            "PREMUL_SUM by rank": (lambda: dist._make_nccl_premul_sum([2.0, -1.0, 0.5, 0.5][rank]), size / 2),
        }
        for name, (op, factor) in ops.items():
            for dtype in FLOATS if name != "PREMUL_SUM by rank" else FLOATS[:1]:  # sums on the way are long
                given = codes.to(dtype)
                assert_same_bits(scatter(given.clone(), op()), (mine * factor).to(dtype), (name, dtype))
                output = torch.empty(num, dtype=dtype)
                dist.reduce_scatter(output, list(given.clone().chunk(size)), op=op())
                assert_same_bits(output, (mine * factor).to(dtype), ("list", name, dtype))
                whole = given[: size * num - 3].clone()  # all-reduce pads
                dist.all_reduce(whole, op=op())
                assert_same_bits(whole, (codes[: size * num - 3] * factor).to(dtype), ("all_reduce", name, dtype))

    chosen = "exact" if exact else format
    run(body, len(nodes), nodes=nodes, options=options(reduce_scatter=chosen, all_reduce=chosen, forms="in_place,list"))


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and ((got - want).abs() <= 0.1 * want).all(), (got, want)


@pytest.mark.promise(5)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("min_bytes", [0, 1])
def test_no_and_one_element(size: int, min_bytes: int) -> None:
    """Empty tensors pass; an odd world of one-element shards works."""

    def body() -> None:
        for num in (0, 1):
            shards = [torch.full((num,), 1.0 + rank) for rank in range(size)]
            total = torch.full((num,), size * 3.0)
            assert_close(gather(shards[dist.get_rank()]), torch.cat(shards))
            assert_close(scatter(torch.full((size * num,), 3.0)), total)
            reduced = torch.full((num,), 3.0)
            dist.all_reduce(reduced)
            assert_close(reduced, total)
            outputs = [torch.empty(num) for _ in range(size)]
            dist.all_gather(outputs, shards[dist.get_rank()])
            assert_close(torch.cat(outputs), torch.cat(shards))

    run(body, size, options=options(all_reduce="int8:32", forms="in_place,list", min_bytes=min_bytes))


@pytest.mark.promise(6)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1, 1]], ids=str)
def test_non_finite_values_are_seen_by_every_receiver(nodes: list[int], bad: float) -> None:
    """A NaN or infinity makes its block NaN wherever it goes, and no other block."""

    def body() -> None:
        size, rank, num = len(nodes), dist.get_rank(), 256
        for dtype in FLOATS:
            for guilty in range(size):
                tensor = torch.ones(size * num, dtype=dtype)
                if rank == guilty:
                    tensor[40::num] = bad  # block 1 of each shard
                whole = gather(tensor[:num])
                seen = whole.isnan().view(size, num // 32, 32)
                assert seen[guilty, 1].all() and seen.sum() == 32, "all_gather"
                for name, result in (("reduce_scatter", scatter(tensor)), ("all_reduce", tensor.clone())):
                    if name == "all_reduce":
                        dist.all_reduce(result)
                    blocks = result.isfinite().view(-1, num // 32, 32)
                    assert not blocks[:, 1, 40 % 32].any(), name
                    assert blocks[:, [0, *range(2, num // 32)]].all(), name
                    if name == "all_reduce":
                        assert not blocks[:, 1].any(), name

    run(
        body,
        len(nodes),
        nodes=nodes,
        options=options(all_gather="int8:32", reduce_scatter="int8:32/int4:32", all_reduce="int8:32"),
    )


def test_memory_that_the_call_writes_may_be_read() -> None:
    """An input that lies in another slot of the output, and an output in another slot of the input, as over Gloo."""

    def body() -> None:
        size, num = dist.get_world_size(), 20_000
        shards = [data(rank, num) for rank in range(size)]
        own, inputs = shards[dist.get_rank()], data(dist.get_rank(), size * num)
        gathered, reduced = gather(own), scatter(inputs)
        for start in (0, num, num // 2):
            whole = torch.zeros(size * num)
            whole[start:][:num] = own
            dist.all_gather_into_tensor(whole, whole[start:][:num])
            assert_same_bits(whole, gathered, f"from {start}")
            both = inputs.clone()
            dist.reduce_scatter_tensor(both[start:][:num], both)
            assert_same_bits(both[start:][:num], reduced, f"into {start}")
        boxes = [torch.zeros(num) for _ in range(size)]
        boxes[0].copy_(own)
        dist.all_gather(boxes, boxes[0])
        assert_same_bits(torch.cat(boxes), gathered, "list")

    run(body, options=options(forms=("single", "list", "out_of_place", "in_place")))
