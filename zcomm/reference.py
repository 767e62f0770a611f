"""The wire format as an executable specification: plain NumPy, for reading and for tests, not for speed.

Every codec gives these bits. Arrays are one-dimensional. Their dtype says what they hold: float32, float16, or uint16
for the bit patterns of bfloat16 (NumPy has no bfloat16). A wire is a uint8 array. ``docs/wire_format.md`` is the same
in words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[Any]  # float32, float16 or uint16
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
}
LARGEST_FINITE = {
    "float32": float.fromhex("0x1.fffffep127"),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65504.0,
}
MAX_CODE = {"int8": 127, "int4": 7}
MIN_SCALE = np.float32(2.0**-126)
NAN_SCALE = 0x7FC0  # bfloat16 bits


@dataclass(frozen=True)
class Format:
    """kind: "exact", "bf16", "int8" or "int4"; block_size: elements that share a scale, 0 if there are none."""

    kind: str
    block_size: int = 0


def parse_format(text: str) -> Format:
    """The format that "exact", "bf16", "int8:B" or "int4:B" names; B is a multiple of 32 from 32 to 4096."""
    if text in ("exact", "bf16"):
        return Format(text)
    match = re.fullmatch(r"(int8|int4):([1-9][0-9]*)", text, re.ASCII)
    if match and int(match[2]) <= 4096 and int(match[2]) % 32 == 0:
        return Format(match[1], int(match[2]))
    raise ValueError(
        f"format: got '{text}', expected exact, bf16, int8:B or int4:B with B a multiple of 32 from 32 to 4096"
    )


@dataclass(frozen=True)
class Layout:
    """Bytes of a wire: scales from 0, codes from codes_offset, num_bytes in all."""

    num_blocks: int
    codes_offset: int
    codes_bytes: int
    num_bytes: int


def wire_layout(format: str, dtype: str, num_elements: int) -> Layout:
    """Where the parts of a wire of ``num_elements`` values of ``dtype`` lie, in bytes."""
    kind, block_size = (parsed := parse_format(format)).kind, parsed.block_size
    num_blocks = -(-num_elements // block_size) if block_size else 0
    bits = {"exact": 8 * DTYPES[dtype].itemsize, "bf16": 16, "int8": 8, "int4": 4}[kind]
    codes_offset = _align(2 * num_blocks)
    codes_bytes = -(-num_elements * bits // 8)
    return Layout(num_blocks, codes_offset, codes_bytes, codes_offset + _align(codes_bytes))


def encode(values: Values, format: str) -> Bytes:
    """values (n,) -> wire (wire_layout(format, dtype, n).num_bytes,)."""
    dtype, kind = _dtype_name(values), parse_format(format).kind
    layout = wire_layout(format, dtype, values.size)
    wire = np.zeros(layout.num_bytes, np.uint8)
    if kind == "exact" or (kind == "bf16" and dtype == "bfloat16"):
        wire[: layout.codes_bytes] = values.view(np.uint8)
    elif kind == "bf16":
        wire[: layout.codes_bytes] = narrow(widen(values), "bfloat16").view(np.uint8)
    else:
        scales, codes = _quantize(widen(values), format)
        wire[: 2 * layout.num_blocks] = scales.view(np.uint8)
        packed = codes.view(np.uint8)
        if kind == "int4":
            nibbles = np.append(packed, np.zeros(packed.size % 2, np.uint8)) & np.uint8(15)
            packed = nibbles[0::2] | nibbles[1::2] << np.uint8(4)
        wire[layout.codes_offset :][: layout.codes_bytes] = packed
    return wire


def decode(wire: Bytes, format: str, num_elements: int, dtype: str, *, wire_dtype: str | None = None) -> Values:
    """wire -> values (num_elements,) of ``dtype``; finite values saturate. ``wire_dtype``: the type that an exact wire
    holds, by default ``dtype``."""
    kind, held = parse_format(format).kind, wire_dtype or dtype
    if (kind == "exact" and held == dtype) or (kind == "bf16" and dtype == "bfloat16"):
        return wire[: num_elements * DTYPES[dtype].itemsize].view(DTYPES[dtype]).copy()
    terms = _terms(wire, format, held, num_elements)
    limit = np.float32(LARGEST_FINITE[dtype])
    return narrow(np.where(np.isfinite(terms), np.clip(terms, -limit, limit), terms), dtype)


def decode_sum(
    wires: Sequence[tuple[Bytes, str]],
    num_elements: int,
    dtype: str,
    *,
    factor: float = 1.0,
    wire_dtype: str = "float32",
) -> Values:
    """factor * (wires[0] + wires[1] + ...) (num_elements,) of ``dtype``. wires: pairs of a wire and its format;
    ``wire_dtype``: the type that the exact ones hold."""
    with np.errstate(all="ignore"):
        return narrow(_sum(wires, num_elements, wire_dtype) * np.float32(factor), dtype)


def decode_sum_encode(
    wires: Sequence[tuple[Bytes, str]], num_elements: int, format: str, *, wire_dtype: str = "float32"
) -> Bytes:
    """The wire of the float32 sum of ``wires``, as in decode_sum."""
    return encode(narrow(_sum(wires, num_elements, wire_dtype), "float32"), format)


def widen(values: Values) -> Floats:
    """values (n,) -> the same as float32 (n,)."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def narrow(values: Floats, dtype: str) -> Values:
    """float32 (n,) -> nearest (ties to even) of ``dtype`` (n,), beyond the largest infinity; any NaN is the positive
    quiet one: float32 0x7fc00000, bfloat16 0x7fc0, float16 0x7e00."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    with np.errstate(all="ignore"):
        narrowed = values.astype(DTYPES[dtype])
    narrowed[np.isnan(values)] = np.nan
    return narrowed


def _quantize(values: Floats, format: str) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """values (n,) -> bfloat16 bits of the scales (num_blocks,), codes (n,)."""
    kind, block_size = (parsed := parse_format(format)).kind, parsed.block_size
    num_blocks = -(-values.size // block_size)
    blocks = np.zeros((num_blocks, block_size), np.float32)
    blocks.reshape(-1)[: values.size] = values
    # The largest magnitude, as bit patterns: infinities and NaNs are the largest of all.
    absmax = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=1, initial=0).view(np.float32)
    finite = np.isfinite(absmax)
    quotient = np.where(finite, absmax, np.float32(0)) / np.float32(MAX_CODE[kind])
    rounded_up = ((quotient.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32)
    scales = np.maximum(rounded_up, MIN_SCALE)
    with np.errstate(all="ignore"):
        codes = np.rint(blocks * (np.float32(1) / scales)[:, None])
    codes[~finite] = 0
    bits = np.where(finite, scales.view(np.uint32) >> 16, NAN_SCALE).astype(np.uint16)
    return bits, codes.astype(np.int8).reshape(-1)[: values.size]


def _terms(wire: Bytes, format: str, dtype: str, num_elements: int) -> Floats:
    """The float32 values (num_elements,) that a wire adds to a sum."""
    parsed, layout = parse_format(format), wire_layout(format, dtype, num_elements)
    packed = wire[layout.codes_offset :][: layout.codes_bytes]
    if parsed.kind == "exact":
        return widen(packed.view(DTYPES[dtype]))
    if parsed.kind == "bf16":
        return widen(packed.view(np.uint16))
    if parsed.kind == "int4":
        pairs = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:num_elements]
        codes = (pairs ^ 8).astype(np.int8) - np.int8(8)
    else:
        codes = packed.view(np.int8)
    scales = widen(wire[: 2 * layout.num_blocks].view(np.uint16))
    limit = np.float32(LARGEST_FINITE["float32"])
    with np.errstate(all="ignore"):
        terms = codes.astype(np.float32) * np.repeat(scales, parsed.block_size)[:num_elements]
    clipped: Floats = np.clip(terms, -limit, limit)  # NaN stays NaN
    return clipped


def _sum(wires: Sequence[tuple[Bytes, str]], num_elements: int, wire_dtype: str) -> Floats:
    terms = [_terms(wire, format, wire_dtype, num_elements) for wire, format in wires]
    total: Floats = terms[0]
    with np.errstate(all="ignore"):
        for term in terms[1:]:
            total = total + term
    return total


def _dtype_name(values: Values) -> str:
    for name, dtype in DTYPES.items():
        if values.dtype == dtype:
            return name
    raise ValueError(f"values: got dtype {values.dtype}, expected float32, float16, or uint16 for bfloat16 bits")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
