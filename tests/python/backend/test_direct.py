"""`Options(direct=)`: exact reduce-scatters that zcomm makes in one hop, and which calls are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, mine, newly_counted, scatter
from support.expected import assert_same_bits
from support.worlds import run

import zcomm

DIRECT = zcomm.Options(reduce_scatter="exact", direct="always")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(dtype: torch.dtype, num: int, size: int, factor: float = 1.0) -> torch.Tensor:
    """This rank's sum of all ranks' data, in float32 in rank order, rounded once."""
    rank = dist.get_rank()
    parts = [data(r, num * size, dtype)[rank * num :][:num].float() for r in range(size)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return (total * factor).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_direct_calls_are_the_sum_in_rank_order(dtype: torch.dtype) -> None:
    """Every size, single tensors and lists, SUM, AVG and PREMUL_SUM, synchronous or not."""

    def body() -> None:
        size = dist.get_world_size()
        for num in (1, 7, 1000, NUM):
            inputs = mine(num * size, dtype)
            before = zcomm.stats().direct_reduce_scatter
            assert_same_bits(scatter(inputs), expected(dtype, num, size), "sum")
            assert_same_bits(scatter(inputs, dist.ReduceOp.AVG), expected(dtype, num, size, 1 / size), "mean")
            premul = scatter(inputs, dist._make_nccl_premul_sum(0.25))
            assert_same_bits(premul, expected(dtype, num, size, 0.25), "premul")
            output = torch.empty(num, dtype=dtype)
            dist.reduce_scatter(output, list(inputs.chunk(size)), async_op=True).wait()
            assert_same_bits(output, expected(dtype, num, size), "list")
            after = zcomm.stats().direct_reduce_scatter
            assert after.calls - before.calls == 4
            sent = after.intra_node_bytes + after.inter_node_bytes - before.intra_node_bytes - before.inter_node_bytes
            assert sent == 4 * (size - 1) * num * inputs.itemsize
        assert zcomm.stats().reduce_scatter.wire_bytes == 0

    run(body, size=3, options=DIRECT, nodes=[0, 0, 1])


@pytest.mark.parametrize("direct", ["always", "never"])
def test_memory_that_the_call_writes_may_be_read(direct: str) -> None:
    """An input that lies in another slot of the output, and an output in another slot of the input, as over Gloo."""

    def body() -> None:
        size = dist.get_world_size()
        shards = [data(rank, NUM) for rank in range(size)]
        inputs = mine(NUM * size)
        for start in (0, NUM, NUM // 2):
            whole = torch.zeros(size * NUM)
            whole[start:][:NUM] = mine()
            dist.all_gather_into_tensor(whole, whole[start:][:NUM])
            boxes = [torch.zeros(NUM) for _ in range(size)]
            boxes[0].copy_(mine())
            dist.all_gather(boxes, boxes[0])
            both = inputs.clone()
            dist.reduce_scatter_tensor(both[start:][:NUM], both)
            if direct == "always":
                assert_same_bits(whole, torch.cat(shards), f"from {start}")
                assert_same_bits(torch.cat(boxes), torch.cat(shards), "list")
                assert_same_bits(both[start:][:NUM], expected(torch.float32, NUM, size), f"into {start}")
            else:
                step = max(shard.abs().max() for shard in shards).item() / 127
                assert (whole - torch.cat(shards)).abs().max() <= step
                assert (torch.cat(boxes) - torch.cat(shards)).abs().max() <= step
                assert_same_bits(both[start:][:NUM], scatter(inputs))

    formats = {} if direct == "never" else {"all_gather": "exact", "reduce_scatter": "exact"}
    forms = ("list", "out_of_place", "in_place")
    run(body, size=2, options=zcomm.Options(direct=direct, forms=forms, **formats), nodes=[0, 0])


def test_small_calls_alone() -> None:
    """Calls below min_bytes are direct, calls above are compressed, and calls under zcomm.exact() are gloo's."""

    def body() -> None:
        direct = lambda: zcomm.stats().direct_reduce_scatter.calls  # noqa: E731
        assert newly_counted(lambda: scatter(mine(2 * 1000))) == {"reduce_scatter: min_bytes": 1}
        assert direct() == 1
        assert newly_counted(lambda: scatter(mine(2 * NUM))) == {"reduce_scatter: compressed": 1}
        with zcomm.exact():
            scatter(mine(2 * 1000))
            scatter(mine(2 * NUM))
        assert direct() == 1
        assert "direct reduce_scatter 1 calls" in str(zcomm.stats())
        with zcomm.override(reduce_scatter="exact"):
            scatter(mine(2 * NUM))
            assert direct() == 1
            scatter(mine(2 * 1000))
            assert direct() == 2
        with zcomm.override(reduce_scatter="exact", direct="always"):
            scatter(mine(2 * NUM))
        assert direct() == 3
        with zcomm.override(direct="never"):
            scatter(mine(2 * 1000))
        assert direct() == 3

    run(body, options=zcomm.Options(direct="small"))


def test_other_calls_are_gloos() -> None:
    def body() -> None:
        rank = dist.get_rank()
        for dtype in (torch.int64, torch.float64):
            inputs = [data(r, 2 * 100, torch.float64).mul(100).to(dtype) for r in range(2)]
            total = (inputs[0] + inputs[1])[rank * 100 :][:100]
            assert_same_bits(scatter(inputs[rank]), total, str(dtype))
        largest = torch.maximum(data(0, 2 * NUM), data(1, 2 * NUM))[rank * NUM :][:NUM]
        assert_same_bits(scatter(mine(2 * NUM), dist.ReduceOp.MAX), largest, "MAX")
        assert zcomm.stats().direct_reduce_scatter.calls == 0

    run(body, options=DIRECT)


def test_wrong_shapes_are_refused_before_any_byte_moves() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="input: expected 2 times"):
            dist.reduce_scatter_single(torch.empty(3), torch.ones(7))
        assert zcomm.stats().direct_reduce_scatter.calls == 0

    run(body, options=DIRECT)


ONE_NODE = zcomm.Options(all_gather="exact", reduce_scatter="exact", direct="always")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_direct_gathers_inside_a_node_have_the_values(dtype: torch.dtype) -> None:
    def body() -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        for num in (1, 7, 1000, NUM):
            expected = torch.cat([data(r, num, dtype) for r in range(size)])
            before = zcomm.stats().direct_all_gather
            whole = torch.zeros(size * num, dtype=dtype)
            dist.all_gather_single(whole, data(rank, num, dtype))
            assert_same_bits(whole, expected, "out of place")
            whole = torch.zeros(size * num, dtype=dtype)
            own = whole[rank * num :][:num]
            own.copy_(data(rank, num, dtype))
            dist.all_gather_single(whole, own, async_op=True).wait()
            assert_same_bits(whole, expected, "in place")
            parts = [torch.zeros(num, dtype=dtype) for _ in range(size)]
            dist.all_gather(parts, data(rank, num, dtype))
            assert_same_bits(torch.cat(parts), expected, "list")
            after = zcomm.stats().direct_all_gather
            assert after.calls - before.calls == 3
            assert after.intra_node_bytes - before.intra_node_bytes == 3 * (size - 1) * num * own.itemsize
        assert zcomm.stats().all_gather.wire_bytes == 0
        assert "direct all_gather 12 calls" in str(zcomm.stats())
        integers = torch.zeros(2 * size, dtype=torch.int64)
        dist.all_gather_single(integers, torch.full((2,), rank))
        assert integers.tolist() == [r for r in range(size) for _ in range(2)]
        assert zcomm.stats().direct_all_gather.calls == 12

    run(body, size=3, options=ONE_NODE, nodes=[0, 0, 0])


def test_gathers_between_nodes_are_gloos() -> None:
    def body() -> None:
        dist.all_gather_single(torch.zeros(2 * NUM), mine())
        assert zcomm.stats().direct_all_gather.calls == 0

    run(body, options=ONE_NODE, nodes=[0, 1])
