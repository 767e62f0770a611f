"""The executable specification: what it promises about numbers, and bytes that must not change unnoticed.

The golden file is written by `python tests/python/codec/test_reference.py --regenerate`.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zcomm_bench import reference as ref

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/wires.json"
FORMATS = ["exact", "bf16", "int8:32", "int8:64", "int4:32", "int4:64", "fp8:32", "int4:32:stochastic"]
FORMATS += ["int8:64:stochastic", "eden2:32", "eden3:32", "eden4:64"]
SEED, FIRST_ELEMENT = 0x0123456789ABCDEF, 2**35 + 64  # of the golden wires
CODED = [name for name, kind in ref.KINDS.items() if kind.max_code and not kind.levels]
INTEGERS = [name for name in CODED if ref.KINDS[name].stochastic]
UNIT_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def test_formats_parse_and_others_are_named():
    assert ref.parse_format("int8:256") == ref.Format("int8", 256)
    assert ref.parse_format("int4:32:stochastic") == ref.Format("int4", 32, stochastic=True)
    assert ref.parse_format("fp8:64") == ref.Format("fp8", 64)
    assert [ref.parse_format(text).rotation for text in ("eden3:512", "int8:512")] == [512, 0]
    for text in [
        "",
        "int8",
        "int8:0",
        "int8:16",
        "int8:33",
        "int8:4128",
        "int8:+32",
        "int8:032",
        "int8: 32",
        "fp4:32",
        "int2:32",
        "int8:32:hadamard",
        "eden2:96",
        "eden2:1024",
    ]:
        with pytest.raises(
            ValueError,
            match=r"expected exact, bf16, int8:B, int4:B, fp8:B, eden2:B, eden3:B or eden4:B, got '.*'",
        ):
            ref.parse_format(text)
    for text in [
        "exact:stochastic",
        "bf16:stochastic",
        "int8:stochastic",
        "int8:32:stochastic:stochastic",
        "int8:32:stochastic:",
    ]:
        with pytest.raises(ValueError, match=":stochastic may follow B of int8 and int4"):
            ref.parse_format(text)
    with pytest.raises(ValueError, match="expected fp8 without :stochastic, got 'fp8:32:stochastic'"):
        ref.parse_format("fp8:32:stochastic")
    with pytest.raises(ValueError, match="expected eden2 without :stochastic, got 'eden2:32:stochastic'"):
        ref.parse_format("eden2:32:stochastic")


def test_wire_layout():
    assert ref.wire_layout("int4:32", "float32", 0) == ref.Layout(0, 0, 0, 0)
    assert ref.wire_layout("int4:32", "bfloat16", 33) == ref.Layout(2, 16, 17, 48)
    assert ref.wire_layout("eden3:32", "float32", 42) == ref.Layout(2, 16, 16, 32)
    assert ref.wire_layout("eden3:32", "float32", 43) == ref.Layout(2, 16, 17, 48)
    assert ref.wire_layout("eden2:32", "float32", 65) == ref.Layout(3, 16, 17, 48)
    assert ref.wire_layout("eden3:32", "float32", 33) == ref.Layout(2, 16, 13, 32)
    assert ref.wire_layout("fp8:32", "float32", 33) == ref.Layout(2, 16, 33, 64)
    assert ref.wire_layout("int8:128", "float32", 1153) == ref.Layout(10, 32, 1153, 1200)
    assert ref.wire_layout("exact", "float16", 9) == ref.Layout(0, 0, 18, 32)
    assert ref.wire_layout("bf16", "float32", 8) == ref.Layout(0, 0, 16, 16)


def wire_scales(wire, format, dtype, size):
    """The scale of each element, in float64."""
    layout = ref.wire_layout(format, dtype, size)
    scales = ref.widen(wire[: 2 * layout.num_blocks].view(np.uint16)).astype(np.float64)
    return scales.repeat(ref.parse_format(format).block_size)[:size]


def quantization_bound(values, scales, format):
    """|x - x'| of elements that are not rotated, in exact arithmetic."""
    if format.startswith("fp8"):
        return np.maximum(np.abs(values) / 16, scales / 1024)
    return scales * (1.0 if "stochastic" in format else 0.5)


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(CODED),
    block_size=st.sampled_from([32, 96, 128]),
    exponent=st.integers(-150, 127),
    dtype=st.sampled_from(sorted(ref.DTYPES)),
    stochastic=st.booleans(),
)
def test_the_error_of_one_element_is_bounded(seed, kind, block_size, exponent, dtype, stochastic):
    """|x - x'| <= q + absmax * (2^-23 + 2^-40) + rounding of the output, where q is half a scale for integers.

    The reciprocal of the scale and x times it are each off by 2^-24 of their value, so the scaled x by 2^-23 and a
    little of at most max_code; the product of code and scale is exact. bfloat16 and float16 round it once more.
    """
    values = np.random.default_rng(seed).uniform(-1, 1, 3 * block_size + 5) * 2.0**exponent
    x = ref.narrow(np.clip(values, -ref.LARGEST_FINITE[dtype], ref.LARGEST_FINITE[dtype]).astype(np.float32), dtype)
    format = f"{kind}:{block_size}" + (":stochastic" if stochastic and kind != "fp8" else "")
    wire = ref.encode(x, format, seed=seed)
    scales = wire_scales(wire, format, dtype, x.size)
    exact = ref.widen(x).astype(np.float64)
    decoded = ref.widen(ref.decode(wire, format, x.size, dtype)).astype(np.float64)
    max_code = ref.KINDS[kind].max_code
    bound = quantization_bound(exact, scales, format) + scales * max_code * (2.0**-23 + 2.0**-40)
    bound += np.abs(decoded) * UNIT_ROUNDOFF[dtype] + (2.0**-25 if dtype == "float16" else 0)
    assert (np.abs(exact - decoded) <= bound).all()
    absmax = np.abs(exact).max() if x.size else 0.0
    assert scales.max() <= max(absmax / max_code * (1 + 2.0**-7), 2.0**-126)


def test_philox_gives_the_numbers_of_its_authors():
    """The known answers that come with Random123."""
    for counter, key, expected in [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]:
        words = np.array([[int(word, 16) for word in counter.split()]], np.uint32)
        low, high = (int(word, 16) for word in key.split())
        assert " ".join(f"{word:08x}" for word in ref.philox(words, high << 32 | low)[0]) == expected


@pytest.mark.parametrize("kind", INTEGERS)
def test_stochastic_rounding_has_no_bias(kind):
    """Codes of c + f at scale 1: of 2^18, 2^18 f are expected above c, with a standard deviation of sqrt(2^18 f (1 -
    f)). The bound is 6 of these, a false alarm of 2e-9 for each of the 4 x 9 numbers, 1e-7 in all. The seed is fixed,
    so a false alarm would have shown when this was written. 16 bits cannot resolve less than 2^-16."""
    size, max_code = 2**18, ref.KINDS[kind].max_code
    for c in {-max_code, 0, max_code - 1}:
        for f in (2.0**-10, 0.25, 0.7):
            x = np.full(size, c + f, np.float32)
            x[::64] = max_code  # makes the scale 1
            decoded = ref.decode(
                ref.encode(x, f"{kind}:64:stochastic", seed=11), f"{kind}:64:stochastic", size, "float32"
            )
            free = np.arange(size) % 64 != 0
            assert set(np.unique(decoded[free])) == {c, c + 1} and (decoded[~free] == max_code).all()
            ups, f = (decoded[free] == c + 1).sum(), float(x[1] - c)
            assert abs(ups - f * free.sum()) <= 6 * np.sqrt(free.sum() * f * (1 - f)) + 2.0**-16 * size


def test_seeds_and_elements_are_independent():
    """The correlation of 2^20 pairs of offsets is below 6 / 2^10: a false alarm has a probability of 2e-9 each."""
    size = 2**20
    plain = ref.random_offsets(5, 0, size)
    assert plain.min() > -0.5 and plain.max() < 0.5 and np.unique(plain).size > 60000
    others = [ref.random_offsets(seed, first, size) for seed, first in ((6, 0), (5 + 2**32, 0), (5, size), (5, 2**36))]
    others += [np.roll(plain, shift) for shift in (1, 2, 8)]
    for other in others:
        assert abs(np.corrcoef(plain, other)[0, 1]) < 6 / 2**10


def test_pieces_of_a_message_have_the_codes_of_the_whole():
    x = np.random.default_rng(2).standard_normal(1000).astype(np.float32)
    format = "int4:32:stochastic"
    whole = ref.decode(ref.encode(x, format, seed=3, first_element=640), format, x.size, "float32")
    pieces = []
    for begin, end in ((0, 320), (320, 352), (352, 1000)):
        wire = ref.encode(x[begin:end], format, seed=3, first_element=640 + begin)
        pieces.append(ref.decode(wire, format, end - begin, "float32"))
    assert np.array_equal(np.concatenate(pieces), whole)
    assert not np.array_equal(ref.decode(ref.encode(x, format, seed=3), format, x.size, "float32"), whole)


def test_rotated_wires_are_added_first_and_factors_to_each():
    rng = np.random.default_rng(4)
    arrays = [rng.standard_normal(70).astype(np.float32) for _ in range(4)]
    formats = ["exact", "eden3:32", "bf16", "eden4:32"]
    factors = [-1.0, 0.3, 1.0, 2.5]
    wires = [
        (ref.encode(x, format), format, factor) for x, format, factor in zip(arrays, formats, factors, strict=True)
    ]

    def rotated(i):  # the terms of wire i
        return ref._terms(wires[i][0], formats[i], "float32", 70, factors[i])

    total = ref.rotate_back(rotated(1) + rotated(3), 32) + -arrays[0]
    total = total + ref.widen(ref.narrow(arrays[2], "bfloat16"))
    assert np.array_equal(ref.decode_sum(wires, 70, "float32"), total)
    assert np.array_equal(ref.decode_sum_encode(wires, 70, "eden2:32"), ref.encode(total, "eden2:32"))


def test_a_factor_makes_no_codes_infinite():
    x = np.array([ref.LARGEST_FINITE["float32"], 0, -1], np.float32)
    wire = ref.encode(x, "int8:32")
    assert np.array_equal(ref.decode_sum([(wire, "int8:32", 4.0)], 3, "float32"), [x[0], 0, 0])
    nan = ref.encode(np.array([np.nan], np.float32), "int8:32")
    assert np.isnan(ref.decode_sum([(nan, "int8:32", 0.0)], 1, "float32"))
    assert not np.signbit(ref.decode_sum([(wire, "int8:32", -1.0)], 3, "float32")[1])


SCALES = st.integers(0x0080, 0x7BFF)  # the float32 bits of normal bfloat16 numbers, shifted
POWERS_OF_TWO = st.integers(1, 246).map(lambda exponent: exponent << 7)


@given(
    seed=st.integers(0, 2**32 - 1),
    format=st.one_of(
        st.tuples(st.sampled_from(INTEGERS).map("{}:32".format), SCALES),
        st.tuples(
            st.sampled_from([kind for kind in INTEGERS if kind != "int8"]).map("{}:32:stochastic".format), SCALES
        ),
        st.tuples(st.just("int8:32:stochastic"), POWERS_OF_TWO),
    ),
)
@example(seed=0, format=("int8:32:stochastic", 246 << 7))
def test_multiples_of_a_bfloat16_scale_are_exact(seed, format):
    format, scale = format
    limit = ref.KINDS[format.split(":")[0]].max_code
    codes = np.random.default_rng(seed).integers(-limit, limit + 1, 64)
    codes[[0, 63]] = limit
    x = codes.astype(np.float32) * ref.widen(np.array([scale], np.uint16))
    decoded = ref.decode(ref.encode(x, format, seed=seed), format, 64, "float32")
    assert np.array_equal(decoded, x)


def test_a_multiple_of_a_scale_may_be_one_code_off_as_stochastic_int8():
    # 1 / scale is not exact: a code of 7 bits is not always an integer again.
    x = np.random.default_rng(23011).integers(-127, 128, 64).astype(np.float32)
    x[[0, 63]] = 127
    scale = ref.widen(np.array([227], np.uint16))
    decoded = ref.decode(ref.encode(x * scale, "int8:32:stochastic", seed=23011), "int8:32:stochastic", 64, "float32")
    assert sorted(set(np.abs(decoded / scale - x))) == [0, 1]


@pytest.mark.parametrize("dtype", sorted(ref.DTYPES))
@pytest.mark.parametrize("format", ["int8:32", "int4:32:stochastic", "fp8:32", "eden2:32", "eden3:32"])
@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_special_value_makes_its_block_nan(dtype, format, special):
    x = np.ones(96, np.float32)
    x[40] = special
    decoded = ref.decode(ref.encode(ref.narrow(x, dtype), format), format, 96, dtype)
    assert set(decoded[32:64].view(ref.DTYPES[dtype].str.replace("f", "u")).tolist()) == {
        {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[dtype]
    }
    assert np.isfinite(ref.widen(decoded))[np.r_[0:32, 64:96]].all()


@pytest.mark.parametrize("dtype", sorted(ref.DTYPES))
@pytest.mark.parametrize("format", ["exact", "int8:32", "int4:32", "fp8:32"])
def test_the_largest_values_stay_finite(dtype, format):
    largest = ref.narrow(np.array([ref.LARGEST_FINITE[dtype]] * 3, np.float32), dtype)
    decoded = ref.decode(ref.encode(largest, format), format, 3, dtype)
    assert np.isfinite(ref.widen(decoded)).all()
    assert (decoded == largest).all() or format != "exact"
    assert np.allclose(ref.widen(decoded).astype(np.float64), ref.LARGEST_FINITE[dtype], rtol=2.0**-7)


def test_a_cast_to_bfloat16_overflows_as_any_cast_does():
    largest = np.array([ref.LARGEST_FINITE["float32"]], np.float32)
    assert np.isinf(ref.decode(ref.encode(largest, "bf16"), "bf16", 1, "float32"))
    finite = np.array([ref.LARGEST_FINITE["bfloat16"]], np.float32)
    assert ref.decode(ref.encode(finite, "bf16"), "bf16", 1, "float16") == 65504


def test_zeros_lose_their_sign_and_have_no_special_scale():
    wire = ref.encode(np.array([0.0, -0.0], np.float32), "int8:32")
    assert wire.tobytes().hex() == "8000" + 30 * "00"
    assert ref.decode(wire, "int8:32", 2, "float32").tobytes() == bytes(8)


def test_a_sum_is_added_in_order_and_rounded_once():
    big, small = np.array([2.0**24], np.float32), np.array([1.0], np.float32)
    wires = [(values.view(np.uint8), "exact") for values in (big, small, small)]
    assert ref.decode_sum(wires, 1, "float32") == 2.0**24  # each 1 is a tie that goes to even
    assert ref.decode_sum(wires[::-1], 1, "float32") == 2.0**24 + 2
    assert np.isinf(ref.decode_sum(wires, 1, "float16"))


def test_the_worked_example_of_the_documentation():
    text = (ROOT / "docs/wire_format.md").read_text()
    values, wire, decoded = (re.search(rf"^ *{name}: *(.*)$", text, re.M)[1] for name in ("values", "wire", "decoded"))
    x = np.array(values.split(), np.float32)
    assert ref.encode(x, "int8:32").tobytes() == bytes.fromhex(wire)
    assert ref.decode(ref.encode(x, "int8:32"), "int8:32", x.size, "float32").tolist() == [
        float(value) for value in decoded.split()
    ]


def golden_cases() -> list[dict[str, str | int]]:
    """One wire of 70 values per format and dtype, and what it decodes to: magnitudes from tiny to huge by block, then a
    block with a NaN."""
    rng = np.random.default_rng(20240229)
    x = rng.standard_normal(70).astype(np.float32)
    x[:32] *= np.float32(2.0**-20)
    x[32:40] *= np.float32(1000)
    x[64:] = [1.0, -0.0, 2.0, np.nan, np.inf, -3.0]
    cases = []
    for dtype in ref.DTYPES:
        values = ref.narrow(x, dtype)
        for format in FORMATS:
            wire = ref.encode(values, format, seed=SEED, first_element=FIRST_ELEMENT)
            case: dict[str, str | int] = {
                "format": format,
                "dtype": dtype,
                "seed": SEED,
                "first_element": FIRST_ELEMENT,
            }
            case |= {"values": values.tobytes().hex(), "wire": wire.tobytes().hex()}
            for out in ref.DTYPES:
                case[f"as {out}"] = ref.decode(wire, format, x.size, out, wire_dtype=dtype).tobytes().hex()
            cases.append(case)
    return cases


def test_golden_wires():
    assert golden_cases() == json.loads(GOLDEN.read_text())


if __name__ == "__main__" and sys.argv[1:] == ["--regenerate"]:
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden_cases(), indent=1) + "\n")
