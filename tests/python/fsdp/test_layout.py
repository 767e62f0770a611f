"""What FSDP2's all-gathers are planned as, by the parameters alone."""

from __future__ import annotations

import pytest
import torch

from zcomm.fsdp.fused import Buffer, Deferred
from zcomm.fsdp.layout import Gathered, Layout, planned_dtype
from zcomm.fsdp.rule import Rule

BF16, FP32, FP8, BYTES, PAIRS = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.uint16
RANKS = 2


def layout(gathered: Gathered, codes: list[bool] | None = None, rule: Rule | None = None) -> Layout:
    """In memory, in the one dtype that FSDP2 gathers, or in bytes."""
    dtypes = {dtype for _, dtype in gathered}
    dtype = next(iter(dtypes)) or BYTES if len(dtypes) == 1 else BYTES
    num_bytes = sum(numel * (each or BYTES).itemsize for numel, each in gathered)
    output = torch.zeros(RANKS * num_bytes, dtype=BYTES).view(dtype)
    shard = output[: len(output) // RANKS]
    return Layout(output, shard, gathered, rule, planned_dtype(shard, gathered), codes or [False] * len(gathered))


def rule(weights: str, *exempt: bool) -> Rule:
    return Rule(0, weights, None, None, fused=True, exempt=exempt)


@pytest.mark.parametrize(
    ("gathered", "planned"),
    [
        ([(4, BF16), (6, BF16)], BF16),
        ([(4, BF16), (3, FP32)], FP32),  # which has more bytes
        ([(8, BF16), (3, FP32)], BF16),
        ([(3, BF16), (3, FP32)], BF16),  # six bytes are no float32
        ([(3, BYTES), (3, FP32)], BYTES),
        ([(4, FP8), (4, BYTES)], BYTES),
        ([(4, None), (4, FP32)], BYTES),  # a tensor subclass gathers other data
    ],
    ids=str,
)
def test_the_float_with_the_most_bytes_is_planned(gathered: Gathered, planned: torch.dtype) -> None:
    found = layout(gathered)
    assert found.dtype == planned
    assert [each.dtype for each in found.views] == [planned, planned]
    assert found.views[0].data_ptr() == found.output.data_ptr()


def test_parts_are_exact_by_dtype_codes_and_rule() -> None:
    gathered: Gathered = [(4, BF16), (2, FP32), (6, BF16), (8, BF16)]
    assert layout(gathered).parts == [(4, False), (4, True), (6, False), (8, False)]
    codes = [False, False, True, False]
    exempt = rule("int8:256", True, False, False, False)
    assert layout(gathered, codes, exempt).parts == [(4, True), (4, True), (6, True), (8, False)]
    one_dtype: Gathered = [(4, BF16), (6, BF16)]
    assert layout(one_dtype).parts == [] == layout(one_dtype, rule=rule("lossless", True, False)).parts
    assert layout(one_dtype, rule=rule("int8:256", False, False)).parts == [(4, False), (6, False)]


def test_bytes_and_codes_beside_exempt_parameters_are_planned_in_pairs() -> None:
    assert layout([(3, BYTES), (4, BYTES)]).in_pairs().dtype == BYTES  # an odd number
    even = layout([(3, BYTES), (5, BYTES)]).in_pairs()
    assert even.dtype == PAIRS and even.views[1].numel() == 4 and even.parts == []
    floats: Gathered = [(4, BF16), (6, BF16)]
    for codes, weights, exempt, planned in (
        ([True, False], "int8:256", (False, True), PAIRS),
        ([True, False], "int8:256", (False, False), BF16),
        ([False, False], "int8:256", (True, True), BF16),
        ([True, False], "lossless", (False, True), BF16),  # which has no exempt ones
        ([True, True], "lossless", (False, False), PAIRS),
    ):
        assert layout(floats, codes, rule(weights, *exempt)).in_pairs().dtype == planned, (codes, weights, exempt)


def test_floats_among_bytes_are_hidden_unless_they_are_exempt() -> None:
    mixed: Gathered = [(3, BYTES), (3, FP32)]
    assert layout(mixed).hides_floats
    assert not layout([(3, BYTES), (4, BYTES)]).hides_floats
    assert not layout(mixed, rule=rule("int8:256", False, True)).hides_floats
    assert not layout(mixed, rule=rule("lossless", False, False)).hides_floats


def test_parameters_take_their_own_values_alone() -> None:
    """Those of FSDP2's buffer that has no memory, in their own dtype."""
    buffer = Buffer(lambda: torch.zeros(RANKS * 10, dtype=BF16))
    for gathered, codes, taken in (
        ([(4, BF16), (6, BF16)], [False, False], True),
        ([(4, BF16), (6, None)], [False, False], False),
        ([(4, BF16), (6, BF16)], [True, True], False),  # planned as pairs
    ):
        deferred = Deferred(buffer, [RANKS * 10], BF16, torch.device("cpu"))
        planned = Layout(deferred, torch.zeros(10, dtype=BF16), gathered, None, BF16, codes).in_pairs()
        assert planned.takes_parameters == taken, gathered
    assert not layout([(4, BF16), (6, BF16)]).takes_parameters  # in memory
