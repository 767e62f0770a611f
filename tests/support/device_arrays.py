"""Arrays as libraries for GPUs hand them out, over memory of the host: objects with ``__dlpack__`` or
``__cuda_array_interface__`` and nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

CPU, CUDA, PINNED, ROCM, MANAGED = 1, 2, 3, 10, 13
READ_ONLY, COPIED = 1, 2
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "c": 5, "b": 6}  # ml_dtypes' bfloat16 is V


class DlpackTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DlpackTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DlpackTensor),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Dlpack:
    """``array`` as a producer of DLPack hands it out. ``fields``: of DlpackTensor, to differ from the array's."""

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        device: tuple[int, int] = (CUDA, 0),
        *,
        version: tuple[int, int] | None = (1, 0),
        flags: int = 0,
        name: bytes | None = None,
        with_strides: bool = True,
        **fields: Any,
    ) -> None:
        self.array, self.place, self.streams = array, device, []
        self._version, self._flags, self._fields = version, flags, fields
        self._name = name or (b"dltensor" if version is None else b"dltensor_versioned")
        self._with_strides = with_strides
        self._kept: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> object:
        assert max_version is not None
        return self._export(stream)

    def _export(self, stream: Any) -> object:
        self.streams.append(stream)
        array = self.array
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        values = {
            "data": array.ctypes.data,
            "device_type": self.place[0],
            "device_id": self.place[1],
            "ndim": array.ndim,
            "code": _CODES[array.dtype.kind],
            "bits": 8 * array.itemsize,
            "lanes": 1,
            "shape": shape,
            "strides": strides if self._with_strides else None,
        }
        tensor = DlpackTensor(**{**values, **self._fields})
        if self._version is None:
            managed: Any = Managed(tensor=tensor)
        else:
            managed = ManagedVersioned(*self._version, None, None, self._flags, tensor)
        self._kept.append((shape, strides, managed))
        return _new_capsule(ctypes.addressof(managed), self._name, None)


class OldDlpack(Dlpack):
    """A producer from before versions."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (CUDA, 0), **fields: Any) -> None:
        super().__init__(array, device, version=None, **fields)

    def __dlpack__(self, *, stream: Any = None) -> object:  # type: ignore[override]
        return self._export(stream)


class CudaInterface:
    """``array`` by ``__cuda_array_interface__``, whose entries ``fields`` replace."""

    def __init__(self, array: np.ndarray[Any, Any], **fields: Any) -> None:
        self.array = array
        plain = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
        }
        self.__cuda_array_interface__ = {**plain, **fields}


class Exported:
    """Only the DLPack side of an array of another library."""

    def __init__(self, array: Any) -> None:
        self.__array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.__array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, **arguments: Any) -> object:
        return self.__array.__dlpack__(**arguments)
