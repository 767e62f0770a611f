"""Executable specification of the wire format: plain NumPy, for reading and for tests, not for speed.

Every codec gives these bits. Arrays are one-dimensional: float32, float16, or uint16 for the bit patterns of bfloat16
(NumPy has no bfloat16). A wire is a uint8 array. ``docs/wire_format.md`` specifies the same in words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zcomm_bench.eden_reference import EDEN_LEVELS, quantize_eden, rotate, rotate_back

Values: TypeAlias = NDArray[Any]  # float32, float16 or uint16
Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
WireAndFormat: TypeAlias = tuple[Bytes, str] | tuple[Bytes, str, float]

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


@dataclass(frozen=True)
class Kind:
    """Element kind: bits per code, the largest code (0 without scales), and EDEN's levels."""

    bits: int
    max_code: int = 0
    stochastic: bool = False
    levels: tuple[int, ...] = ()


KINDS = {
    "exact": Kind(0),  # as many bits as the dtype has
    "bf16": Kind(16),
    "int8": Kind(8, 127, stochastic=True),
    "int4": Kind(4, 7, stochastic=True),
    "fp8": Kind(8, 448),
    **{f"eden{bits}": Kind(bits, levels[-1], levels=levels) for bits, levels in EDEN_LEVELS.items()},
}
MIN_SCALE = np.float32(2.0**-126)
NAN_SCALE = 0x7FC0  # bfloat16 bits


@dataclass(frozen=True)
class Format:
    """Parsed format. kind: a key of KINDS; block_size: elements that share a scale, 0 without scales; stochastic:
    rounds codes up or down at random."""

    kind: str
    block_size: int = 0
    stochastic: bool = False

    @property
    def rotation(self) -> int:
        """Elements that are rotated together, 0 without rotation."""
        return self.block_size if KINDS[self.kind].levels else 0


def parse_format(text: str) -> Format:
    """Parse "exact", "bf16" or "KIND:B"; B is a multiple of 32 from 32 to 4096, with EDEN's kinds a power of two of at
    most 512. ":stochastic" may follow it in integer formats."""
    if (kind := KINDS.get(text)) and not kind.max_code:
        return Format(text)
    match = re.fullmatch(r"(\w+):([1-9][0-9]*)(:stochastic)?", text, re.ASCII)
    if match and (kind := KINDS.get(match[1])) and kind.max_code and _is_block_size(kind, size := int(match[2])):
        if match[3] and not kind.stochastic:
            raise ValueError(
                f"format: expected {match[1]} without :stochastic, got '{text}': it is always rounded to nearest"
            )
        return Format(match[1], size, bool(match[3]))
    names = [name + (":B" if kind.max_code else "") for name, kind in KINDS.items()]
    raise ValueError(
        f"format: expected {', '.join(names[:-1])} or {names[-1]}, got '{text}': B is a multiple of 32 from 32 to "
        "4096, for eden a power of two up to 512; :stochastic may follow B of int8 and int4"
    )


def _is_block_size(kind: Kind, size: int) -> bool:
    return size & (size - 1) == 0 and 32 <= size <= 512 if kind.levels else size <= 4096 and size % 32 == 0


@dataclass(frozen=True)
class Layout:
    """Bytes of a wire: scales from 0, codes from codes_offset, num_bytes in all."""

    num_blocks: int
    codes_offset: int
    codes_bytes: int
    num_bytes: int


def wire_layout(format: str, dtype: str, num_elements: int) -> Layout:
    """Return the offsets and sizes, in bytes, of the parts of a wire of ``num_elements`` values of ``dtype``."""
    kind, block_size = (parsed := parse_format(format)).kind, parsed.block_size
    num_blocks = -(-num_elements // block_size) if block_size else 0
    bits = KINDS[kind].bits or 8 * DTYPES[dtype].itemsize
    codes_offset = _align(2 * num_blocks)
    codes_bytes = -(-num_elements * bits // 8)
    return Layout(num_blocks, codes_offset, codes_bytes, codes_offset + _align(codes_bytes))


def encode(values: Values, format: str, *, seed: int = 0, first_element: int = 0) -> Bytes:
    """values (n,) -> wire (wire_layout(format, dtype, n).num_bytes,). ``seed`` and ``first_element``, the index of
    values[0] in a whole message, choose the random bits of stochastic formats."""
    dtype, parsed = _dtype_name(values), parse_format(format)
    layout = wire_layout(format, dtype, values.size)
    wire = np.zeros(layout.num_bytes, np.uint8)
    if parsed.kind == "exact" or (parsed.kind == "bf16" and dtype == "bfloat16"):
        wire[: layout.codes_bytes] = values.view(np.uint8)
    elif parsed.kind == "bf16":
        wire[: layout.codes_bytes] = narrow(widen(values), "bfloat16").view(np.uint8)
    else:
        floats = rotate(widen(values), parsed.rotation) if parsed.rotation else widen(values)
        offsets = random_offsets(seed, first_element, values.size) if parsed.stochastic else None
        levels = KINDS[parsed.kind].levels
        quantized = quantize_eden(floats, parsed.block_size, levels) if levels else _quantize(floats, parsed, offsets)
        scales, codes = quantized
        wire[: 2 * layout.num_blocks] = scales.view(np.uint8)
        wire[layout.codes_offset :][: layout.codes_bytes] = _pack(codes, KINDS[parsed.kind].bits)
    return wire


def decode(wire: Bytes, format: str, num_elements: int, dtype: str, *, wire_dtype: str | None = None) -> Values:
    """wire -> values (num_elements,) of ``dtype``; finite values saturate. ``wire_dtype``: the type that an exact wire
    holds, by default ``dtype``."""
    parsed, held = parse_format(format), wire_dtype or dtype
    if (parsed.kind == "exact" and held == dtype) or (parsed.kind == "bf16" and dtype == "bfloat16"):
        return wire[: num_elements * DTYPES[dtype].itemsize].view(DTYPES[dtype]).copy()
    terms = _terms(wire, format, held, num_elements)
    if parsed.rotation:
        terms = rotate_back(terms, parsed.rotation)
    limit = np.float32(LARGEST_FINITE[dtype])
    return narrow(np.where(np.isfinite(terms), np.clip(terms, -limit, limit), terms), dtype)


def decode_sum(
    wires: Sequence[WireAndFormat],
    num_elements: int,
    dtype: str,
    *,
    factor: float = 1.0,
    wire_dtype: str = "float32",
) -> Values:
    """factor * (wires[0] + wires[1] + ...) (num_elements,) of ``dtype``. ``wires`` are tuples (wire, format[, factor]);
    ``wire_dtype`` is the type that exact ones hold."""
    with np.errstate(all="ignore"):
        return narrow(_sum(wires, num_elements, wire_dtype) * np.float32(factor), dtype)


def decode_sum_encode(
    wires: Sequence[WireAndFormat],
    num_elements: int,
    format: str,
    *,
    seed: int = 0,
    first_element: int = 0,
    wire_dtype: str = "float32",
) -> Bytes:
    """Return the wire of the float32 sum of ``wires``, as in decode_sum."""
    total = narrow(_sum(wires, num_elements, wire_dtype), "float32")
    return encode(total, format, seed=seed, first_element=first_element)


def random_offsets(seed: int, first_element: int, num_elements: int) -> Floats:
    """Return the offsets (num_elements,) that are added to scaled values before rounding to nearest: (k + 1/2) / 2^16
    for a random signed 16-bit integer k, so between -1/2 and 1/2. ``first_element`` is a multiple of 32."""
    groups = np.arange(first_element // 8, -(-(first_element + num_elements) // 8), dtype=np.uint64)
    zeros = np.zeros_like(groups)
    counter = np.stack([groups & np.uint64(0xFFFFFFFF), groups >> np.uint64(32), zeros, zeros], axis=1)
    words = philox(counter.astype(np.uint32), seed)
    halves = words.astype("<u4").view("<i2").reshape(-1)[:num_elements]
    offsets: Floats = (halves.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16)
    return offsets


def philox(counter: NDArray[np.uint32], seed: int) -> NDArray[np.uint32]:
    """counter (m, 4) -> Philox4x32-10 (m, 4); the key is the low and the high half of ``seed`` (Salmon, Moraes, Dror
    and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11)."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(key0), product1 & low
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(key1), product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & 0xFFFFFFFF, (key1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def widen(values: Values) -> Floats:
    """values (n,) -> the same as float32 (n,)."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def narrow(values: Floats, dtype: str) -> Values:
    """float32 (n,) -> nearest (ties to even) of ``dtype`` (n,). Overflow becomes infinity; any NaN becomes the positive
    quiet one: float32 0x7fc00000, bfloat16 0x7fc0, float16 0x7e00."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    with np.errstate(all="ignore"):
        narrowed = values.astype(DTYPES[dtype])
    narrowed[np.isnan(values)] = np.nan
    return narrowed


def _quantize(values: Floats, format: Format, offsets: Floats | None) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """values (n,), random offsets (n,) or None -> bfloat16 bits of the scales (num_blocks,), codes' bits (n,)."""
    kind = KINDS[format.kind]
    num_blocks = -(-values.size // format.block_size)
    blocks = np.zeros((num_blocks, format.block_size), np.float32)
    blocks.reshape(-1)[: values.size] = values
    # Compares magnitudes as bit patterns, because infinities and NaNs then exceed all numbers.
    absmax = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=1, initial=0).view(np.float32)
    finite = np.isfinite(absmax)
    quotient = np.where(finite, absmax, np.float32(0)) / np.float32(kind.max_code)
    rounded_up = ((quotient.view(np.uint32) + 0xFFFF) & 0xFFFF0000).view(np.float32)
    scales: Floats = np.maximum(rounded_up, MIN_SCALE)
    with np.errstate(all="ignore"):
        scaled = blocks * (np.float32(1) / scales)[:, None]
    scaled[~finite] = 0
    scaled = scaled.reshape(-1)[: values.size]
    if format.kind == "fp8":
        codes = _to_e4m3(scaled)
    elif offsets is None:
        codes = np.rint(scaled).astype(np.int8).view(np.uint8)
    else:
        rounded = np.clip(np.rint(scaled + offsets), -kind.max_code, kind.max_code)
        rounded[~finite.repeat(format.block_size)[: values.size]] = 0
        codes = rounded.astype(np.int8).view(np.uint8)
    bits = np.where(finite, scales.view(np.uint32) >> 16, NAN_SCALE).astype(np.uint16)
    return bits, codes


def _to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """values (n,) of magnitudes that round to 448 or less -> the nearest e4m3 (n,), ties to even."""
    magnitude = np.abs(values).astype(np.float64)  # makes all steps but the rounding exact

    def exponents(magnitudes: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.floor(np.log2(np.maximum(magnitudes, 2.0**-6)))  # subnormals: as the smallest normal number

    unit = 2.0 ** (exponents(magnitude) - 3)
    nearest = np.rint(magnitude / unit) * unit
    exponent = exponents(nearest)
    code = (exponent + 6) * 8 + nearest * 2.0 ** (3 - exponent)  # the leading 1 counts as one more in the exponent
    return (code.astype(np.uint8) | np.signbit(values) * np.uint8(128)).astype(np.uint8)


def _from_e4m3(codes: NDArray[np.uint8]) -> Floats:
    """codes (n,) -> values (n,)."""
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    magnitude = np.ldexp(fraction + 8 * (exponent > 0), np.maximum(exponent, 1) - 10).astype(np.float32)
    values: Floats = np.copysign(magnitude, np.where(codes & 128, np.float32(-1), np.float32(1)))
    return values


def _pack(codes: NDArray[np.uint8], bits: int) -> Bytes:
    """codes (n,) -> their low ``bits``, packed from the lowest bit of byte 0 on, (ceil(n * bits / 8),)."""
    of_codes = np.unpackbits(codes, bitorder="little").reshape(-1, 8)[:, :bits]
    return np.packbits(of_codes.reshape(-1), bitorder="little")


def _unpack(packed: Bytes, bits: int, num_elements: int) -> NDArray[np.uint8]:
    """Invert _pack, with the sign in all upper bits."""
    of_codes = np.unpackbits(packed, bitorder="little")[: num_elements * bits].reshape(-1, bits)
    signs = np.repeat(of_codes[:, -1:], 8 - bits, axis=1)
    return np.packbits(np.hstack([of_codes, signs]).reshape(-1), bitorder="little")


def _terms(wire: Bytes, format: str, dtype: str, num_elements: int, factor: float = 1.0) -> Floats:
    """Return the float32 values (num_elements,) that a wire adds to a sum, rotated if the format is."""
    parsed, layout = parse_format(format), wire_layout(format, dtype, num_elements)
    packed = wire[layout.codes_offset :][: layout.codes_bytes]
    limit = np.float32(LARGEST_FINITE["float32"])
    with np.errstate(all="ignore"):
        if parsed.kind == "exact":
            return widen(packed.view(DTYPES[dtype])) * np.float32(factor)
        if parsed.kind == "bf16":
            return widen(packed.view(np.uint16)) * np.float32(factor)
        patterns = _unpack(packed, KINDS[parsed.kind].bits, num_elements)
        levels = KINDS[parsed.kind].levels
        if levels:
            codes = np.array([*levels, *(-level for level in levels)], np.float32)[patterns & (2 * len(levels) - 1)]
        else:
            codes = _from_e4m3(patterns) if parsed.kind == "fp8" else patterns.view(np.int8).astype(np.float32)
        scales = widen(wire[: 2 * layout.num_blocks].view(np.uint16)) * np.float32(factor)
        scales = np.clip(scales, -limit, limit)  # NaN stays NaN
        terms = codes * np.repeat(scales, parsed.block_size)[:num_elements]
    clipped: Floats = np.clip(terms, -limit, limit)
    return clipped


def _sum(wires: Sequence[WireAndFormat], num_elements: int, wire_dtype: str) -> Floats:
    """Sum the wires of each rotation, in order, and rotate each sum back. Add these sums, then the other wires, in
    order. Codes are added to 0."""
    total: Floats | None = None
    rotations = [parse_format(wire[1]).rotation for wire in wires]
    with np.errstate(all="ignore"):
        for rotation in [*dict.fromkeys(size for size in rotations if size), 0]:
            same = [wire for wire, size in zip(wires, rotations, strict=True) if size == rotation]
            part: Floats | None = None if rotation else total
            for wire, format, *factor in same:
                term = _terms(wire, format, wire_dtype, num_elements, *factor)
                if part is None:
                    part = term + np.float32(0) if parse_format(format).block_size else term
                else:
                    part = part + term
            if rotation and part is not None:
                part = rotate_back(part, rotation)
                part = part if total is None else total + part
            total = part
    if total is None:
        raise ValueError("wires: expected at least one, got none")
    return total


def _dtype_name(values: Values) -> str:
    for name, dtype in DTYPES.items():
        if values.dtype == dtype:
            return name
    raise ValueError(f"values: expected dtype float32, float16, or uint16 for bfloat16 bits, got {values.dtype}")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
