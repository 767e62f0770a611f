"""Bits of the lossless differences of bfloat16 weights at a learning rate: the codec encodes such weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from zcomm import _core, codec
from zcomm_bench.planner.cluster import Figure

DEVIATION = 0.02  # of the weights
UPDATE = 0.3  # of an update of AdamW, over the learning rate
HEADER_BYTES = 64  # of a message
_NUM_ELEMENTS = 1 << 19


def changed_weights(num_elements: int, learning_rate: float) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Normal weights before and after an update, as the bits of bfloat16 values."""
    before, after = changed_floats(num_elements, learning_rate)
    return _as_bfloat16(before), _as_bfloat16(after)


def changed_floats(num_elements: int, learning_rate: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Normal weights before and after an update."""
    rng = np.random.default_rng(0)
    before = rng.standard_normal(num_elements, np.float32) * np.float32(DEVIATION)
    return before, before + rng.standard_normal(num_elements, np.float32) * np.float32(UPDATE * learning_rate)


def _as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    wire = codec.encode(values, "bf16")
    return np.asarray(wire).view(np.uint16)[: values.size]


def view_of(values: NDArray[np.uint16]) -> _core.Values:
    """What the core takes bits of bfloat16 values as."""
    return values.ctypes.data, values.size, "bfloat16"


def bits_per_weight(learning_rate: float) -> float:
    """Of a step at `learning_rate`, headers not counted. Raises ValueError for one below 0 or above 1."""
    if not 0 <= learning_rate <= 1:
        raise ValueError(f"learning_rate: expected 0 to 1, got {learning_rate}")
    before, after = changed_weights(_NUM_ELEMENTS, learning_rate)
    body = np.empty(_core.max_lossless_bytes(_NUM_ELEMENTS), np.uint8)
    num_bytes, _ = _core.encode_difference(view_of(after), view_of(before), body.ctypes.data)
    return 8 * num_bytes / _NUM_ELEMENTS


def figure(learning_rate: float | None, bits: float | None) -> Figure | None:
    """Bits per weight as given, or of a learning rate that is given. None if neither is there.

    Raises ValueError for both, and as `bits_per_weight`."""
    if learning_rate is not None and bits is not None:
        raise ValueError("bits_per_weight: expected it or a learning rate, got both")
    if learning_rate is not None:
        bits = bits_per_weight(learning_rate)
    return None if bits is None else Figure(bits, "given")
