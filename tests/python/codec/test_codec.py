"""Every instruction set gives the bits of the reference; wrong arguments are refused by name."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codec_values import (
    DTYPES,
    EDEN,
    FIRST_ELEMENTS,
    FORMATS,
    OTHERS,
    PLAIN,
    SEEDS,
    sizes,
    value_arrays,
)
from support.same_bits import assert_same_bits, empty, typed

from zcomm import _core, codec
from zcomm_bench import reference as ref

ISAS = codec.cpu_isas()


@settings(max_examples=300, deadline=None)
@given(
    data=st.data(),
    format=st.sampled_from(PLAIN) | st.sampled_from(OTHERS) | st.sampled_from(EDEN),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    seed=SEEDS,
    first=FIRST_ELEMENTS,
)
def test_encode_and_decode_give_the_reference_bits(data, format, dtype, out, seed, first):
    size = data.draw(sizes(format))
    x = data.draw(value_arrays(dtype, size))
    wire = ref.encode(x, format, seed=seed, first_element=first)
    values = ref.decode(wire, format, size, out, wire_dtype=dtype)
    for isa in ISAS:
        actual = codec.encode(typed(x), format, seed=seed, first_element=first, isa=isa)
        assert_same_bits(actual, wire, f"wire of {format} from {dtype}, {isa}")
        decoded = empty(out, size)
        view = codec.view_of(typed(decoded), "out")
        _core.decode((wire.ctypes.data, format, dtype), view, isa)
        assert_same_bits(decoded, values, f"{format} of {dtype} as {out}, {isa}")


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    formats=st.lists(st.sampled_from(PLAIN) | st.sampled_from(FORMATS) | st.sampled_from(EDEN), min_size=1, max_size=5)
    | st.builds(lambda format, num_wires: [format] * num_wires, st.sampled_from(FORMATS + EDEN), st.integers(2, 6)),
    dtype=st.sampled_from(DTYPES),
    out=st.sampled_from(DTYPES),
    target=st.sampled_from(FORMATS + EDEN),
    factor=st.sampled_from([1.0, 0.25, 1 / 3, -0.0, 1e-38, 3e38]),
    factors=st.sampled_from([[1.0], [1.0, 0.9, -1.0, 1e-30, -3e20]]),
    seed=SEEDS,
    first=FIRST_ELEMENTS,
)
def test_sums_give_the_reference_bits(data, formats, dtype, out, target, factor, factors, seed, first):
    if any("eden" in format for format in formats):  # whose sums are encoded to blocks of powers of two alone
        target = data.draw(st.sampled_from(["exact", "int8:128", "fp8:4096", "int4:32:stochastic", *EDEN]))
    size = data.draw(sizes(target))
    wires = [
        (ref.encode(data.draw(value_arrays(dtype, size)), format), format, data.draw(st.sampled_from(factors)))
        for format in formats
    ]
    sources = [(wire.ctypes.data, format, dtype, of_wire) for wire, format, of_wire in wires]
    rounding = {"seed": seed, "first_element": first}
    expected = ref.decode_sum(wires, size, out, factor=factor, wire_dtype=dtype)
    expected_wire = ref.decode_sum_encode(wires, size, target, wire_dtype=dtype, **rounding)
    for isa in ISAS:
        total = empty(out, size)
        _core.decode_sum(sources, factor, codec.view_of(typed(total), "out"), isa)
        assert_same_bits(total, expected, f"sum of {formats} of {dtype} as {out}, {isa}")
        encoded = codec.decode_sum_encode(wires, size, target, dtype=dtype, isa=isa, **rounding)
        assert_same_bits(encoded, expected_wire, f"sum of {formats} of {dtype} as {target}, {isa}")


@pytest.mark.parametrize("format", ["int8:32", "int4:32", "fp8:32", "eden2:32", "eden3:32", "eden4:32"])
def test_what_no_encoder_writes_gives_the_reference_bits(format):
    """Scales of any sign, infinite ones and all near the limits of a type, with any codes."""
    near_limits = np.arange(0x7A00, 0x7F81)
    scales = np.concatenate([np.arange(0, 0x10000, 13), near_limits, near_limits | 0x8000, [0x4400, 0xFF80]])
    size = 32 * scales.size
    layout = ref.wire_layout(format, "float32", size)
    wire = np.random.default_rng(0).integers(0, 256, layout.num_bytes, np.uint8)
    wire[: 2 * layout.num_blocks] = scales.astype(np.uint16).view(np.uint8)
    for out in DTYPES:
        expected = ref.decode(wire, format, size, out)
        for isa in ISAS:
            values = empty(out, size)
            _core.decode((wire.ctypes.data, format, "float32"), codec.view_of(typed(values), "out"), isa)
            assert_same_bits(values, expected, f"{format} as {out}, {isa}")
        for factors in [(1.0, 1.0), (1.0, 0.75)]:
            expected_sum = ref.decode_sum([(wire, format, factor) for factor in factors], size, out)
            sources = [(wire.ctypes.data, format, "float32", factor) for factor in factors]
            for isa in ISAS:
                _core.decode_sum(sources, 1.0, codec.view_of(typed(values), "out"), isa)
                assert_same_bits(values, expected_sum, f"sum of {format} as {out}, {factors}, {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("factor", [0.25, -0.0])
def test_sums_beyond_the_largest_float32(isa, out, factor):
    x = np.full(160, 2.0**127, np.float32)
    wires = [(ref.encode(x, "int8:128"), "int8:128", 1.0)] * 4
    total = empty(out, x.size)
    codec.decode_sum([wire[:2] for wire in wires], typed(total), factor=factor, isa=isa)
    assert_same_bits(total, ref.decode_sum(wires, x.size, out, factor=factor), f"infinity times {factor}")


@pytest.mark.parametrize("isa", ISAS)
def test_every_float16_and_bfloat16_pattern(isa):
    patterns = np.arange(2**16, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        x = patterns.view(ref.DTYPES[dtype])
        for out in DTYPES:
            decoded = empty(out, x.size)
            _core.decode((x.ctypes.data, "exact", dtype), codec.view_of(typed(decoded), "out"), isa)
            assert_same_bits(decoded, ref.decode(x.view(np.uint8), "exact", x.size, out, wire_dtype=dtype), dtype)


@pytest.mark.parametrize("isa", ISAS)
def test_rounding_of_every_float32_exponent_and_tie(isa):
    exponents = np.arange(2**9, dtype=np.uint32) << 23
    fractions = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFFFF], np.uint32)
    x = (exponents[:, None] | fractions).reshape(-1).view(np.float32)
    for out in DTYPES:
        for source in ("decode", "decode_sum"):
            rounded = empty(out, x.size)
            if source == "decode":
                _core.decode((x.ctypes.data, "exact", "float32"), codec.view_of(typed(rounded), "out"), isa)
                expected = ref.decode(x.view(np.uint8), "exact", x.size, out, wire_dtype="float32")
            else:
                codec.decode_sum([(x, "exact")], typed(rounded), isa=isa)
                expected = ref.decode_sum([(x.view(np.uint8), "exact")], x.size, out)
            assert_same_bits(rounded, expected, f"{source} as {out}")


@pytest.mark.parametrize("isa", ISAS)
def test_golden_wires(isa):
    for case in json.loads((Path(__file__).parents[2] / "golden/wires.json").read_text()):
        x = np.frombuffer(bytes.fromhex(case["values"]), ref.DTYPES[case["dtype"]])
        rounding = {name: case[name] for name in ("seed", "first_element")}
        wire = codec.encode(typed(x), case["format"], isa=isa, **rounding)
        assert wire.tobytes().hex() == case["wire"], case["format"]


@pytest.mark.parametrize("format", ["int8:128", "eden4:32", "fp8:64", "int4:256"])
def test_a_row_of_whole_blocks_has_the_same_bits_in_any_tensor(format):
    rows = np.random.default_rng(4).standard_normal((9, 256)).astype(np.float32)
    whole = codec.decode(codec.encode(rows, format), format, np.empty_like(rows))
    for row, got in zip(rows, whole, strict=True):
        assert codec.decode(codec.encode(row, format), format, np.empty_like(row)).tobytes() == got.tobytes()


@pytest.mark.parametrize(
    "format",
    [
        "exact",
        "bf16",
        "int8:32",
        "int8:4096",
        "int4:96",
        "int4:96:stochastic",
        "fp8:32",
        "eden3:64",
    ],
)
def test_threads_do_not_change_bits(format):
    x = np.random.default_rng(3).standard_normal(300_001).astype(np.float32)

    def everything():
        wire = codec.encode(x, format)
        total = codec.decode_sum([(wire, format), (x, "exact")], np.empty_like(x), factor=0.5)
        again = codec.decode_sum_encode([(wire, format)] * 2, x.size, "int4:128")
        return (
            wire.tobytes() + codec.decode(wire, format, np.empty_like(x)).tobytes() + total.tobytes() + again.tobytes()
        )

    alone = everything()
    try:
        for num_threads in (2, 3):
            _core.set_num_threads(num_threads)
            assert everything() == alone
    finally:
        _core.set_num_threads(1)


def test_a_forked_child_encodes():
    script = """
import os, numpy as np
from zcomm import _core, codec
x = np.ones(1_000_000, np.float32)
_core.set_num_threads(2)
wire = codec.encode(x, "int8:128")
child = os.fork()
if child == 0:
    os._exit(0 if (codec.encode(x, "int8:128") == wire).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_thread_that_flushes_subnormals_gets_the_same_bits():
    torch = pytest.importorskip("torch")
    x = np.full(64, 2.0**-127, np.float32)
    x[::2] = 2.0**-126
    half = np.full(64, 2.0**-24, np.float16)
    torch.set_flush_denormal(True)
    try:
        wire, halves = codec.encode(x, "int8:32"), codec.encode(half, "int8:32")
        total = codec.decode_sum([(x, "exact")], np.empty_like(x), factor=0.5)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(wire, ref.encode(x, "int8:32"), "float32")
    assert_same_bits(halves, ref.encode(half, "int8:32"), "float16")
    assert_same_bits(total, x * np.float32(0.5), "sum")


def test_a_sum_may_overwrite_its_exact_wire():
    x = np.random.default_rng(5).standard_normal(10_000).astype(np.float32)
    wire = codec.encode(x, "int8:128")
    expected = codec.decode_sum([(x, "exact"), (wire, "int8:128")], np.empty_like(x))
    out = x.copy()
    assert codec.decode_sum([(out, "exact"), (wire, "int8:128")], out) is out
    assert_same_bits(out, expected, "in place")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["exact", "bf16", "int8:4096", "int4:96:stochastic", "fp8:32", "eden2:256"])
def test_a_residual_is_updated_in_place(isa, format):
    """The wire that is written is one of the wires of the sum; on two threads, of several tasks, with an odd length."""
    size = 100_003
    rng = np.random.default_rng(6)
    x, residual = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    wire, sent = codec.encode(residual, format), codec.encode(x, "int4:64")
    wires = [(x, "exact"), (sent, "int4:64", -1.0), (wire, format, 0.5)]
    if format == "exact":
        wires[2] = (wire[: 4 * size].view(np.float32), format, 0.5)
    expected = codec.decode_sum_encode(wires, size, format, seed=9)
    try:
        _core.set_num_threads(2)
        assert codec.decode_sum_encode(wires, size, format, out=wire, isa=isa, seed=9) is wire
    finally:
        _core.set_num_threads(1)
    assert_same_bits(wire, expected, "in place")


@pytest.mark.parametrize("isa", ISAS)
def test_pieces_of_a_message_have_the_bits_of_the_whole(isa):
    x = np.random.default_rng(7).standard_normal(70_000).astype(np.float32)
    format = "int8:64:stochastic"
    whole = codec.encode(x, format, seed=5, isa=isa)
    layout = ref.wire_layout(format, "float32", x.size)
    for begin, end in ((0, 64), (64, 40_000), (40_000, 70_000)):
        piece = codec.encode(x[begin:end], format, seed=5, first_element=begin, isa=isa)
        at = ref.wire_layout(format, "float32", end - begin).codes_offset
        assert_same_bits(piece[at:][: end - begin], whole[layout.codes_offset + begin :][: end - begin], "codes")


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
        wire = codec.encode(x, "int8:64")
        raw = x.view(torch.uint16).numpy() if dtype is torch.bfloat16 else x.numpy()
        assert_same_bits(wire, ref.encode(raw.reshape(-1), "int8:64"), str(dtype))
        out = codec.decode(wire, "int8:64", torch.empty_like(x))
        assert (out - x).abs().max() < 0.05
    with pytest.raises(ValueError, match="array: expected a contiguous tensor"):
        codec.encode(x.T, "int8:64")


def test_wrong_arguments_are_refused_by_name(monkeypatch):
    x = np.ones((8, 8), np.float32)
    wire = codec.encode(x, "int8:32")
    nothing = np.empty(0, np.uint8)
    read_only = np.ones(64, np.float32)
    read_only.flags.writeable = False
    for error, message, call in [
        (ValueError, "array: expected a contiguous array", lambda: codec.encode(x.T, "int8:32")),
        (TypeError, "array: expected dtype float32, .* got float64", lambda: codec.encode(np.ones(4), "int8:32")),
        (TypeError, "array: expected dtype float32, .* got >f4", lambda: codec.encode(np.ones(4, ">f4"), "int8:32")),
        (TypeError, "array: expected a NumPy array or .* got list", lambda: codec.encode([1.0], "int8:32")),
        (ValueError, "format: expected exact, .* got 'int8:33'", lambda: codec.encode(x, "int8:33")),
        (
            ValueError,
            "isa: expected one of this machine's, baseline.*, got 'mmx'",
            lambda: codec.encode(x, "int8:32", isa="mmx"),
        ),
        (ValueError, "wire: expected 80 bytes for 64 .*, got 64", lambda: codec.decode(wire[:64], "int8:32", x)),
        (TypeError, "wire: expected dtype uint8, got int8", lambda: codec.decode(wire.view(np.int8), "int8:32", x)),
        (
            ValueError,
            "wire: expected an address .* got 1 bytes past",
            lambda: codec.decode(np.zeros(81, "u1")[1:], "int8:32", x),
        ),
        (ValueError, "out: expected a writable array", lambda: codec.decode(wire, "int8:32", read_only)),
        (ValueError, "wires: expected at least one", lambda: codec.decode_sum([], x)),
        (
            ValueError,
            "wires.1.: expected 64 values, got 3",
            lambda: codec.decode_sum([(x, "exact"), (x[0, :3], "exact")], x),
        ),
        (ValueError, "num_elements: expected 0 or more, got -1", lambda: codec.wire_bytes("exact", "float32", -1)),
        (
            ValueError,
            "num_elements: expected at most .* got 4611686018427387904",
            lambda: codec.decode_sum_encode([(nothing, "exact")], 2**62, "exact", out=nothing),
        ),
        (ValueError, "dtype: expected float32, .* got 'float64'", lambda: codec.wire_bytes("exact", "float64", 1)),
        (ValueError, "num_threads: expected 1 or more, got 0", lambda: _core.set_num_threads(0)),
        (
            ValueError,
            "first_element: expected a multiple of 32, 0 or more, got 48",
            lambda: codec.encode(x, "int8:32:stochastic", first_element=48),
        ),
        (
            ValueError,
            "wire: expected a finite factor, got inf",
            lambda: codec.decode_sum([(wire, "int8:32", float("inf"))], x),
        ),
    ]:
        with pytest.raises(error, match=message):
            call()
    monkeypatch.setenv("ZCOMM_ISA", "sse9")
    with pytest.raises(ValueError, match=r"ZCOMM_ISA: expected one of this machine's, baseline.*, got 'sse9'"):
        codec.encode(x, "int8:32")
    monkeypatch.setenv("ZCOMM_ISA", "baseline")
    assert_same_bits(codec.encode(x, "int8:32"), wire, "baseline")


def test_memory_that_is_read_is_not_written() -> None:
    """The first codes would overwrite values that are not encoded yet."""
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    wire = codec.encode(values, "int8:128")
    for start in (0, 4 * values.size - 1):
        memory = np.zeros(9000, np.uint8)
        array = memory[: 4 * values.size].view(np.float32)
        array[:] = values
        with pytest.raises(ValueError, match=r"^out: expected memory apart from array, got some that overlaps it$"):
            codec.encode(array, "int8:128", out=memory[start:][: wire.size])
        assert (array == values).all()
        taken = memory[start:][: wire.size]
        taken[:] = wire
        with pytest.raises(ValueError, match=r"^out: expected memory apart from wire, got some that overlaps it$"):
            codec.decode(taken, "int8:128", array)
        assert (taken == wire).all()
    memory = np.zeros(9000, np.uint8)
    array = memory[: 4 * values.size].view(np.float32)
    array[:] = values
    assert (codec.encode(array, "int8:128", out=memory[4 * values.size :][: wire.size]) == wire).all()


def test_sums_are_written_over_whole_terms_only() -> None:
    values = np.ones(1000, np.float32)
    wire = codec.encode(values, "int8:128")
    memory = np.zeros(9000, np.uint8)
    out = memory[: 4 * values.size].view(np.float32)
    for start in (0, 4):
        taken = memory[start:][: wire.size]
        taken[:] = wire
        with pytest.raises(ValueError, match=r"^out: expected memory apart from wires\[1\], or all of it, got some"):
            codec.decode_sum([(values, "exact"), (taken, "int8:128")], out)
        with pytest.raises(ValueError, match=r"^out: .* apart from wires\[0\], or all of it, got some"):
            codec.decode_sum_encode([(taken, "int8:128")], 1000, "int8:128", out=memory[start + 1 :][: wire.size])
    large = codec.encode(np.ones(32512, np.float32), "int8:4096")  # of as many bytes as in blocks of 4064
    with pytest.raises(ValueError, match=r"^wire: expected memory apart from a wire of another format, int8:4096"):
        codec.decode_sum_encode([(large, "int8:4096")], 32512, "int8:4064", out=large)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from wires\[0\], or all of it, got some"):
        codec.decode_sum([(memory[4:4004].view(np.float32), "exact")], out)
    out[:] = 1
    assert (codec.decode_sum([(out, "exact"), (values, "exact")], out) == 2).all()


def test_jobs_in_gpu_memory_are_refused_on_the_host():
    with pytest.raises(ValueError, match="device: expected a GPU, got the host"):
        _core.check_hashes_on_device([], device=-1)
