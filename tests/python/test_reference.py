"""The executable specification: what it promises about numbers, and bytes that must not change unnoticed.

The golden file is written by `python tests/python/test_reference.py --regenerate`.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcomm import reference as ref

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/wires.json"
FORMATS = ["exact", "bf16", "int8:32", "int8:64", "int4:32", "int4:64"]
UNIT_ROUNDOFF = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def test_formats_parse_and_others_are_named():
    assert ref.parse_format("int8:256") == ref.Format("int8", 256)
    for text in ["", "int8", "int8:0", "int8:16", "int8:33", "int8:4128", "int8:+32", "int8:032", "int8: 32", "fp8:32"]:
        with pytest.raises(ValueError, match=r"got '.*', expected exact, bf16, int8:B or int4:B"):
            ref.parse_format(text)


def test_wire_layout():
    assert ref.wire_layout("int4:32", "float32", 0) == ref.Layout(0, 0, 0, 0)
    assert ref.wire_layout("int4:32", "bfloat16", 33) == ref.Layout(2, 16, 17, 48)
    assert ref.wire_layout("int8:128", "float32", 1153) == ref.Layout(10, 32, 1153, 1200)
    assert ref.wire_layout("exact", "float16", 9) == ref.Layout(0, 0, 18, 32)
    assert ref.wire_layout("bf16", "float32", 8) == ref.Layout(0, 0, 16, 16)


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["int8", "int4"]),
    block_size=st.sampled_from([32, 96, 128]),
    exponent=st.integers(-150, 127),
    dtype=st.sampled_from(sorted(ref.DTYPES)),
)
def test_error_is_at_most_half_a_scale(seed, kind, block_size, exponent, dtype):
    """|x - x'| <= scale / 2 + absmax * (2^-23 + 2^-40) + rounding of the output.

    The reciprocal of the scale and x times it are each off by 2^-24 of their value, so the scaled x by 2^-23 and a
    little of at most max_code; the product of code and scale is exact. bfloat16 and float16 round it once more.
    """
    values = np.random.default_rng(seed).uniform(-1, 1, 3 * block_size + 5) * 2.0**exponent
    x = ref.narrow(np.clip(values, -ref.LARGEST_FINITE[dtype], ref.LARGEST_FINITE[dtype]).astype(np.float32), dtype)
    wire = ref.encode(x, f"{kind}:{block_size}")
    layout = ref.wire_layout(f"{kind}:{block_size}", dtype, x.size)
    scales = ref.widen(wire[: 2 * layout.num_blocks].view(np.uint16)).astype(np.float64).repeat(block_size)[: x.size]
    exact = ref.widen(x).astype(np.float64)
    decoded = ref.widen(ref.decode(wire, f"{kind}:{block_size}", x.size, dtype)).astype(np.float64)
    bound = scales * (0.5 + ref.MAX_CODE[kind] * (2.0**-23 + 2.0**-40))
    bound += np.abs(decoded) * UNIT_ROUNDOFF[dtype] + (2.0**-25 if dtype == "float16" else 0)
    assert (np.abs(exact - decoded) <= bound).all()
    absmax = np.abs(exact).max() if x.size else 0.0
    assert scales.max() <= max(absmax / ref.MAX_CODE[kind] * (1 + 2.0**-7), 2.0**-126)


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["int8", "int4"]),
    scale=st.integers(0x0080, 0x7BFF).map(lambda bits: np.uint16(bits)),
)
def test_multiples_of_a_bfloat16_scale_are_exact(seed, kind, scale):
    limit = ref.MAX_CODE[kind]
    codes = np.random.default_rng(seed).integers(-limit, limit + 1, 64)
    codes[[0, 63]] = limit
    x = codes.astype(np.float32) * ref.widen(np.array([scale]))
    decoded = ref.decode(ref.encode(x, f"{kind}:32"), f"{kind}:32", 64, "float32")
    assert np.array_equal(decoded, x)


@pytest.mark.parametrize("dtype", sorted(ref.DTYPES))
@pytest.mark.parametrize("format", ["int8:32", "int4:32"])
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
@pytest.mark.parametrize("format", ["exact", "int8:32", "int4:32"])
def test_the_largest_values_stay_finite(dtype, format):
    largest = ref.narrow(np.array([ref.LARGEST_FINITE[dtype]] * 3, np.float32), dtype)
    decoded = ref.decode(ref.encode(largest, format), format, 3, dtype)
    assert np.isfinite(ref.widen(decoded)).all()
    assert (decoded == largest).all() or format in ("int8:32", "int4:32")
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
            wire = ref.encode(values, format)
            case = {"format": format, "dtype": dtype, "values": values.tobytes().hex(), "wire": wire.tobytes().hex()}
            for out in ref.DTYPES:
                case[f"as {out}"] = ref.decode(wire, format, x.size, out, wire_dtype=dtype).tobytes().hex()
            cases.append(case)
    return cases


def test_golden_wires():
    assert golden_cases() == json.loads(GOLDEN.read_text())


if __name__ == "__main__" and sys.argv[1:] == ["--regenerate"]:
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden_cases(), indent=1) + "\n")
