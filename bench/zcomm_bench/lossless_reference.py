"""Executable specification of lossless differences of 16-bit values: plain NumPy, for reading and for tests.

Every codec gives these bytes; ``docs/wire_format.md`` specifies the same in words. Values are bit patterns:
one-dimensional arrays of uint16, of dtype "bfloat16", "float16" or "byte_pairs".
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

Patterns = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Bits = NDArray[np.bool_]

TILE = 2048  # values that are coded together
BLOCK = 64
PLANES = 6
PADDING = 0x7F80  # fills up a short tile
LANES = 4  # per hash
GOLDEN = 0x9E3779B97F4A7C15
EXPONENTS = {"bfloat16": (7, 0xFF), "float16": (10, 0x1F)}  # lowest bit of the exponent, its mask
PAIR_EXPONENT = 8  # of all byte pairs
MOST_WEIGHED = {"bfloat16": 255, "float16": 255, "byte_pairs": 7}  # z that c depends on


def encode(values: Patterns, base: Patterns, dtype: str) -> Bytes:
    """Encode the difference of ``values`` to ``base``, both (n,)."""
    tiles = [_encode_tile(*pair, dtype) for pair in zip(_tiles(values), _tiles(base), strict=True)]
    table = np.zeros((len(tiles) + 1) // 2 * 2, "<u2")
    table[: len(tiles)] = [tile.size // 4 for tile in tiles]
    return _padded(np.concatenate([table.view(np.uint8), *tiles]), 16)


def decode(body: Bytes, base: Patterns, dtype: str) -> Patterns:
    """Decode a difference to ``base``. Raises ValueError if no encoder wrote these bytes."""
    num_tiles = -(-base.size // TILE)
    begin = (num_tiles + 1) // 2 * 4
    if body.size < begin:
        _fail("the table is cut off")
    sizes = 4 * body[: 2 * num_tiles].view("<u2").astype(np.int64)
    if _align(begin + int(sizes.sum()), 16) != body.size:
        _fail("its size is not that of its tiles")
    ends = begin + np.cumsum(sizes)
    places = zip(ends - sizes, ends, _tiles(base), strict=True)
    tiles = [_decode_tile(body[first:end], tile, dtype) for first, end, tile in places]
    return np.concatenate([np.zeros(0, np.uint16), *tiles])


def hash_of(values: Patterns) -> int:
    """Hash each tile by NH (Black et al., UMAC, CRYPTO 1999) in four lanes, with the finalizer of splitmix64."""
    keys = np.array([_mix((i + 1) * GOLDEN) >> 32 for i in range(TILE // 2)], np.uint32)
    total = 0
    for number, tile in enumerate(_tiles(values)):
        words = _filled(tile).astype("<u2").view("<u4") + keys  # modulo 2^32
        products = words[0::2].astype(np.uint64) * words[1::2]
        for lane in range(LANES):
            total += _mix(int(products[lane::LANES].sum(dtype=np.uint64)) + (LANES * number + lane + 1) * GOLDEN)
    return total % 2**64


def _encode_tile(values: Patterns, base: Patterns, dtype: str) -> Bytes:
    if np.array_equal(values, base):
        return np.zeros(0, np.uint8)
    n = values.size
    plain = _padded(values.astype("<u2").view(np.uint8), 4)
    values, base = _filled(values), _filled(base)
    exponents = _exponents(base, dtype)
    z = _differences(values, base, dtype)
    c = _choose_c(np.minimum(z, MOST_WEIGHED[dtype])[:n], exponents[:n])
    k, unlikely = _expected(exponents, c)
    r = np.where(z >= 255, PLANES, np.minimum(z >> k, PLANES))
    planes = [r > j for j in range(PLANES)]
    set_in_block: Bits = np.any((planes[0] & unlikely).reshape(-1, BLOCK), axis=1)
    sections = [_pack(planes[0][~unlikely]), *_groups(planes[0], unlikely, set_in_block)]
    sections += [_pack(planes[j][planes[j - 1]]) for j in range(1, PLANES)]
    sections.append(_pack(_low_bits(z, k)[r < PLANES].ravel()[_low_bits_that_travel(k)[r < PLANES].ravel()]))
    sections.append(values[r == PLANES].astype("<u2").view(np.uint8))
    head = np.array([c, 0, 0, 0], np.uint8)
    coded = _padded(np.concatenate([head, _pack(set_in_block), *sections]), 4)
    return coded if coded.size < plain.size else plain


def _decode_tile(wire: Bytes, base: Patterns, dtype: str) -> Patterns:
    n = base.size
    if wire.size == 0:
        return base
    if wire.size == (n + 1) // 2 * 4:
        plain: Patterns = wire.view("<u2")[:n].astype(np.uint16)
        return plain
    if not 8 <= wire.size < (n + 1) // 2 * 4 or wire[1:4].any():
        _fail("a tile begins with no head")
    base = _filled(base)
    k, unlikely = _expected(_exponents(base, dtype), int(wire[0]))
    reader = _Reader(wire[4:])
    set_in_block = reader.section(TILE // BLOCK)
    plane = np.zeros(TILE, np.bool_)
    plane[~unlikely] = reader.section(int((~unlikely).sum()))
    _read_groups(reader, plane, unlikely, set_in_block)
    r = plane.astype(np.int64)
    for _ in range(1, PLANES):
        above, plane = plane, np.zeros(TILE, np.bool_)
        plane[above] = reader.section(int(above.sum()))
        r += plane
    travels = _low_bits_that_travel(k) & (r < PLANES)[:, None]
    low = np.zeros((TILE, 8), np.int64)
    low[travels] = reader.section(int(travels.sum()))
    z = ((r << k) + (low << np.arange(8)).sum(axis=1)) % 256
    values = _successors(base, z, dtype)
    escapes = reader.section(16 * int((r == PLANES).sum()))
    values[r == PLANES] = np.packbits(escapes, bitorder="little").view("<u2")
    if _align(reader.begin, 4) != wire.size - 4:
        _fail("a tile is longer than its sections")
    return values[:n]


def _differences(values: Patterns, base: Patterns, dtype: str) -> NDArray[Any]:
    """Return z of each value: of a byte pair twice that of the byte that has changed, less 1 for the low one."""
    if dtype != "byte_pairs":
        return _zigzag((values - base).view(np.int16))
    low, high = _zigzag((values.view(np.uint8) - base.view(np.uint8)).view(np.int8)).reshape(-1, 2).T
    z: NDArray[Any] = np.where((low > 0) & (high > 0), 255, np.where(low > 0, 2 * low - 1, 2 * high))
    return z


def _successors(base: Patterns, z: NDArray[Any], dtype: str) -> Patterns:
    """Invert _differences, except for escapes."""
    values: Patterns
    if dtype == "byte_pairs":
        d = _undo_zigzag((z + 1) // 2)
        of_bytes = np.stack([np.where(z % 2 == 1, d, 0), np.where(z % 2 == 1, 0, d)], axis=1).ravel()
        values = (base.view(np.uint8) + of_bytes).astype(np.uint8).view(np.uint16)
    else:
        values = (base + _undo_zigzag(z)).astype(np.uint16)
    return values


def _zigzag(differences: NDArray[Any]) -> NDArray[Any]:
    d = differences.astype(np.int64)
    return np.where(d >= 0, 2 * d, -2 * d - 1)


def _undo_zigzag(z: NDArray[Any]) -> NDArray[Any]:
    return np.where(z % 2 == 0, z // 2, -(z // 2) - 1)


def _choose_c(z: NDArray[Any], exponents: NDArray[Any]) -> int:
    n = z.size
    e = int(exponents.sum()) // n + 2
    below = e - exponents
    weights = np.where(below < 0, 64, np.where(below > 6, 0, 64 >> np.clip(below, 0, 6)))
    total = 1 + int(((np.minimum(z, 255) + 1) // 2 * weights).sum())
    return min(max(e + (2048 * total // n).bit_length() - 1 - 15, 0), 255)


def _expected(exponents: NDArray[Any], c: int) -> tuple[NDArray[Any], Bits]:
    """Return k of each value, and which values are unlikely to differ."""
    return np.clip(c - exponents, 0, 7), exponents > min(c + 1, 255)


def _groups(plane: Bits, unlikely: Bits, set_in_block: Bits) -> tuple[Bytes, Bytes]:
    """Return sections F and G."""
    flags, groups = [], []
    for block in np.flatnonzero(set_in_block):
        of_block = slice(block * BLOCK, (block + 1) * BLOCK)
        bits = plane[of_block][unlikely[of_block]]
        for begin in range(0, bits.size, 8):
            group = bits[begin : begin + 8]
            flags.append(group.any())
            groups.append(group if group.any() else group[:0])
    return _pack(np.array(flags, np.bool_)), _pack(np.concatenate([np.zeros(0, np.bool_), *groups]))


def _read_groups(reader: _Reader, plane: Bits, unlikely: Bits, set_in_block: Bits) -> None:
    places = []
    for block in np.flatnonzero(set_in_block):
        of_block = block * BLOCK + np.flatnonzero(unlikely[block * BLOCK : (block + 1) * BLOCK])
        places += [of_block[begin : begin + 8] for begin in range(0, of_block.size, 8)]
    flags = reader.section(len(places))
    flagged = np.concatenate([np.zeros(0, np.int64), *(p for p, flag in zip(places, flags, strict=True) if flag)])
    plane[flagged] = reader.section(flagged.size)


def _low_bits(z: NDArray[Any], k: NDArray[Any]) -> Bits:
    """Return the bits of z (n, 8), lowest first."""
    return (z[:, None] >> np.arange(8) & 1).astype(np.bool_)


def _low_bits_that_travel(k: NDArray[Any]) -> Bits:
    return np.arange(8) < k[:, None]


class _Reader:
    """Reader of sections, which begin at whole bytes."""

    def __init__(self, wire: Bytes) -> None:
        self.begin = 0
        self._wire = wire

    def section(self, num_bits: int) -> Bits:
        end = self.begin + (num_bits + 7) // 8
        if end > self._wire.size:
            _fail("a tile is shorter than its sections")
        bits = np.unpackbits(self._wire[self.begin : end], count=num_bits, bitorder="little").astype(np.bool_)
        self.begin = end
        return bits


def _tiles(values: Patterns) -> list[Patterns]:
    return [values[begin : begin + TILE] for begin in range(0, values.size, TILE)]


def _filled(tile: Patterns) -> Patterns:
    return np.concatenate([tile, np.full(TILE - tile.size, PADDING, np.uint16)])


def _exponents(patterns: Patterns, dtype: str) -> NDArray[Any]:
    if dtype == "byte_pairs":
        return np.full(patterns.size, PAIR_EXPONENT)
    shift, mask = EXPONENTS[dtype]
    return (patterns.astype(np.int64) >> shift) & mask


def _pack(bits: Bits) -> Bytes:
    return np.packbits(bits, bitorder="little")


def _align(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _padded(data: Bytes, alignment: int) -> Bytes:
    return np.concatenate([data, np.zeros(-data.size % alignment, np.uint8)])


def _mix(x: int) -> int:
    """Finalizer of splitmix64 (Steele et al., OOPSLA 2014)."""
    x %= 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _fail(what: str) -> NoReturn:
    raise ValueError(f"body: expected one that an encoder wrote, got other bytes: {what}")
