"""Worlds as threads, from Python: large node shapes against float64."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from zcomm import codec
from zcomm.testing import LocalRank, LocalWorld, SecondaryShards


def _digest(array: np.ndarray) -> str:
    return hashlib.sha1(array.tobytes()).hexdigest()


@pytest.mark.parametrize("nodes", ["1x4", "4x1", "2x3", "8x8", [0, 0, 0, 1]])
def test_all_gather_replicas_agree_and_errors_are_bounded(nodes: str | list[int]) -> None:
    world = LocalWorld(nodes, chunk_bytes=4096)
    n = 2500
    shards = [np.random.default_rng(rank).normal(size=n).astype(np.float32) for rank in range(world.size)]
    gathered = world.run(lambda r: r.all_gather(shards[r.rank], np.empty(n * world.size, np.float32), "int8:256"))
    assert len({_digest(out) for out in gathered}) == 1
    for rank, shard in enumerate(shards):
        for begin in range(0, n, 256):
            block = shard[begin : begin + 256].astype(np.float64)
            decoded = gathered[0][rank * n + begin : rank * n + begin + len(block)]
            half_scale = 0.5 * np.abs(block).max() / 127 * (1 + 2**-7) * (1 + 2**-20)
            assert np.abs(decoded - block).max() <= half_scale


@pytest.mark.parametrize("nodes", ["1x4", "4x1", "2x3", "8x8", [0, 0, 0, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lossless_weights_arrive_bit_for_bit(nodes: str | list[int], dtype: torch.dtype) -> None:
    world = LocalWorld(nodes, chunk_bytes=8192)
    n = 5000
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(world.size * n, generator=generator)
    held = [SecondaryShards() for _ in range(world.size)]

    def body(rank: LocalRank) -> torch.Tensor:
        shard = sent[rank.rank * n : (rank.rank + 1) * n]
        return rank.all_gather_lossless(shard, torch.empty_like(sent), held[rank.rank])

    sizes = []
    for step in range(3):
        sent = (weights * (1 + 0.01 * step)).to(dtype)
        sent[step] = torch.nan
        for out in world.run(body):
            assert torch.equal(out.view(torch.int16), sent.view(torch.int16))
        assert {each.generation for each in held} == {step + 1}
        sizes.append(held[0].sent_bytes)
    if nodes == "1x4":
        assert sizes == [0, 0, 0]  # there is no other node
    else:
        assert sizes[0] > 2 * n > max(sizes[1:]) > 0


@pytest.mark.parametrize("nodes", ["1x4", "2x3", "8x8", [0, 0, 0, 1]])
def test_exchanges_encode_each_part_once(nodes: str | list[int]) -> None:
    """All-to-alls with odd and empty parts, a gather, scatter and broadcast of the last rank, a message to the next
    rank."""
    world = LocalWorld(nodes, chunk_bytes=4096)
    size, formats = world.size, ("int8:64", "int4:32")
    ids = nodes if isinstance(nodes, list) else [rank // int(nodes[2]) for rank in range(size)]

    def arrives(values: np.ndarray, source: int, to: int) -> np.ndarray:
        if source == to or not len(values):
            return values
        format = formats[ids[source] != ids[to]]
        return codec.decode(codec.encode(values, format), format, np.empty_like(values))

    def data(rank: int, count: int) -> np.ndarray:
        return np.random.default_rng(rank).normal(size=count).astype(np.float32)

    splits = [[(0, 1, 33, 1500)[(source + 2 * to) % 4] for to in range(size)] for source in range(size)]

    def body(rank: LocalRank) -> None:
        me, root, named = rank.rank, size - 1, {"formats": "/".join(formats)}
        received = [splits[source][me] for source in range(size)]
        out = np.empty(sum(received), np.float32)
        rank.all_to_all(data(me, sum(splits[me])), out, splits=splits[me], out_splits=received, **named)
        sent = [np.split(data(r, sum(splits[r])), np.cumsum(splits[r])[:-1])[me] for r in range(size)]
        assert np.array_equal(out, np.concatenate([arrives(part, r, me) for r, part in enumerate(sent)]))

        whole = np.empty(size * 777, np.float32) if me == root else None
        rank.gather(data(me, 777), whole, root, **named)
        if whole is not None:
            assert np.array_equal(whole, np.concatenate([arrives(data(r, 777), r, root) for r in range(size)]))
        part = np.empty(777, np.float32)
        rank.scatter(data(99, size * 777) if me == root else None, part, root, **named)
        assert np.array_equal(part, arrives(np.split(data(99, size * 777), size)[me], root, me))

        published = data(me, 2222)
        rank.broadcast(published, root, format="int8:64")
        wire = codec.encode(data(root, 2222), "int8:64")
        assert np.array_equal(published, codec.decode(wire, "int8:64", np.empty_like(published)))

        if me == 0:
            rank.send(data(5, 3000), 1, **named)
        if me == 1:
            message = np.empty(3000, np.float32)
            rank.recv(message, 0, **named)
            assert np.array_equal(message, arrives(data(5, 3000), 0, 1))

    world.run(body)


def test_wrong_exchanges_are_refused_before_a_byte_moves() -> None:
    rank, x, y = LocalWorld("1x4").ranks[1], np.ones(8, np.float32), np.empty(8, np.float32)
    for message, call in [
        ("splits: expected 4 numbers .* of the 8 elements of array, got", lambda: rank.all_to_all(x, y, splits=[8])),
        ("out_splits: expected 4 numbers", lambda: rank.all_to_all(x, y, out_splits=[9, 0, 0, -1])),
        ("array: expected a multiple of the 4 ranks", lambda: rank.all_to_all(x[:7], y)),
        ("outputs: expected float32", lambda: rank.all_to_all(x, y.astype(np.float16))),
        ("root: expected 0 to 3, got 4", lambda: rank.gather(x, None, 4)),
        ("out: expected 4 times the 8 elements of array, got 8", lambda: rank.gather(x, y, 1)),
        ("array: expected 4 times the 8 elements of out, got 8", lambda: rank.scatter(x, y, 1)),
        ("root: expected 0 to 3, got -1", lambda: rank.broadcast(x, -1)),
        ("peer: expected 0 to 3, got -1", lambda: rank.send(x, -1)),
        ("to: expected a message between rank 1 and another one", lambda: rank.recv(y, 1)),
        ("outputs: expected memory apart from the inputs", lambda: rank.all_to_all(x, x)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"out: expected a NumPy array .* got NoneType"):
        rank.gather(x, None, 1)


def test_a_part_of_another_length_is_an_error_though_its_wire_has_as_many_bytes() -> None:
    def body(rank: LocalRank) -> None:
        sent, received = ([50, 100], [50, 50]) if rank.rank == 0 else ([50, 50], [103, 50])
        output = np.empty(sum(received), np.float32)
        rank.all_to_all(np.ones(sum(sent), np.float32), output, splits=sent, out_splits=received, formats="int8:128")

    with pytest.raises(RuntimeError, match=r"moves 128 bytes where rank . moves 128, of 10[03] and 10[03] elements"):
        LocalWorld([0, 0], timeout=5).run(body)


def test_what_is_held_belongs_to_one_rank_and_shape() -> None:
    rank, other = LocalWorld("1x2").ranks
    held = SecondaryShards()
    with pytest.raises(ValueError, match="slots: expected bfloat16, float16 or values of 8 bits"):
        rank.all_gather_lossless(np.ones(2, np.float32), np.empty(4, np.float32), held)
    held._of(rank._core, [(0, 2, "bfloat16")] * 2)
    for one, size in ((rank, 3), (other, 2)):
        with pytest.raises(ValueError, match="plan: expected one of"):
            one.all_gather_lossless(torch.ones(size).half(), torch.empty(2 * size).half(), held)


@pytest.mark.parametrize("nodes", ["1x4", "4x1", "2x3", "8x8", [0, 1, 0, 1, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_representable_values_are_exact(nodes: str | list[int], dtype: torch.dtype) -> None:
    world = LocalWorld(nodes)
    n = 257

    def body(rank: LocalRank) -> torch.Tensor:
        # Largest code in every block, so the scale is 1; only rank 0 is not zero, so no sum needs more codes.
        i = torch.arange(n * rank.size) % n
        values = torch.where(i % 4 == 0, 7, i * 5 % 15 - 7) if rank.rank == 0 else torch.zeros(n * rank.size)
        return rank.reduce_scatter(values.to(dtype), torch.empty(n, dtype=dtype), "int4:32", factor=0.5)

    i = torch.arange(n)
    expected = (torch.where(i % 4 == 0, 7, i * 5 % 15 - 7) * 0.5).to(dtype)
    for out in world.run(body):
        assert torch.equal(out, expected)


def test_all_reduce_in_place() -> None:
    world = LocalWorld("2x2")
    tensors = [np.full(1001, rank + 1, np.float32) for rank in range(4)]
    results = world.run(lambda r: r.all_reduce(tensors[r.rank], "int8:128/int4:128", factor=0.25))
    assert len({_digest(result) for result in results}) == 1
    assert np.abs(results[0] - 2.5).max() < 0.2


@pytest.mark.parametrize("kind", [list, torch.tensor, lambda counts: np.array(counts, np.int32)])
def test_splits_are_integers_of_any_library(kind: Callable[[list[int]], Any]) -> None:
    def body(rank: LocalRank) -> list[float]:
        splits = kind([[1, 4], [3, 2]][rank.rank])
        received = kind([[1, 3], [4, 2]][rank.rank])
        out = np.full([4, 6][rank.rank], -1.0, np.float32)
        array = np.arange(5, dtype=np.float32) + 10 * rank.rank
        rank.all_to_all(array, out, splits=splits, out_splits=received)
        with pytest.raises(TypeError, match="splits: expected integers, got"):
            rank.all_to_all(array, out, splits=[2.5, 2.5], out_splits=received)
        return out.tolist()

    assert LocalWorld("1x2").run(body) == [[0, 10, 11, 12], [1, 2, 3, 4, 13, 14]]


def test_the_first_error_is_raised_and_nobody_waits_for_its_rank() -> None:
    def body(rank: LocalRank) -> None:
        if rank.rank == 1:
            raise LookupError("of this rank alone")
        rank.all_reduce(np.ones(8, np.float32))

    with pytest.raises(LookupError, match="of this rank alone"):
        LocalWorld("1x2", timeout=3600).run(body)


def test_streams_are_none_of_the_cpu() -> None:
    with pytest.raises(ValueError, match="stream: expected None, got one for array, which is on the CPU"):
        LocalWorld("1x1").ranks[0].send(np.ones(3, np.float32), 0, stream=7)


def test_memory_that_was_freed_is_refused() -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)  # as trainers free shards
    with pytest.raises(ValueError, match="tensor: expected an array with memory, got one whose memory was freed"):
        LocalWorld("1x1").ranks[0].all_reduce(tensor)


def test_a_failing_rank_fails_the_world() -> None:
    world = LocalWorld("1x2", timeout=20)

    def body(rank: LocalRank) -> object:
        return rank.all_gather(np.ones(4 + rank.rank, np.float32), np.empty(2 * (4 + rank.rank), np.float32))

    with pytest.raises(RuntimeError, match="called different things"):
        world.run(body)


@pytest.mark.parametrize("nodes", ["", "2", "0x2", "2xx", "axb"])
def test_node_shapes_are_checked(nodes: str) -> None:
    with pytest.raises(ValueError, match="nodes"):
        LocalWorld(nodes)


def test_sizes_are_checked() -> None:
    rank = LocalWorld("1x2").ranks[0]
    with pytest.raises(ValueError, match="out: expected 2 times the 1 elements of shard, got 3"):
        rank.all_gather(np.ones(1, np.float32), np.empty(3, np.float32))


def test_a_shard_is_its_own_slot_or_elsewhere() -> None:
    rank, whole = LocalWorld("1x4").ranks[1], np.zeros(12, np.float32)
    for begin in (0, 2, 4, 9):
        part = whole[begin : begin + 3]
        with pytest.raises(ValueError, match="shard: expected memory that overlaps no slot but its own"):
            rank.all_gather(part, whole)
        with pytest.raises(ValueError, match="output: expected memory that overlaps no slot but its own"):
            rank.reduce_scatter(whole, part)
