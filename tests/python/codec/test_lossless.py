"""Every instruction set writes the bytes of the reference for a lossless difference, and reads them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zcomm import codec
from zcomm_bench import lossless_reference as ref

ISAS = codec.cpu_isas()
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "byte_pairs": np.uint8}
CHANGES = ["nothing", "few", "units", "by exponent", "signs", "special values", "bytes", "few bytes", "everything"]
SPECIAL = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7C00, 0xFE01, 1], np.uint16)


def weights_and_change(rng, n, change):
    base = (rng.standard_normal(n) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)
    if change == "nothing":
        return base, base.copy()
    if change == "everything":
        return base, rng.integers(0, 65536, n, np.uint16)
    if change == "signs":
        return base, base ^ np.where(rng.random(n) < 0.1, 0x8000, 0).astype(np.uint16)
    if change == "special values":
        return base, np.where(rng.random(n) < 0.3, rng.choice(SPECIAL, n), base)
    if "bytes" in change:
        steps = np.rint(rng.standard_normal(2 * n) * rng.choice([0.3, 1, 40])).astype(np.int64)
        steps *= rng.random(2 * n) < (0.02 if change == "few bytes" else 1)
        return base, (base.view(np.uint8) + steps).astype(np.uint8).view(np.uint16)
    width = {"few": 1, "units": 12}.get(change) or 1 << np.clip(126 - ref._exponents(base, "bfloat16"), 0, 9)
    step = rng.integers(-width, np.add(width, 1), n)
    if change == "few":
        step *= rng.random(n) < 0.02
    return base, (base + step).astype(np.uint16)


@pytest.mark.parametrize(("dtype", "pattern", "c"), [("bfloat16", 0x3C00, 127), ("byte_pairs", 0x1010, 15)])
@pytest.mark.parametrize("r", [2, 3, 4, 5])
def test_differences_beyond_a_byte_which_no_encoder_writes_are_modulo_256(dtype, pattern, c, r):
    base = np.full(2048, pattern, np.uint16)
    head, block_flags, plane = np.array([c, 0, 0, 0]), np.zeros(4), np.zeros(256)
    plane[0] = 1  # of the first value; all have 7 low bits
    planes = [r > j for j in range(1, r + 1)]
    tile = ref._padded(np.concatenate([head, block_flags, plane, planes, np.zeros(1792)]).astype(np.uint8), 4)
    body = ref._padded(np.concatenate([np.array([tile.size // 4 % 256, tile.size // 1024, 0, 0], np.uint8), tile]), 16)
    expected = ref.decode(body, base, dtype)
    for isa in ISAS:
        result, _ = codec.decode_difference(body, base.view(DTYPES[dtype]).copy(), isa=isa)
        assert np.array_equal(result.view(np.uint16), expected), isa


@given(
    n=st.sampled_from([0, 1, 2, 63, 2047, 2048, 2049, 5000]) | st.integers(0, 5000),
    change=st.sampled_from(CHANGES),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
)
@example(n=2048 * 34 + 5, change="by exponent", dtype="bfloat16", seed=0)
@example(n=2048 * 34 + 5, change="bytes", dtype="byte_pairs", seed=0)
def test_every_instruction_set_writes_and_reads_the_bytes_of_the_reference(n, change, dtype, seed):
    base, values = weights_and_change(np.random.default_rng(seed), n, change)
    body = ref.encode(values, base, dtype)
    assert np.array_equal(ref.decode(body, base, dtype), values)
    for isa in ISAS:
        kept = base.view(DTYPES[dtype]).copy()
        written, hash_of_values = codec.encode_difference(values.view(DTYPES[dtype]), kept, isa=isa)
        assert np.array_equal(written, body), isa
        assert np.array_equal(kept.view(np.uint16), values), isa
        assert hash_of_values == ref.hash_of(values), isa
        result, result_hash = codec.decode_difference(written, base.view(DTYPES[dtype]).copy(), isa=isa)
        assert np.array_equal(result.view(np.uint16), values), isa
        assert result_hash == hash_of_values, isa


def test_a_known_tile():
    base = np.full(2048, 0x3C00, np.uint16)
    values = base.copy()
    values[[3, 100, 101, 2047]] = 0x3C01, 0x3BFF, 0x3C02, 0x7FC0
    tile = "76000000 03000080 011080 083080 0d 06 03 02 01 c07f 000000"
    assert ref.encode(values, base, "bfloat16").tobytes().hex() == "06000000" + tile.replace(" ", "") + "00000000"


def test_a_known_tile_of_byte_pairs():
    base = np.full(2048, 0x1010, np.uint16)
    values = base.copy()
    values[[3, 100, 101, 2047]] = 0x1011, 0x0F10, 0x1210, 0x1111  # z: 3, 2, 8, an escape
    tile = "02000000 03000080 011080 083080 0f 0d 06 03 03 1012 1111 0000000000"
    assert ref.encode(values, base, "byte_pairs").tobytes().hex() == "06000000" + tile.replace(" ", "")


def test_what_no_encoder_wrote_is_refused():
    base, values = weights_and_change(np.random.default_rng(0), 5000, "units")
    body = ref.encode(values, base, "bfloat16")
    for damaged in (body[:-16], body[:4], np.concatenate([body, body])):
        with pytest.raises(ValueError, match="expected one that an encoder wrote"):
            ref.decode(damaged, base, "bfloat16")
        with pytest.raises(RuntimeError, match="expected what an encoder wrote for 5000 values"):
            codec.decode_difference(damaged, base.view(ml_dtypes.bfloat16).copy())


def test_wrong_arguments_are_refused_by_name():
    values = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=r"values: expected bfloat16, float16 or values of 8 bits, .* got float32"):
        codec.encode_difference(values, values.copy())
    halves = values.astype(np.float16)
    with pytest.raises(ValueError, match="base: expected 8 elements of float16 as in values, got 9"):
        codec.encode_difference(halves, np.zeros(9, np.float16))
    whole = np.zeros(20, np.float16)
    for base in (whole[:10], whole[3:13]):
        with pytest.raises(ValueError, match="base: expected memory apart from values, got some that overlaps it"):
            codec.encode_difference(whole[:10], base)
    with pytest.raises(TypeError, match="body: expected dtype uint8, got float16"):
        codec.decode_difference(halves, halves)


def test_bits_per_weight_follow_the_learning_rate():
    """Weights of deviation 0.02, updates of 0.3 times the rate: what a code with these rules needs, to 5 %."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(2048 * 64).astype(np.float32) * np.float32(0.02)
    base = weights.astype(ml_dtypes.bfloat16)
    for rate, expected in {1e-3: 4.84, 3e-4: 3.43, 1e-4: 2.04, 3e-5: 1.17, 1e-5: 0.68, 1e-6: 0.20, 0: 0.008}.items():
        update = rng.standard_normal(weights.size).astype(np.float32) * np.float32(0.3 * rate)
        body, _ = codec.encode_difference((weights + update).astype(ml_dtypes.bfloat16), base.copy())
        assert 8 * body.size / weights.size <= 1.05 * expected, rate
