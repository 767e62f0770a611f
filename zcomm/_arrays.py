"""Arrays of any library as the core takes them: an address, a number of elements, a dtype and a device.

NumPy arrays and torch CPU tensors are read directly, all others through DLPack (``__dlpack__``) or, without that,
``__cuda_array_interface__``. This module imports no array library but NumPy: callers have imported their array's.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

import zcomm._core as _core

HOST = -1
CURRENT_DEVICE = -2  # for an array on a GPU that does not say on which
VALUE_DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element

_HOST_TYPES = (1, 3)  # DLPack: kDLCPU, kDLCUDAHost
_GPU_TYPES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_MAX_DLPACK = (1, 1)
_IMMUTABLE = ("jax", "jaxlib")


@dataclass(frozen=True)
class View:
    """A contiguous array, borrowed: ``owner`` keeps it for as long as the view lives."""

    address: int
    num_elements: int
    dtype: str
    device: int  # a GPU's index, HOST or CURRENT_DEVICE
    owner: object

    @property
    def raw(self) -> tuple[int, int, str]:
        """Arguments for the core."""
        return self.address, self.num_elements, self.dtype

    @property
    def num_bytes(self) -> int:
        return self.num_elements * VALUE_DTYPES.get(self.dtype, 1)

    def overlaps(self, other: View) -> bool:
        return self.address < other.address + other.num_bytes and other.address < self.address + self.num_bytes


class Call:
    """Arrays of one call, which are on one device. Their work is queued on one stream.

    If ``stream`` is None, ``arrays`` determine it. ``device`` is required of all arrays; by default it is the first
    array's. ``hint`` ends the message about an array on the CPU that must be on a GPU.
    """

    def __init__(self, stream: Any, *arrays: Any, device: int | None = None, hint: str = "") -> None:
        self.stream = stream_handle(stream, *arrays)
        self.device = HOST if device is None else device
        self._is_open = device is None
        self._stream_given = stream is not None
        self._hint = hint
        self._views: list[View] = []  # keeps the arrays until the call is over

    def values(self, array: Any, name: str, *, writable: bool = False) -> View:
        """Return the view of an array of values; ``name`` is for messages."""
        view = self.any(array, name, writable=writable)
        if view.dtype not in VALUE_DTYPES:
            raise TypeError(f"{name}: expected dtype float32, bfloat16 or float16, got {view.dtype}")
        if view.num_elements and view.address % (alignment := VALUE_DTYPES[view.dtype]):
            raise ValueError(f"{name}: expected an address that is a multiple of {alignment}, got {view.address:#x}")
        return view

    def any(self, array: Any, name: str, *, writable: bool = False) -> View:
        """Return the view of an array of any dtype."""
        view = _view(array, name, writable, self.stream, self.device)
        if view.num_elements and not view.address:
            raise ValueError(f"{name}: expected an array with memory, got one whose memory was freed")
        if self._is_open:
            self.device, self._is_open = view.device, False
        if view.device == self.device == HOST and self._stream_given:
            raise ValueError(f"stream: expected None, got one for {name}, which is on the CPU")
        if CURRENT_DEVICE in (view.device, self.device) and HOST not in (view.device, self.device):
            self.device = max(view.device, self.device)
        elif view.device != self.device:
            hint = self._hint if view.device == HOST else ""
            raise ValueError(f"{name}: expected an array on {self.where}, got one on {_where(view.device)}{hint}")
        self._views.append(view)
        return view

    @property
    def where(self) -> str:
        return _where(self.device)


def slots_of(view: View, size: int, name: str) -> list[tuple[int, int, str]]:
    """Split an array into ``size`` equal slots, as arguments for the core."""
    if view.num_elements % size:
        raise ValueError(f"{name}: expected a multiple of the {size} ranks, got {view.num_elements} elements")
    each = view.num_elements // size
    return [(view.address + i * each * VALUE_DTYPES[view.dtype], each, view.dtype) for i in range(size)]


def new_bytes(num_bytes: int, call: Call, like: Any, name: str) -> Any:
    """Return an array of uint8 of the library and on the device of ``like``."""
    if call.device == HOST:
        return np.empty(num_bytes, np.uint8)
    library = _library(like)
    if library == "cupy":
        with like.device:
            return sys.modules["cupy"].empty(num_bytes, "uint8")
    if library == "torch":
        torch = sys.modules["torch"]
        return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
    raise ValueError(
        f"{name}: expected an array of {num_bytes} uint8 on {call.where}, got None: zcomm allocates for CuPy, torch "
        f"and the CPU, not for {type(like).__name__}"
    )


def stream_handle(stream: Any, *arrays: Any) -> int:
    """Return the cudaStream_t of ``stream``: an integer, an object of the ``__cuda_stream__`` protocol, or one with
    ``ptr`` (CuPy), ``cuda_stream`` (torch) or ``handle`` (Numba, PyCUDA). None means the current stream of the first
    CuPy or torch array's library, or 0, the legacy default stream, without such an array."""
    if stream is None:
        return next((handle for array in arrays if (handle := _current_stream(array)) is not None), 0)
    if hasattr(stream, "__cuda_stream__"):
        version, handle = stream.__cuda_stream__()
        if version != 0:
            raise ValueError(f"stream: expected version 0 of __cuda_stream__, got {version}")
        return int(handle)
    for attribute in ("ptr", "cuda_stream", "handle"):
        if hasattr(stream, attribute):
            handle = getattr(stream, attribute)
            return int(getattr(handle, "value", handle) or 0)  # Numba has a ctypes pointer
    try:
        handle = operator.index(stream)
    except TypeError:
        handle = -1
    if isinstance(stream, bool) or handle < 0:
        given = repr(stream) if isinstance(stream, int) else type(stream).__name__
        raise TypeError(
            "stream: expected None, a stream's handle as an integer, or an object with __cuda_stream__, ptr, "
            f"cuda_stream or handle, got {given}"
        )
    return handle


def _current_stream(array: Any) -> int | None:
    library = _library(array)
    if library == "cupy":
        with array.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    if library == "torch" and array.device.type == "cuda":
        return int(sys.modules["torch"].cuda.current_stream(array.device).cuda_stream)
    return None


def _library(array: Any) -> str:
    torch = sys.modules.get("torch")  # also for subclasses of its tensors
    if torch is not None and isinstance(array, torch.Tensor):
        return "torch"
    return type(array).__module__.partition(".")[0]


def _where(device: int) -> str:
    return {HOST: "the CPU", CURRENT_DEVICE: "a GPU"}.get(device, f"GPU {device}")


def _view(array: Any, name: str, writable: bool, stream: int, device: int) -> View:
    library = _library(array)
    if isinstance(array, np.ndarray):
        if np.ma.getmask(array) is not np.ma.nomask:
            raise _masked(name)
        if not array.flags.c_contiguous:
            raise _not_contiguous(name, "array")
        if writable and not array.flags.writeable:
            raise _read_only(name)
        dtype = array.dtype.name if array.dtype.isnative else str(array.dtype)
        return View(array.ctypes.data, array.size, dtype, HOST, array)
    if library == "torch":
        torch = sys.modules["torch"]
        if hasattr(array, "to_local"):
            raise ValueError(f"{name}: expected this rank's tensor, got a DTensor: pass {name}.to_local()")
        if array.layout is not torch.strided or not array.is_contiguous():
            raise _not_contiguous(name, "tensor")
        if array.is_neg():
            raise ValueError(
                f"{name}: expected a tensor whose memory has its signs, got one with the negative bit: "
                f"pass {name}.resolve_neg()"
            )
        if array.device.type == "cpu":
            return View(array.data_ptr(), array.numel(), str(array.dtype).removeprefix("torch."), HOST, array)
        if array.device.type != "cuda":
            raise ValueError(f"{name}: expected a tensor on the CPU or a GPU, got one on {array.device}")
        with torch.cuda.device(array.device):  # torch exports only tensors of the current device
            return _dlpack_view(array.detach(), name, writable, stream)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        if writable and library in _IMMUTABLE:  # capsules do not tell
            raise _read_only(name, library)
        with array.device if library == "cupy" else contextlib.nullcontext():
            return _dlpack_view(array, name, writable, stream)
    if hasattr(array, "__cuda_array_interface__"):
        return _cuda_view(array, array.__cuda_array_interface__, name, writable, stream, device)
    raise TypeError(
        f"{name}: expected a NumPy array or one that has __dlpack__ or __cuda_array_interface__, got "
        f"{type(array).__name__}"
    )


def _dlpack_view(array: Any, name: str, writable: bool, stream: int) -> View:
    kind = int(array.__dlpack_device__()[0])
    if kind not in _HOST_TYPES + _GPU_TYPES:
        raise ValueError(f"{name}: expected an array on the CPU or an NVIDIA GPU, got one on DLPack device type {kind}")
    # The producer makes `stream` wait for what it has queued. In DLPack 0 is ambiguous, 1 is the legacy default stream.
    arguments = {"stream": stream or 1} if kind in _GPU_TYPES else {}
    try:
        try:
            capsule = array.__dlpack__(max_version=_MAX_DLPACK, **arguments)
        except TypeError:  # a producer from before versions
            capsule = array.__dlpack__(**arguments)
        address, num_elements, dtype, device, contiguous, read_only, copied = _core.read_dlpack(capsule)
    except (BufferError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    if not contiguous:
        raise _not_contiguous(name, "array")
    if writable and read_only:
        raise _read_only(name)
    if writable and copied:
        raise ValueError(f"{name}: expected an array to write into, got one that __dlpack__ hands out as a copy")
    return View(address, num_elements, dtype, device if kind in _GPU_TYPES else HOST, capsule)


def _cuda_view(array: Any, interface: Mapping[str, Any], name: str, writable: bool, stream: int, device: int) -> View:
    address, read_only = interface["data"]
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    if writable and read_only:
        raise _read_only(name)
    if interface.get("mask") is not None:
        raise _masked(name)
    strides = interface.get("strides")
    if strides is not None and not as_strided(np.empty(1, dtype), shape, strides).flags.c_contiguous:
        raise _not_contiguous(name, "array")
    if not dtype.isnative or dtype.kind not in "fiub":
        raise TypeError(
            f"{name}: expected float32 or float16 from __cuda_array_interface__, got {dtype.str!r}: it has no "
            "bfloat16, DLPack has"
        )
    producer = interface.get("stream")
    if producer == 0:
        raise ValueError(f"{name}: expected no stream 0 from __cuda_array_interface__, got one: it does not allow that")
    if producer is not None and int(producer) != (stream or 1):
        _core.wait_for(stream, int(producer), device)
    return View(int(address or 0), int(np.prod(shape, dtype=np.int64)), dtype.name, CURRENT_DEVICE, array)


def _masked(name: str) -> ValueError:
    return ValueError(f"{name}: expected an array without a mask, got one with a mask")


def _not_contiguous(name: str, kind: str) -> ValueError:
    return ValueError(f"{name}: expected a contiguous {kind}, got a non-contiguous one")


def _read_only(name: str, library: str = "") -> ValueError:
    advice = (
        ". JAX arrays are immutable: give a CuPy array, and make it a JAX array afterwards, without a copy, by "
        "jax.dlpack.from_dlpack"
    )
    message = f"{name}: expected a writable array, got a read-only one"
    return ValueError(message + advice if library in _IMMUTABLE else message)
