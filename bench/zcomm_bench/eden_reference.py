"""Executable specification of the randomized Hadamard transform and of EDEN's codes: see reference.py.

EDEN: Vargaftik et al., "EDEN: communication-efficient and robust distributed mean estimation for federated learning",
ICML 2022.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

# What codes stand for, by bits: 46 times the centroids of a standard normal (Max, "Quantizing for minimum distortion",
# 1960), as integers. A code's upper bit is its sign.
EDEN_LEVELS = {2: (21, 69), 3: (11, 35, 62, 99), 4: (6, 18, 30, 43, 58, 74, 95, 126)}


def rotate(values: Floats, rotation: int) -> Floats:
    """values (n,) -> 2^-k H D x (n,) for each whole block x of R = 2^k = ``rotation`` of them, and for each 32 of those
    that remain; the last n % 32 stay as they are. H is the Walsh-Hadamard matrix in its natural order, D the diagonal
    of signs(R). The factor comes first: finite values stay finite."""
    rotated = values.copy()
    with np.errstate(all="ignore"):
        for part, size in _rotated_parts(rotated, rotation):
            part[:] = _hadamard(part * (signs(size) * np.float32(1 / size)))
    return rotated


def rotate_back(terms: Floats, rotation: int) -> Floats:
    """terms (n,) -> D H y (n,) for the blocks y of rotate(): the inverse. Finite values stay finite: a block with
    magnitudes of 2^119 or more is scaled down by 2^9 before and up after, and saturates."""
    rotated = terms.copy()
    limit = np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        for part, size in _rotated_parts(rotated, rotation):
            is_large = ~(np.abs(part).max(axis=1, initial=0) < 2.0**119)[:, None]
            plain, scaled = _hadamard(part), _hadamard(part * np.float32(2.0**-9))
            saturated = np.where(np.isfinite(scaled), np.clip(scaled * np.float32(512), -limit, limit), scaled)
            part[:] = np.where(is_large, saturated, plain) * signs(size) + np.float32(0)  # no -0
    return rotated


def signs(size: int) -> Floats:
    """Return signs (size,). Element i has -1 if bit i % 32 of h(i // 32 + 1) is set; h is MurmurHash3's finalizer."""
    words: NDArray[Any] = np.arange(1, size // 32 + 1, dtype=np.uint32)
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    words ^= words >> 16
    bits = words.astype("<u4").view(np.uint8)
    return np.where(np.unpackbits(bits, bitorder="little"), np.float32(-1), np.float32(1))


def _rotated_parts(values: Floats, rotation: int) -> list[tuple[Floats, int]]:
    """Return views (m, rotation) of the whole blocks and (l, 32) of the whole groups that remain, with their sizes."""
    end = values.size // rotation * rotation
    groups = values[end : end + (values.size - end) // 32 * 32]
    return [(values[:end].reshape(-1, rotation), rotation), (groups.reshape(-1, 32), 32)]


def _hadamard(blocks: Floats) -> Floats:
    """blocks (m, R) -> H x for each (m, R): steps of sums and differences, of elements 1, 2, 4 ... R/2 apart, in this
    order, each rounded to float32."""
    size, step = blocks.shape[1], 1
    while step < size:
        pairs = blocks.reshape(-1, size // (2 * step), 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        blocks = np.stack([first + second, first - second], axis=2).reshape(-1, size)
        step *= 2
    return blocks


def quantize_eden(
    values: Floats, size: int, levels_of_kind: tuple[int, ...]
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Rotated values (n,), in blocks of ``size`` -> bfloat16 bits of the scales (num_blocks,), codes' bits (n,)."""
    levels = np.array(levels_of_kind, np.int64)
    scales, codes = np.zeros(-(-values.size // size), np.uint16), np.zeros(values.size, np.uint8)
    from_level = (levels[1:] + levels[:-1]).astype(np.float32) / np.float32(92)
    for number in range(scales.size):
        block = values[number * size : (number + 1) * size]
        if not np.isfinite(block).all():
            scales[number] = 0x7FC0
            continue
        exponent = max(int(np.abs(block).max().view(np.uint32)) >> 23, 10)  # of float32, biased
        magnitudes = np.rint(np.abs(block) * np.float32(2.0 ** (136 - exponent))).astype(np.int64)
        power = np.float32(np.sum(magnitudes**2))
        rms = np.sqrt(power / np.float32(block.size))
        level = np.sum(magnitudes[:, None] >= np.rint(rms * from_level).astype(np.int64), axis=1)
        products, squares = np.float32(np.sum(magnitudes * levels[level])), np.float32(np.sum(levels[level] ** 2))
        if power == 0:
            continue
        scale = min(power / products, np.float32(1.25) * (products / squares)) * np.float32(2.0 ** (exponent - 136))
        if scale >= np.float32(2.0**-126):
            bits = int(np.float32(scale).view(np.uint32))
            scales[number] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            codes[number * size :][: block.size] = level + levels.size * np.signbit(block)
    return scales, codes
