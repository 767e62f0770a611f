"""torch's own calls run the operations of earlier calls like them: no two kinds of call are confused."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from support.calls import data, gather
from support.expected import assert_same_bits, roundtrip
from support.worlds import run

import zcomm

FORMATS = ["int8:128", "int8:64", "int4:128"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [4096, 4097]
OPTIONS = zcomm.Options(min_bytes=1, exchanges="int8:128")


def check(format: str, dtype: torch.dtype, length: int) -> None:
    with zcomm.override(all_gather=format, exchanges=format):
        expected = [roundtrip(data(rank, length, dtype), format) for rank in range(2)]
        assert_same_bits(
            gather(data(dist.get_rank(), length, dtype)), torch.cat(expected), f"{format} {dtype} {length}"
        )
        for root in range(2):
            values = data(root, length, dtype) if root == dist.get_rank() else torch.empty(length, dtype=dtype)
            dist.broadcast(values, root)
            assert_same_bits(values, expected[root], f"{format} {dtype} {length} from {root}")


def test_calls_that_differ_in_one_property_have_their_own_results() -> None:
    """In an order in which each differs from the last, twice: the second time operations are there, or replaced."""

    def body() -> None:
        for _ in range(2):
            for format, dtype, length in itertools.product(FORMATS, DTYPES, LENGTHS):
                check(format, dtype, length)

    run(body, options=OPTIONS)


def test_more_shapes_than_are_remembered() -> None:
    def body() -> None:
        for _ in range(2):
            for length in range(128, 128 + 40):
                check("int8:128", torch.float32, length)

    run(body, options=OPTIONS)


def test_two_groups_remember_their_own() -> None:
    def body() -> None:
        values = data(dist.get_rank(), 1000)
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        pair = dist.new_group()
        for group in (pair, alone, pair):
            whole = torch.empty(dist.get_world_size(group) * 1000)
            dist.all_gather_into_tensor(whole, values, group=group)
            assert_same_bits(
                whole,
                values if group is alone else torch.cat([roundtrip(data(rank, 1000), "int8:256") for rank in range(2)]),
                "gathered",
            )

    run(body, options=zcomm.Options(min_bytes=1, forms="out_of_place"))
