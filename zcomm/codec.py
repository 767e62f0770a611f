"""Encode and decode arrays on the host, without ranks: what a collective does to your numbers, for you to look at.

Arrays are NumPy arrays of float32, float16 or ml_dtypes.bfloat16, or torch CPU tensors of the same types; any shape,
contiguous. Formats are "exact", "bf16", "int8:B" and "int4:B", B a multiple of 32 from 32 to 4096.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from zcomm import _core

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = "NDArray[Any] | torch.Tensor"

ArrayT = TypeVar("ArrayT")
Wire: TypeAlias = NDArray[np.uint8]
VALUE_DTYPES = ("float32", "bfloat16", "float16")


def wire_bytes(format: str, dtype: str, num_elements: int) -> int:
    """Bytes of the wire of ``num_elements`` values of ``dtype`` ("float32", "bfloat16" or "float16")."""
    return int(_core.WireLayout(format, dtype, num_elements).num_bytes)


def encode(array: Array, format: str, *, isa: str = "") -> Wire:
    """The wire of ``array``. ``isa``: one of cpu_isas(); the fastest by default."""
    values = view_of(array, "array")
    wire = np.empty(wire_bytes(format, values[2], values[1]), np.uint8)
    _core.encode(values, format, wire.ctypes.data, isa)
    return wire


def decode(wire: Wire, format: str, out: ArrayT, *, isa: str = "") -> ArrayT:
    """Fills ``out`` with the values of ``wire``, and returns it. Finite values never become infinite."""
    values = view_of(out, "out", writable=True)
    _core.decode(_wire_of(wire, format, "wire", values), values, isa)
    return out


def decode_sum(wires: Sequence[tuple[Array, str]], out: ArrayT, *, factor: float = 1.0, isa: str = "") -> ArrayT:
    """Fills ``out`` with factor * (wires[0] + wires[1] + ...), added in that order in float32 and rounded once, and
    returns it. ``wires``: pairs of a wire and its format; beside "exact" an array of values may stand, too, even
    ``out``."""
    values = view_of(out, "out", writable=True)
    sources = [_wire_of(wire, format, f"wires[{i}]", values) for i, (wire, format) in enumerate(wires)]
    _core.decode_sum(sources, factor, values, isa)
    return out


def decode_sum_encode(
    wires: Sequence[tuple[Array, str]], num_elements: int, format: str, *, dtype: str = "float32", isa: str = ""
) -> Wire:
    """The wire of wires[0] + wires[1] + ...; ``dtype``: of the values in exact wires that are bytes."""
    values = (0, num_elements, dtype)
    sources = [_wire_of(wire, text, f"wires[{i}]", values) for i, (wire, text) in enumerate(wires)]
    encoded = np.empty(wire_bytes(format, "float32", num_elements), np.uint8)
    _core.decode_sum_encode(sources, num_elements, format, encoded.ctypes.data, isa)
    return encoded


def cpu_isas() -> list[str]:
    """Instruction sets to choose from on this machine, slowest first."""
    return list(_core.cpu_isas())


def view_of(array: Any, name: str, *, writable: bool = False) -> tuple[int, int, str]:
    """(address, number of elements, dtype) of an array of values; ``name`` is what messages call it."""
    address, num_elements, dtype = _raw_view(array, name, writable)
    if dtype not in VALUE_DTYPES:
        raise TypeError(f"{name}: got dtype {dtype}, expected float32, bfloat16 or float16")
    return address, num_elements, dtype


def _wire_of(wire: Any, format: str, name: str, values: tuple[int, int, str]) -> tuple[int, str, str]:
    """(address, format, dtype of the values) of a wire of as many values as ``values`` has."""
    _, num_elements, dtype = values
    address, given, wire_dtype = _raw_view(wire, name, writable=False)
    if format == "exact" and wire_dtype in VALUE_DTYPES:
        if given != num_elements:
            raise ValueError(f"{name}: got {given} values, expected {num_elements}")
        return address, format, wire_dtype
    if wire_dtype != "uint8":
        raise TypeError(f"{name}: got dtype {wire_dtype}, expected uint8")
    if given != (expected := wire_bytes(format, dtype, num_elements)):
        raise ValueError(
            f"{name}: got {given} bytes, expected {expected} for {num_elements} {dtype} values as {format}"
        )
    return address, format, dtype


def _raw_view(array: Any, name: str, writable: bool) -> tuple[int, int, str]:
    if isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: got a non-contiguous array, expected a contiguous one")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name}: got a read-only array, expected a writable one")
        return array.ctypes.data, array.size, array.dtype.name if array.dtype.isnative else str(array.dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise ValueError(f"{name}: got a tensor on {array.device}, expected one on the CPU")
        if array.layout is not torch.strided or not array.is_contiguous():
            raise ValueError(f"{name}: got a non-contiguous tensor, expected a contiguous one")
        return array.data_ptr(), array.numel(), str(array.dtype).removeprefix("torch.")
    raise TypeError(f"{name}: got {type(array).__name__}, expected a NumPy array or a torch CPU tensor")
