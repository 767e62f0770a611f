"""Arrays of any library: what is read from them, and what is refused, by name."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_arrays import (
    COPIED,
    CPU,
    CUDA,
    MANAGED,
    PINNED,
    READ_ONLY,
    ROCM,
    CudaInterface,
    Dlpack,
    Exported,
    OldDlpack,
)

from zcomm import _arrays, _core, codec
from zcomm._arrays import CURRENT_DEVICE, HOST, Call

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def look(array: Any, *, stream: Any = None, writable: bool = False) -> tuple[int, int, str, int]:
    view = Call(stream, array).values(array, "x", writable=writable)
    return *view.raw, view.device


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_reads_the_same(dtype: str) -> None:
    x = np.arange(24).astype(DTYPES[dtype]).reshape(2, 3, 4)
    address = x.ctypes.data
    assert look(x) == (address, 24, dtype, HOST)
    for device, expected in [((CPU, 0), HOST), ((PINNED, 0), HOST), ((CUDA, 3), 3), ((MANAGED, 1), 1)]:
        for array in (Dlpack(x, device), Dlpack(x, device, version=(1, 3)), OldDlpack(x, device)):
            assert look(array) == (address, 24, dtype, expected)
    if dtype != "bfloat16":
        assert look(CudaInterface(x)) == (address, 24, dtype, CURRENT_DEVICE)
        assert look(CudaInterface(x, strides=x.strides, version=2)) == (address, 24, dtype, CURRENT_DEVICE)
        assert look(Exported(x)) == (address, 24, dtype, HOST)


def test_torch_tensors_by_dlpack() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(5, 7, dtype=dtype)
        expected = (x.data_ptr(), 35, str(dtype).removeprefix("torch."), HOST)
        assert look(x) == look(Exported(x)) == expected
        assert look(x[2:]) == look(Exported(x[2:])) == (x[2:].data_ptr(), 21, *expected[2:])
    assert look(torch.ones(3, requires_grad=True))[1] == 3
    with pytest.raises(ValueError, match="x: Can't export tensors that require grad"):
        look(Exported(torch.ones(3, requires_grad=True)))


def test_signs_that_are_not_in_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.view_as_complex(torch.ones(8, 2)).conj().resolve_conj()
    negative = torch._neg_view(torch.ones(8))
    for writable in (False, True):
        with pytest.raises(
            ValueError, match=r"x: expected a tensor whose memory has its signs, .*: pass x.resolve_neg"
        ):
            look(negative, writable=writable)
        with pytest.raises(TypeError, match=r"x: expected dtype .*, got complex64"):
            look(x.conj(), writable=writable)
    assert look(negative.resolve_neg())[1] == 8


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.arange(64, dtype=jnp.bfloat16)
    assert look(x)[1:] == (64, "bfloat16", HOST)
    wire = codec.encode(x, "int8:32")
    assert (wire == codec.encode(np.arange(64).astype(ml_dtypes.bfloat16), "int8:32")).all()
    with pytest.raises(ValueError, match=r"out: expected a writable array, got a read-only one\. JAX arrays are"):
        codec.decode(wire, "int8:32", x)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (4, 0, 2), (1, 5, 1)])
def test_shapes_at_the_edges(shape: tuple[int, ...]) -> None:
    x = np.ones(shape, np.float32)
    odd = tuple(7 for _ in shape)  # strides of what has no second element mean nothing
    size = int(np.prod(shape))
    for array in (Dlpack(x), OldDlpack(x), Dlpack(x, with_strides=False), CudaInterface(x), Exported(x)):
        assert look(array)[1] == size
    if size < 2 and shape:
        assert look(CudaInterface(x, strides=odd))[1] == size
        assert look(Dlpack(x, strides=(ctypes.c_int64 * len(shape))(*odd)))[1] == size


def test_what_is_not_contiguous_is_refused() -> None:
    x = np.ones((4, 6), np.float32)
    for y in (x.T, x[:, :3], x[::2], x[::-1], np.broadcast_to(np.float32(1), (3, 3))):
        for array in (y, Dlpack(y), OldDlpack(y), CudaInterface(y)):
            with pytest.raises(ValueError, match="x: expected a contiguous array, got a non-contiguous one"):
                look(array)


def test_the_offset_counts() -> None:
    x = np.ones(8, np.float32)
    assert look(Dlpack(x, byte_offset=12))[0] == x.ctypes.data + 12


def test_crooked_addresses_are_refused_unless_nothing_is_there() -> None:
    memory = np.zeros(64, np.uint8)
    start = 1 + -memory.ctypes.data % 4
    with pytest.raises(ValueError, match=r"x: expected an address that is a multiple of 4, got 0x[0-9a-f]+[159d]$"):
        look(memory[start:][:16].view(np.float32))
    assert look(memory[start:][:0].view(np.float32))[1] == 0


def test_what_must_not_be_written_is_refused() -> None:
    x = np.ones(8, np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    message = "x: expected a writable array, got a read-only one$"
    for array in (frozen, Exported(frozen), Dlpack(x, flags=READ_ONLY), CudaInterface(x, data=(x.ctypes.data, True))):
        assert look(array)[1] == 8
        with pytest.raises(ValueError, match=message):
            look(array, writable=True)
    with pytest.raises(
        ValueError, match="x: expected an array to write into, got one that __dlpack__ hands out as a copy"
    ):
        look(Dlpack(x, flags=COPIED), writable=True)
    fake = type("ArrayImpl", (OldDlpack,), {"__module__": "jaxlib._jax"})(x)
    assert look(fake)[1] == 8
    with pytest.raises(ValueError, match=r"x: expected a writable array.*by jax\.dlpack\.from_dlpack"):
        look(fake, writable=True)


def test_wrong_arrays_are_refused_by_name() -> None:
    x = np.ones(8, np.float32)
    for error, message, array in [
        (TypeError, "x: expected a NumPy array or one that has __dlpack__ or __cuda.*, got list", [1.0]),
        (TypeError, "x: expected dtype float32, bfloat16 or float16, got float64", Dlpack(x.astype(np.float64))),
        (TypeError, "x: expected dtype float32, .*, got int8", Dlpack(x.astype(np.int8))),
        (TypeError, "x: expected dtype float32, .*, got complex64", Dlpack(x.astype(np.complex64))),
        (TypeError, "x: expected dtype float32, .*, got bool", Dlpack(x.astype(bool))),
        (TypeError, "x: expected dtype .*, got DLPack type 9 of bits 8", Dlpack(x, code=9, bits=8)),
        (TypeError, "x: expected dtype .*, got float32x4", Dlpack(x, lanes=4)),
        (TypeError, "x: expected dtype float32, .*, got int16", CudaInterface(x.astype(np.int16))),
        (TypeError, "x: expected float32 .* from __cuda_array_interface__, got '>f4'", CudaInterface(x, typestr=">f4")),
        (
            TypeError,
            "x: expected float32 .* got '.V2': it has no bfloat16, DLPack has",
            CudaInterface(x, typestr="<V2"),
        ),
        (ValueError, "x: expected an array without a mask", CudaInterface(x, mask=x)),
        (ValueError, "x: expected an array without a mask", np.ma.masked_array(x, mask=x > 2)),
        (ValueError, "x: expected no stream 0 from __cuda_array_interface__", CudaInterface(x, stream=0)),
        (ValueError, "x: expected an array on .*, got one on DLPack device type 10", Dlpack(x, (ROCM, 0))),
        (ValueError, "x: DLPack version: expected 1.x, got 2.1", Dlpack(x, version=(2, 1))),
        (
            ValueError,
            "x: expected a capsule .* got <capsule object .used_dltensor",
            Dlpack(x, name=b"used_dltensor"),
        ),
    ]:
        with pytest.raises(error, match=message):
            look(array)


def test_streams_are_what_libraries_have() -> None:
    class Stream:
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

    class Protocol:
        def __init__(self, version: int) -> None:
            self.version = version

        def __cuda_stream__(self) -> tuple[int, int]:
            return self.version, 0x70

    for stream, handle in [
        (None, 0),
        (0, 0),
        (2, 2),
        (np.int64(0x70), 0x70),
        (Stream(ptr=0x70), 0x70),
        (Stream(cuda_stream=0x70), 0x70),
        (Stream(handle=0x70), 0x70),
        (Stream(handle=ctypes.c_void_p(0x70)), 0x70),
        (Stream(handle=ctypes.c_void_p(None)), 0),
        (Protocol(0), 0x70),
    ]:
        assert _arrays.stream_handle(stream) == handle
    for stream, given in [(True, "True"), (-1, "-1"), ("0", "str"), (1.0, "float"), (object(), "object")]:
        with pytest.raises(TypeError, match=f"stream: expected None, a stream's handle as an integer.*, got {given}"):
            _arrays.stream_handle(stream)
    with pytest.raises(ValueError, match="stream: expected version 0 of __cuda_stream__, got 1"):
        _arrays.stream_handle(Protocol(1))


def test_producers_hear_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones(8, np.float32)
    for given, told in [(None, 1), (0, 1), (2, 2), (0x70, 0x70)]:
        for array in (Dlpack(x), OldDlpack(x)):
            look(array, stream=given)
            assert array.streams == [told]
    array = Dlpack(x, (CPU, 0))
    look(array)
    assert array.streams == [None]

    waited: list[tuple[int, int]] = []
    monkeypatch.setattr(_core, "wait_for", lambda *streams: waited.append(streams))
    for producer, ours in [(None, 0x70), (0x70, 0x70), (1, 0), (1, None)]:
        look(CudaInterface(x, stream=producer), stream=ours)
    assert not waited
    look(CudaInterface(x, stream=2), stream=0x70)
    assert waited == [(0x70, 2, HOST)]  # a codec's call: on the current device
    call = Call(0x70, device=3)
    call.values(CudaInterface(x, stream=2), "x")
    assert waited[1:] == [(0x70, 2, 3)]


def test_the_stream_of_the_arrays_library(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []

    class Device:
        def __enter__(self) -> None:
            current.append(self)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Array(Dlpack):
        __module__ = "cupy._core.core"
        device = Device()

        def _export(self, stream: Any) -> object:
            assert current == [self.device]
            return super()._export(stream)

    class Stream:
        @property
        def ptr(self) -> int:
            assert current
            return 0x90

    def empty(num_bytes: int, dtype: str) -> Array:
        assert current
        return Array(np.empty(num_bytes, dtype))

    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(get_current_stream=Stream), empty=empty)
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # type: ignore[arg-type]
    x, other = np.ones(8, np.float32), Dlpack(np.ones(8, np.float32))
    array = Array(x)
    assert _arrays.stream_handle(None, other, array) == 0x90
    assert _arrays.stream_handle(5, other, array) == 5
    assert look(array)[1] == 8
    assert array.streams == [0x90]
    call = Call(None, array)
    call.values(array, "array")
    made = _arrays.new_bytes(32, call, array, "out")
    assert isinstance(made, Array)
    assert made.array.size == 32


def test_arrays_of_one_call_are_on_one_device() -> None:
    x = np.ones(64, np.float32)
    call = Call(None)
    call.values(Dlpack(x, (CUDA, 1)), "a")
    call.values(CudaInterface(x), "b")
    assert call.device == 1
    for array, where in [(Dlpack(x, (CUDA, 0)), "GPU 0"), (x, "the CPU")]:
        with pytest.raises(ValueError, match=f"c: expected an array on GPU 1, got one on {where}$"):
            call.values(array, "c")
    call = Call(None)
    call.values(CudaInterface(x), "a")
    with pytest.raises(ValueError, match="b: expected an array on a GPU, got one on the CPU"):
        call.values(x, "b")
    call.values(Dlpack(x, (CUDA, 2)), "b")
    assert call.device == 2
    with pytest.raises(ValueError, match="wire: expected an array on the CPU, got one on GPU 0"):
        codec.decode(Dlpack(np.ones(80, np.uint8)), "int8:32", x)
    with pytest.raises(ValueError, match="stream: expected None, got one for array, which is on the CPU"):
        codec.encode(x, "int8:32", stream=0)


def test_wires_go_where_the_caller_says() -> None:
    x = np.linspace(-1, 1, 96, dtype=np.float32)
    wire = codec.encode(x, "int8:32")
    out = np.empty_like(wire)
    assert codec.encode(Exported(x), "int8:32", out=out) is out
    assert (out == wire).all()
    twice = codec.decode_sum_encode([(wire, "int8:32"), (Exported(x), "exact")], 96, "int8:32", out=out)
    assert twice is out
    assert (out == codec.decode_sum_encode([(wire, "int8:32"), (x, "exact")], 96, "int8:32")).all()
    for error, message, wrong in [
        (TypeError, "out: expected dtype uint8, got int8", out.view(np.int8)),
        (ValueError, f"out: expected {out.size} bytes, got {out.size - 1}", out[1:]),
        (ValueError, "out: expected an array on the CPU, got one on GPU 0", Dlpack(out)),
    ]:
        with pytest.raises(error, match=message):
            codec.encode(x, "int8:32", out=wrong)


def test_arrays_on_a_gpu_without_cuda_or_memory() -> None:
    x = np.ones(64, np.float32)
    with pytest.raises(ValueError, match="out: expected an array of 80 uint8 on GPU 0, got None: zcomm allocates for"):
        codec.encode(Dlpack(x), "int8:32")
    with pytest.raises(ValueError, match="isa: expected none for arrays on GPU 0, got 'baseline'"):
        codec.encode(Dlpack(x), "int8:32", isa="baseline", out=Dlpack(np.empty(80, np.uint8)))
    if _core.cuda_toolkit():
        pytest.skip("this build has CUDA")
    with pytest.raises(RuntimeError, match="this build of zcomm has no CUDA: it was built without nvcc"):
        codec.encode(Dlpack(x), "int8:32", out=Dlpack(np.empty(80, np.uint8)))
    assert _core.cuda_device_count() == 0
