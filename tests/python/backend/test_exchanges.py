"""All-to-alls, gathers, scatters and broadcasts: bits, opting in, splits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.calls import NUM, data
from support.expected import assert_same_bits, roundtrip
from support.worlds import collect, run, sampling

import zcomm
from zcomm.distributed.overrides import known

NODES = [0, 0, 1]
INTRA, INTER = "int8:128", "int4:64"
FORMATS = f"{INTRA}/{INTER}"
OPTIONS = zcomm.Options(exchanges=FORMATS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEAST = 65536 // 3  # bytes between two ranks that are compressed


def arrives(
    values: torch.Tensor, source: int, to: int, nodes: Sequence[int] = NODES, least: int = LEAST
) -> torch.Tensor:
    """What rank ``to`` has of ``values`` that rank ``source`` sends to it."""
    if source == to or values.nbytes < least:
        return values
    return roundtrip(values.reshape(-1), INTRA if nodes[source] == nodes[to] else INTER).reshape(values.shape)


def rows(rank: int, splits: Sequence[int], width: int, dtype: torch.dtype) -> torch.Tensor:
    return data(rank, sum(splits) * width, dtype).reshape(sum(splits), width)


# Rows that each rank sends to each: zeros, one rank all, odd numbers.
SPLITS = [
    [[1001, 1001, 1001]] * 3,
    [[0, 700, 3], [901, 0, 0], [1, 1500, 777]],
    [[0, 2000, 0]] * 3,
    [[0, 0, 0], [0, 0, 999], [0, 0, 0]],
]


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=str)
@pytest.mark.parametrize(("format", "expected"), [("int8:128", 97), ("int4:64", 128)])
def test_a_part_of_another_length_is_an_error_though_its_wire_has_as_many_bytes(
    format: str, expected: int, nodes: list[int]
) -> None:
    def body() -> None:
        rank = dist.get_rank()
        sent, received = ([50, 100], [50, 50]) if rank == 0 else ([50, 50], [expected, 50])
        dist.all_to_all_single(torch.empty(sum(received)), torch.ones(sum(sent)), received, sent)

    assert zcomm.codec.wire_bytes(format, "float32", 100) == zcomm.codec.wire_bytes(format, "float32", expected)
    outcomes = collect(body, 2, nodes=nodes, options=zcomm.Options(exchanges=format, min_bytes=1), group_seconds=3.0)
    assert (outcomes[1].error or "").startswith("DistBackendError"), outcomes  # rank 0 may have sent its part


@pytest.mark.parametrize("nodes", [[0, 0], [0, 1]], ids=str)
@pytest.mark.parametrize("differs", ["the receiver", "the sender"])
def test_a_part_that_one_rank_has_alone_is_never_taken_for_that_of_another_call(differs: str, nodes: list[int]) -> None:
    """The words of an all-to-all lack the lengths, and nothing is sent for a length of 0."""

    def body() -> None:
        rank = dist.get_rank()
        for call in range(3):
            sends, expects = (0 if call == 0 and differs == side else NUM for side in ("the sender", "the receiver"))
            sent, received = ([0, sends], [0, 0]) if rank == 0 else ([0, 0], [expects, 0])
            output = torch.zeros(sum(received))
            dist.all_to_all_single(output, torch.full((sum(sent),), call + 1.0), received, sent)
            assert set(output.tolist()) <= {call + 1.0}, f"call {call} got {output[0]}"

    outcomes = collect(body, 2, nodes=nodes, options=OPTIONS, group_seconds=3.0)
    assert (outcomes[1].error or "").startswith("DistBackendError"), outcomes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_of_one_tensor(dtype: torch.dtype) -> None:
    def body() -> None:
        rank, width = dist.get_rank(), 33
        for number, splits in enumerate(SPLITS):
            source = rows(rank, splits[rank], width, dtype)
            received = [splits[other][rank] for other in range(3)]
            output = torch.full((sum(received), width), -1.0, dtype=dtype)
            even = number == 0
            work = dist.all_to_all_single(
                output, source, None if even else received, None if even else splits[rank], async_op=number % 2 == 1
            )
            if work is not None:
                work.wait()
            parts = [rows(other, splits[other], width, dtype).split(splits[other])[rank] for other in range(3)]
            expected = torch.cat([arrives(part, other, rank) for other, part in enumerate(parts)])
            assert_same_bits(output, expected, f"splits {number}")
        assert zcomm.stats().all_to_all.calls == len(SPLITS)
        assert zcomm.stats().others.calls == 0

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_lengths_of_two_are_no_complex_number() -> None:
    """Tensors of inference mode have no mark of torch's views of complex ones."""

    def body() -> None:
        with torch.inference_mode():
            splits = [[10, 2, NUM], [0, 0, NUM], [1, 0, NUM]]  # rank 1 receives 2 elements
            rank = dist.get_rank()
            source = data(rank, sum(splits[rank]))
            received = [splits[other][rank] for other in range(3)]
            output = torch.zeros(sum(received))
            dist.all_to_all_single(output, source, received, splits[rank])
            parts = [data(other, sum(splits[other])).split(splits[other])[rank] for other in range(3)]
            assert_same_bits(output, torch.cat([arrives(part, other, rank) for other, part in enumerate(parts)]))

    run(body, size=3, options=OPTIONS, nodes=NODES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(dtype: torch.dtype) -> None:
    """All ranks have the same bits, the source included: in the format between nodes, if the group has several. A
    group's source is named by its rank in the world."""

    def body() -> None:
        rank = dist.get_rank()
        for source in range(3):
            tensor = data(rank, NUM, dtype, seed=source).reshape(-1, 4)
            work = dist.broadcast(tensor, source, async_op=source == 1)
            if work is not None:
                work.wait()
            expected = roundtrip(data(source, NUM, dtype, seed=source), INTER).reshape(-1, 4)
            assert_same_bits(tensor, expected, f"from {source}")
        for ranks, format in (([1, 2], INTER), ([0, 1], INTRA)):
            group = dist.new_group(ranks)
            if rank in ranks:
                tensor = data(rank, NUM, dtype)
                dist.broadcast(tensor, 1, group=group)
                assert_same_bits(tensor, roundtrip(data(1, NUM, dtype), format), f"in the group of {ranks}")
        stats = zcomm.stats()
        assert (stats.broadcast.calls, stats.broadcast.bytes) == (3, 3 * NUM * dtype.itemsize)
        small, numbers = data(rank, 100, dtype).reshape(10, 10), torch.full((NUM,), rank)
        dist.broadcast(small.t(), 1)  # exact on all ranks, so that its layout does not matter
        dist.broadcast(numbers, 1)
        with zcomm.exact():
            dist.broadcast(tensor, 1)
        assert_same_bits(small, data(1, 100, dtype).reshape(10, 10), "small")
        assert (numbers == 1).all()
        exact = zcomm.stats().broadcast.exact
        assert {reason: calls.calls for reason, calls in exact.items()} == dict.fromkeys(
            ("layout", "not_a_float", "format_exact"), 1
        )

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_columns_that_one_rank_has_in_pairs_are_no_complex_tensors() -> None:
    """A matrix in columns 3 + 2 becomes one in rows: tensors of two columns look like complex ones."""

    def body() -> None:
        rank, columns = dist.get_rank(), [3, 2]
        whole = data(0, 5 * NUM).reshape(NUM, 5)
        mine = list(whole.split(columns, 1)[rank].contiguous().chunk(2))
        parts = [torch.empty(NUM // 2, width) for width in columns]
        dist.all_to_all(parts, mine)
        want = whole.chunk(2)[rank]
        assert zcomm.stats().all_to_all.calls == 1
        assert float((torch.cat(parts, 1) - want).abs().max()) < 2**-6 * float(want.abs().max())

    run(body, 2, nodes=[0, 1], options=zcomm.Options(exchanges="int8:128"))


def test_all_to_all_of_lists_of_any_shapes() -> None:
    def shape(source: int, to: int) -> tuple[int, ...]:
        return [(100, 7 * (to + 1) * 40), (0, 3), (30000,)][(source + to) % 3]

    def sent(source: int, to: int) -> torch.Tensor:
        size = shape(source, to)
        return data(10 * source + to, torch.Size(size).numel(), torch.bfloat16).reshape(size)

    def body() -> None:
        rank = dist.get_rank()
        outputs = [torch.empty(shape(other, rank), dtype=torch.bfloat16) for other in range(3)]
        dist.all_to_all(outputs, [sent(rank, other) for other in range(3)])
        for other, output in enumerate(outputs):
            assert_same_bits(output, arrives(sent(other, rank), other, rank), f"from {other}")
        assert zcomm.stats().all_to_all.calls == 1

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_gather_and_scatter() -> None:
    def body() -> None:
        rank = dist.get_rank()
        for root in (0, 2):
            gathered = [torch.empty(NUM) for _ in range(3)] if rank == root else None
            dist.gather(data(rank, NUM), gathered, dst=root)
            for other, part in enumerate(gathered or []):
                assert_same_bits(part, arrives(data(other, NUM), other, root), f"gathered from {other}")
            parts = [data(other, NUM, seed=1) for other in range(3)]
            output = torch.empty(NUM)
            dist.scatter(output, parts if rank == root else None, src=root)
            assert_same_bits(output, arrives(parts[rank], root, rank), f"scattered from {root}")
        stats = zcomm.stats()
        assert (stats.gather.calls, stats.scatter.calls) == (2, 2)
        assert stats.gather.bytes == 2 * 3 * NUM * 4
        small = torch.ones(10)
        dist.gather(small, [torch.empty(10) for _ in range(3)] if rank == 0 else None)
        assert zcomm.stats().gather.exact["min_bytes"].calls == 1

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_functional_all_to_all_compresses_forward_and_backward() -> None:
    def body() -> None:
        rank = dist.get_rank()
        source = data(rank, 2 * NUM).requires_grad_()
        output = funcol.all_to_all_single_autograd(source, [NUM, NUM], [NUM, NUM], dist.group.WORLD)
        gradient = data(rank, 2 * NUM, seed=1)
        output.backward(gradient)
        parts = [data(other, 2 * NUM).chunk(2)[rank] for other in range(2)]
        assert_same_bits(
            output.detach(), torch.cat([arrives(p, o, rank, [0, 1]) for o, p in enumerate(parts)]), "forward"
        )
        parts = [data(other, 2 * NUM, seed=1).chunk(2)[rank] for other in range(2)]
        assert source.grad is not None
        assert_same_bits(source.grad, torch.cat([arrives(p, o, rank, [0, 1]) for o, p in enumerate(parts)]), "backward")
        assert zcomm.stats().all_to_all.calls == 2

    run(body, options=OPTIONS, nodes=[0, 1])


def test_nothing_is_compressed_without_being_asked() -> None:
    def body() -> None:
        rank = dist.get_rank()
        source, output = data(rank, 2 * NUM), torch.empty(2 * NUM)
        expected = torch.cat([data(other, 2 * NUM).chunk(2)[rank] for other in range(2)])
        dist.all_to_all_single(output, source)
        assert_same_bits(output, expected, "by default")
        with zcomm.override(exchanges=INTRA):
            dist.all_to_all_single(output, source)
            assert not torch.equal(output, expected)
            with zcomm.exact():
                dist.all_to_all_single(output, source)
                assert_same_bits(output, expected, "exact()")
            numbers = torch.arange(2 * NUM)
            received = torch.empty_like(numbers)
            dist.all_to_all_single(received, numbers)
            assert_same_bits(received, torch.cat([numbers.chunk(2)[rank]] * 2), "integers")
        stats = zcomm.stats().all_to_all
        assert stats.calls == 1
        assert {reason: calls.calls for reason, calls in stats.exact.items()} == {"format_exact": 2, "not_a_float": 1}

    run(body)


def test_of_the_exchanges_beside_sums_of_gradients_only_all_to_alls_are_gradients() -> None:
    """A trainer may broadcast, gather, scatter or send anything else while it reduces gradients."""

    def body() -> None:
        rank, values = dist.get_rank(), data(0, NUM)
        mine, arrived = data(rank, NUM), [torch.empty(NUM) for _ in range(2)]
        with known(_gradients=""):
            sent = values.clone() if rank == 0 else torch.empty(NUM)
            dist.broadcast(sent, src=0)
            assert_same_bits(sent, values, "broadcast")
            dist.gather(mine, arrived if rank == 0 else None, dst=0)
            dist.scatter(sent, arrived if rank == 0 else None, src=0)
            assert_same_bits(sent, mine, "gathered and scattered")
            if rank == 0:
                dist.send(values, dst=1)
            else:
                dist.recv(sent, src=0)
                assert_same_bits(sent, values, "sent")
            source, output = data(rank, 2 * NUM), torch.empty(2 * NUM)
            dist.all_to_all_single(output, source)
        stats = zcomm.stats()
        assert (stats.all_to_all.calls, stats.broadcast.calls, stats.gather.calls, stats.scatter.calls) == (1, 0, 0, 0)

    run(body, nodes=[0, 1])


def test_bytes_are_those_of_the_wires() -> None:
    """``auto`` has no say, and the steps that it times see no all-to-all, whose size differs in each step."""

    def body() -> None:
        output = torch.empty(3 * 1280 * 32)
        dist.all_to_all_single(output, data(dist.get_rank(), output.numel()))
        stats = zcomm.stats().all_to_all
        intra, inter = (zcomm.codec.wire_bytes(format, "float32", 1280 * 32) for format in (INTRA, INTER))
        assert stats.intra_node_bytes == NODES.count(NODES[dist.get_rank()]) * intra - intra
        assert stats.inter_node_bytes == (3 - NODES.count(NODES[dist.get_rank()])) * inter
        assert not zcomm.stats().decisions

    run(body, size=3, options=zcomm.Options(exchanges=FORMATS, compress="auto", min_bytes=1 << 16), nodes=NODES)


def test_the_report_samples_only_messages_that_are_encoded() -> None:
    def body() -> None:
        for num, is_encoded in ((100, False), (40_000, True)):
            dist.all_to_all_single(torch.empty(2 * num), data(dist.get_rank(), 2 * num))
            assert bool(zcomm.report().all_to_all) == is_encoded

    run(body, 2, options=zcomm.Options(exchanges=FORMATS), env=sampling())
