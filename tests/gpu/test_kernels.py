"""The kernels give the bits of the CPU's codec, which the NumPy reference and the golden files hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import device_lossless
from support.gpu_world import DEVICE, DTYPES, alone, assert_same_bits, on_device, synchronize

from zcomm import codec

BLOCKS = (32, 64, 96, 128, 256, 512, 1024, 2048, 4064, 4096)
WRONG_BLOCKS = (0, 16, 48, 1000, 4128, 8192)
KINDS = ("int8", "int4", "fp8")
INFINITY = float("inf")
SPECIAL = (0.0, -0.0, INFINITY, -INFINITY, float("nan"), 1.0, 2.0**-126, 2.0**-149, -(2.0**-130), 65504.0, 65520.0)
LARGEST = (*(sign * torch.finfo(dtype).max for dtype in DTYPES[:2] for sign in (1, -1)), 6e-8, 1e-40)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
EDEN = tuple(f"eden{bits}:{block}" for bits in (2, 3, 4) for block in (32, 128, 512))
each_kind = pytest.mark.parametrize("kind", KINDS)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_of(wire: Any) -> torch.Tensor:
    return wire if isinstance(wire, torch.Tensor) else torch.from_numpy(wire)


def normal(num: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values on the CPU whose blocks differ by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 12, (num // 32 + 1,), generator=generator).repeat_interleave(32)[:num]
    return (torch.randn(num, generator=generator) * 2.0**exponents).to(dtype)


def patterns(num: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, special values among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (num,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    if seed % 2:
        values = normal(num, torch.float32, seed)
    special = torch.tensor([*SPECIAL, *LARGEST])
    for place in torch.randint(0, max(num, 1), (min(num, 24),), generator=generator).tolist():
        values[place] = special[place % len(special)]
    return values.to(dtype)


def sizes(block: int) -> Iterator[int]:
    """Nothing, a tail alone, whole blocks, blocks and a tail; more than a CTA, more than one launch's first CTAs."""
    yield from (0, 1, 31, block - 1, block, block + 1, 3 * block, 5 * block + 17, 66_000 // block * block + 5)


def pattern_like(num: int, dtype: torch.dtype, device: Any = DEVICE) -> torch.Tensor:
    """Memory whose every byte is 0xAB, so that an element that is not written shows."""
    num_bytes = num * torch.empty(0, dtype=dtype).element_size()
    return torch.full((num_bytes,), 0xAB, dtype=torch.uint8, device=device).view(dtype)


def check_one(values: torch.Tensor, format: str, what: Any) -> None:
    """encode and decode of CPU values, on both devices."""
    wire = tensor_of(codec.encode(values, format))
    out = pattern_like(wire.numel(), torch.uint8)
    got = codec.encode(on_device(values), format, out=out)
    synchronize()
    assert_same_bits(got.cpu(), wire, ("encode", format, what))
    for dtype in DTYPES:
        if format == "exact" and dtype != values.dtype:
            continue
        if format == "bf16" and values.dtype != torch.float32 and dtype != values.dtype:
            continue
        want = pattern_like(values.numel(), dtype, "cpu")
        readable = wire_for(format, dtype, values)
        if readable is None:
            continue
        codec.decode(wire, format, want)
        decoded = codec.decode(got, format, pattern_like(values.numel(), dtype))
        synchronize()
        assert_same_bits(decoded.cpu(), want, ("decode", format, dtype, what))


def wire_for(format: str, dtype: torch.dtype, values: torch.Tensor) -> bool | None:
    """Whether a wire of ``values`` has as many bytes as one of ``dtype`` must have."""
    sizes = {codec.wire_bytes(format, name_of(one), values.numel()) for one in (dtype, values.dtype)}
    return True if len(sizes) == 1 else None


@each_dtype
@each_kind
def test_encode_and_decode(dtype: torch.dtype, kind: str) -> None:
    """Every block size, every size around it, rounded to nearest and at random."""

    def body() -> None:
        for block in BLOCKS:
            words = ("", ":stochastic") if kind != "fp8" else ("",)
            for format, num in itertools.product((f"{kind}:{block}{word}" for word in words), sizes(block)):
                check_one(normal(num, dtype, num), format, num)

    alone(body)


@each_dtype
def test_eden(dtype: torch.dtype) -> None:
    def body() -> None:
        for seed, format in enumerate(EDEN):
            for num in sizes(int(format.split(":")[1])):
                check_one(normal(num, dtype, num), format, num)
            check_one(patterns(20_011, dtype, seed), format, seed)

    alone(body)


@each_dtype
def test_special_values_and_any_bits(dtype: torch.dtype) -> None:
    def body() -> None:
        for seed, block in enumerate((32, 96, 256, 1024, 4064)):
            for kind in (*KINDS, "int8:stochastic", "int4:stochastic"):
                name, *words = kind.split(":")
                check_one(patterns(20_011, dtype, seed), ":".join((name, str(block), *words)), seed)
        special = torch.tensor([*SPECIAL, *LARGEST]).to(dtype)
        for kind in KINDS:
            for value in special:  # alone in its block, and in a block of zeros
                check_one(value.repeat(64), f"{kind}:32", value)
                check_one(torch.cat([value.view(1), torch.zeros(95, dtype=dtype)]), f"{kind}:96", value)

    alone(body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_every_pattern_of_16_bits(dtype: torch.dtype) -> None:
    def body() -> None:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        shuffled = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
        for values in (every, shuffled):
            for format in (*(f"{kind}:32" for kind in KINDS), "int8:256", "eden3:64", "exact"):
                check_one(values, format, "every pattern")

    alone(body)


@each_dtype
def test_exact_and_bf16(dtype: torch.dtype) -> None:
    def body() -> None:
        for format in ("exact", "bf16"):
            for num in (0, 1, 7, 31, 4097, 70_001):
                check_one(normal(num, dtype, num), format, num)
            check_one(patterns(20_011, dtype, 0), format, "any bits")

    alone(body)


@each_dtype
def test_unaligned_values(dtype: torch.dtype) -> None:
    """Values that start at any element, in and out; nothing beside them is touched."""

    def body() -> None:
        for offset in (1, 2, 3, 5, 7):
            for format in (
                "int8:128",
                "int4:64",
                "fp8:96",
                "int4:128:stochastic",
                "eden3:64",
                "int8:4064",
                "bf16",
                "exact",
            ):
                values = normal(9001 + offset, dtype, offset)
                memory = on_device(values)
                got = codec.encode(memory[offset:], format)
                got, want = tensor_of(got), tensor_of(codec.encode(values[offset:].clone(), format))
                assert_same_bits(got.cpu(), want, (format, offset))
                around = pattern_like(9001 + offset + 3, dtype)
                codec.decode(got, format, around[offset : offset + 9001])
                decoded = codec.decode(want, format, torch.zeros(9001, dtype=dtype))
                synchronize()
                assert_same_bits(around[offset : offset + 9001].cpu(), decoded, (format, offset))
                rest = torch.cat([around[:offset], around[offset + 9001 :]]).view(torch.uint8)
                assert (rest == 0xAB).all(), (format, offset)

    alone(body)


MIXES = (
    ["int8:128"],
    ["exact", "int8:128"],
    ["int8:128", "int4:64", "bf16", "exact"],
    ["int4:96", "int8:4064", "int4:4096", "int8:32", "int8:2048"],
    ["exact"] * 3 + ["int8:128"] * 40,  # more than travel with one launch
    [f"int{4 + 4 * (i % 2)}:{32 * (1 + i % 128)}" for i in range(70)],
    ["fp8:96", "eden4:64", "exact", "eden3:128", "int4:32", "int8:128:stochastic", "fp8:256"],
    ["eden2:128"] * 9,
    ["eden3:64", "exact", "int8:96", "eden2:64", "eden4:128"],
)


@each_dtype
@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_sums(dtype: torch.dtype, mix: int) -> None:
    """decode_sum and decode_sum_encode of few and of many wires, of mixed formats, to every dtype and kind."""

    def body() -> None:
        formats = MIXES[mix]
        for num in (1, 4095, 20_011):
            terms = [normal(num, dtype, seed) for seed in range(len(formats))]
            wires = [
                (tensor_of(codec.encode(term, format)), format) for term, format in zip(terms, formats, strict=True)
            ]
            ours = [(on_device(wire), format) for wire, format in wires]
            for out in DTYPES:
                if "exact" in formats and out != dtype:
                    continue  # the bytes of exact values say no dtype: they are taken for the output's
                for factor in (1.0, 0.25, 1 / 3):
                    want = codec.decode_sum(wires, pattern_like(num, out, "cpu"), factor=factor)
                    got = codec.decode_sum(ours, pattern_like(num, out), factor=factor)
                    synchronize()
                    assert_same_bits(got.cpu(), want, (formats, num, out, factor))
            targets = ("int8:128", "int4:96", "fp8:32", "int4:128:stochastic", "eden2:128", "eden3:64", "bf16", "exact")
            for target in targets:
                if target == "int4:96" and any("eden" in format for format in formats):
                    continue  # refused
                want = tensor_of(codec.decode_sum_encode(wires, num, target, dtype=name_of(dtype)))
                got = pattern_like(want.numel(), torch.uint8)
                codec.decode_sum_encode(ours, num, target, dtype=name_of(dtype), out=got)
                synchronize()
                assert_same_bits(got.cpu(), want, (formats, num, target))

    alone(body)


def test_sums_in_place() -> None:
    """The output may be one of the terms."""

    def body() -> None:
        for dtype in DTYPES:
            own, other = normal(10_007, dtype, 1), normal(10_007, dtype, 2)
            wire = tensor_of(codec.encode(other, "int8:128"))
            memory = on_device(own)
            codec.decode_sum([(memory, "exact"), (on_device(wire), "int8:128")], memory, factor=0.5)
            want = codec.decode_sum([(own, "exact"), (wire, "int8:128")], torch.zeros_like(own), factor=0.5)
            synchronize()
            assert_same_bits(memory.cpu(), want, dtype)

    alone(body)


@pytest.mark.parametrize("device", ["cpu", "here"])
def test_wrong_arguments_are_refused(device: str) -> None:
    def body() -> None:
        values = torch.ones(100, device="cpu" if device == "cpu" else DEVICE)
        for block in WRONG_BLOCKS:
            for kind in KINDS:
                with pytest.raises(ValueError, match=r"block|format|multiple"):
                    codec.encode(values, f"{kind}:{block}")
        with pytest.raises(ValueError, match="contiguous"):
            codec.encode(values[::2], "int8:32")
        with pytest.raises(TypeError, match="dtype"):
            codec.encode(values.double(), "int8:32")
        with pytest.raises(ValueError, match="bytes"):
            codec.decode(torch.zeros(10, dtype=torch.uint8, device=values.device), "int8:32", values)

    alone(body)


@pytest.mark.cuda_only
def test_arrays_on_two_devices_are_refused() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="CPU"):
            codec.decode(torch.zeros(100, dtype=torch.uint8), "int8:32", torch.ones(80, device=DEVICE))

    alone(body)


@pytest.mark.cuda_only
def test_calls_are_on_the_stream_that_they_are_given() -> None:
    """Behind what it holds, the current one of torch by default."""

    def body() -> None:
        values = normal(100_003, torch.float32)
        want = tensor_of(codec.encode(values, "int8:128"))
        source, fresh = torch.zeros(100_003, device=DEVICE), on_device(values)
        out = torch.zeros(want.numel(), dtype=torch.uint8, device=DEVICE)
        codec.encode(source, "int8:128", out=out)
        for given in (False, True):
            stream = torch.cuda.Stream()
            source.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                source.copy_(fresh)
                if not given:
                    codec.encode(source, "int8:128", out=out)
            if given:
                codec.encode(source, "int8:128", out=out, stream=stream)
            assert not stream.query(), "the host waited for the GPU"
            stream.synchronize()
            assert_same_bits(out.cpu(), want, given)

    alone(body)


@pytest.mark.cuda_only
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets of 64 bits: a job of 2^31 elements and some is the jobs of its pieces, one after the other."""
    num, piece = 2**31 + 3 * 4096 + 77, 1 << 27

    def body() -> str:
        free = torch.cuda.mem_get_info()[0]
        if free < 16 << 30:
            return f"{free >> 30} GiB of GPU memory are free, and this needs 16"
        values = torch.empty(num, dtype=torch.bfloat16, device=DEVICE)
        for begin in range(0, num, piece):
            values[begin : begin + piece].normal_()
        for format in ("int8:256", "int4:96"):
            block = int(format.partition(":")[2])
            step = piece // block * block
            layout = codec.wire_bytes(format, "bfloat16", num)
            wire = torch.empty(layout, dtype=torch.uint8, device=DEVICE)
            codec.encode(values, format, out=wire)
            decoded = torch.empty_like(values)
            codec.decode(wire, format, decoded)
            total = torch.empty_like(values)
            codec.decode_sum([(wire, format), (values, "exact")], total)
            again = torch.empty_like(wire)
            codec.decode_sum_encode([(wire, format)], num, format, out=again)
            for begin in range(0, num, step):
                part = values[begin : begin + step].clone()
                small = codec.encode(part, format)
                want = codec.decode(small, format, torch.empty_like(part))
                sums = codec.decode_sum([(small, format), (part, "exact")], torch.empty_like(part))
                for got, expected in ((decoded, want), (total, sums)):
                    same = got[begin : begin + step].view(torch.int16) == expected.view(torch.int16)
                    assert same.all(), (format, begin)
            # A code times its scale encodes to itself, but for blocks whose largest value was rounded.
            final = codec.decode(again, format, torch.empty_like(values))
            last = slice(num - 5000, num)
            assert (final[last] - decoded[last]).abs().max() <= decoded[last].abs().max() / 7
            del wire, decoded, total, again, final
        return ""

    reason = alone(body)
    if reason:
        pytest.skip(reason)


@pytest.mark.cuda_only
@pytest.mark.parametrize("case", device_lossless.CASES, ids=lambda case: case.__name__)
def test_differences(case: Callable[[Any], None]) -> None:
    """Messages, values, hashes and errors of lossless differences."""
    alone(lambda: case(DEVICE))


@pytest.mark.cuda_only
def test_lossless_codes_of_many_tiles() -> None:
    """More than a CTA's place in the table, which is found in several rounds, and more CTAs than run at once."""
    num = 8000 * device_lossless.TILE + 5

    def body() -> None:
        for dtype, rate in ((torch.bfloat16, 1e-4), (torch.float16, 1e-3)):
            update = device_lossless.updated(num, dtype, rate)
            device_lossless.check_updates([update], DEVICE, dtype, step=1)

    alone(body)
