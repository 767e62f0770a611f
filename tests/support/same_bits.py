"""Arrays that are compared bit by bit with those of the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from zcomm_bench import reference as ref


def typed(values):
    """uint16 bits of bfloat16, as the reference has them -> the array type that codec takes."""
    return values.view(ml_dtypes.bfloat16) if values.dtype == np.uint16 else values


def empty(dtype, size):
    """Filled with a pattern, so that an element that is not written shows."""
    return np.full(size * ref.DTYPES[dtype].itemsize, 0xAB, np.uint8).view(ref.DTYPES[dtype])


def assert_same_bits(actual, expected, what):
    actual, expected = (array.view(f"u{array.itemsize}") for array in (actual, expected))
    wrong = np.flatnonzero(actual != expected)
    assert actual.size == expected.size and not wrong.size, (
        f"{what}: {wrong.size} of {expected.size} differ, first at {wrong[0]}: "
        f"expected {expected[wrong[0]]:#x}, got {actual[wrong[0]]:#x}"
    )
