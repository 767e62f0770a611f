"""Large results are written past the caches: the same bits at any address, and nothing beside them."""

import functools

import numpy as np
import pytest
from support.same_bits import assert_same_bits, empty, typed

from zcomm import _core, codec
from zcomm_bench import reference as ref

ISAS = codec.cpu_isas()
DTYPES = sorted(ref.DTYPES)


@pytest.fixture(scope="module")
def large():
    """bfloat16 values of more than 16 MiB, which are written past the caches, their wire, and what that decodes to."""
    size = 8 * 2**20 + 1009
    x = ref.narrow(np.random.default_rng(0).standard_normal(size, np.float32), "bfloat16")
    wire = ref.encode(x, "int4:128")
    return x, wire, ref.decode(wire, "int4:128", size, "bfloat16", wire_dtype="bfloat16")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("offset", [0, 62])
def test_large_results_at_any_address(large, isa, offset):
    x, wire, values = large
    room = empty("bfloat16", x.size + 128)
    first = (offset - room.ctypes.data) % 64 // 2
    out = room[first : first + x.size]
    for num_wires in (0, 1, 2):
        out[:] = 0
        if num_wires == 0:
            codec.decode(wire, "int4:128", typed(out), isa=isa)
        else:
            codec.decode_sum([(wire, "int4:128")] * num_wires, typed(out), factor=1 / num_wires, isa=isa)
        assert_same_bits(out, values, f"sum of {num_wires} wires" if num_wires else "decode")
    assert (room[:first] == 0xABAB).all() and (room[first + x.size :] == 0xABAB).all()


@functools.cache
def values_and_wire(dtype, format):
    """More than 16 MiB of values, with blocks that have a NaN or infinity in the first tile and in later ones."""
    size = 16 * 2**20 // ref.DTYPES[dtype].itemsize + 1009
    x = np.random.default_rng(1).standard_normal(size, np.float32)
    x[[5, 5000, size // 2, size - 1]] = np.nan, np.inf, -np.inf, np.nan
    narrow = ref.narrow(x, dtype)
    return narrow, ref.encode(narrow, format)


@pytest.mark.parametrize("format", ["int4:128", "int4:96", "int8:128"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 16, 32])
@pytest.mark.parametrize("isa", ISAS)
def test_large_wires_at_any_address(isa, offset, dtype, format):
    x, expected = values_and_wire(dtype, format)
    room = np.full(expected.size + 192, 0xAB, np.uint8)
    first = (offset - room.ctypes.data) % 64 + 64
    _core.encode(codec.view_of(typed(x), "values"), format, room[first:].ctypes.data, isa)
    assert_same_bits(room[first : first + expected.size], expected, "wire")
    assert (room[:first] == 0xAB).all() and (room[first + expected.size :] == 0xAB).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_outputs_that_go_past_the_caches(isa, dtype):
    size = 16 * 2**20 // ref.DTYPES[dtype].itemsize + 1001
    x = ref.narrow(np.random.default_rng(4).standard_normal(size, np.float32), dtype)
    wire = codec.encode(typed(x), "int8:128")
    out = empty(dtype, size + 1)
    guard = out[:1].copy()
    codec.decode(wire, "int8:128", typed(out[1:]), isa=isa)  # not aligned to anything but an element
    expected = ref.decode(wire, "int8:128", size, dtype)
    assert_same_bits(out[1:], expected, "decode")
    codec.decode_sum([(wire, "int8:128"), (typed(out[1:]), "exact")], typed(out[1:]), factor=0.5, isa=isa)
    assert_same_bits(out[1:], expected, "decode_sum")
    assert_same_bits(out[:1], guard, "before")
