"""Encode and decode arrays, without ranks: what a collective does to your numbers, for you to look at.

Arrays are those of NumPy, torch and any library that speaks DLPack or ``__cuda_array_interface__``, on the CPU or on a
GPU, of float32, float16 or bfloat16 (in NumPy: that of ml_dtypes); any shape, contiguous. Formats are "exact", "bf16",
and "KIND:B", KIND one of int8, int6, int4, int2 and fp8 and B a multiple of 32 from 32 to 4096, which ":hadamard" and
":stochastic" may follow; docs/wire_format.md says what they are. The arrays of one call lie on one device; on every
device the bits are the same.

On a GPU calls are queued on ``stream`` and return at once: keep the arrays until the stream has passed the call.
``stream`` is a handle as an integer or a stream of CuPy, torch, Numba or ``__cuda_stream__``; None is the current
stream of CuPy or torch if an array is theirs, else the legacy default stream. ``isa`` is for the CPU: one of
cpu_isas(), the fastest by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

from zcomm import _core
from zcomm._arrays import HOST, VALUE_DTYPES, Call, new_bytes

Array: TypeAlias = Any
Wire: TypeAlias = Any  # an array of uint8
Term: TypeAlias = tuple[Array, str] | tuple[Array, str, float]  # a wire or values, their format, a factor
ArrayT = TypeVar("ArrayT")


def wire_bytes(format: str, dtype: str, num_elements: int) -> int:
    """Bytes of the wire of ``num_elements`` values of ``dtype`` ("float32", "bfloat16" or "float16")."""
    return int(_core.WireLayout(format, dtype, num_elements).num_bytes)


def encode(
    array: Array,
    format: str,
    *,
    seed: int = 0,
    first_element: int = 0,
    isa: str = "",
    out: Wire | None = None,
    stream: Any = None,
) -> Wire:
    """The wire of ``array``, in ``out`` if that is given, else in a new array: NumPy's on the CPU, on a GPU that of the
    library of ``array``, if it is CuPy or torch.

    ``seed`` (0 to 2^64 - 1) and ``first_element`` choose the random bits of stochastic formats. If ``array`` is a piece
    of a message, ``first_element`` is the index of its first element there, a multiple of 32: pieces then have the
    codes of the whole."""
    return encode_in(Call(stream, array, out), array, format, isa, out, seed, first_element)


def decode(wire: Wire, format: str, out: ArrayT, *, isa: str = "", stream: Any = None) -> ArrayT:
    """Fills ``out`` with the values of ``wire``, and returns it. Finite values never become infinite."""
    return decode_in(Call(stream, out, wire), wire, format, out, isa)


def decode_sum(wires: Sequence[Term], out: ArrayT, *, factor: float = 1.0, isa: str = "", stream: Any = None) -> ArrayT:
    """Fills ``out`` with factor * (wires[0] + wires[1] + ...), added in float32 and rounded once, and returns it: first
    the wires that are rotated, in the order given, then the others. ``wires``: a wire, its format and, if it is not 1,
    a factor of its own; beside "exact" an array of values may stand, too, even ``out``."""
    call = Call(stream, out, *(wire for wire, *_ in wires))
    values = call.values(out, "out", writable=True).raw
    _core.decode_sum(_terms_of(call, wires, values), factor, values, *_place(call, isa))
    return out


def decode_sum_encode(
    wires: Sequence[Term],
    num_elements: int,
    format: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    first_element: int = 0,
    isa: str = "",
    out: Wire | None = None,
    stream: Any = None,
) -> Wire:
    """The wire of wires[0] + wires[1] + ..., added as in decode_sum; ``dtype``: of the values in exact wires that are
    bytes. ``out``: as in encode, or one of the wires that has the same format. ``seed``, ``first_element``: as in
    encode."""
    call = Call(stream, out, *(wire for wire, *_ in wires))
    terms = _terms_of(call, wires, (0, num_elements, dtype))
    like = wires[0][0] if wires else None
    target, address = _target(call, out, wire_bytes(format, "float32", num_elements), like)
    _core.decode_sum_encode(terms, num_elements, format, address, *_place(call, isa), seed, first_element)
    return target


def encode_difference(values: Array, base: Array, *, isa: str = "") -> tuple[Wire, int]:
    """The lossless difference of ``values`` to ``base``, bfloat16 or float16 on the CPU, as a new NumPy array of uint8,
    and the hash of ``values``. Writes ``values`` to ``base``, too: the next difference is to these."""
    new, old = view_of(values, "values"), view_of(base, "base", writable=True)
    call = Call(None, device=HOST)
    body, address = _target(call, None, _core.max_difference_bytes(new[1]), None)
    num_bytes, hash_of_values = _core.encode_difference(new, old, address, isa)
    return body[:num_bytes], hash_of_values


def decode_difference(body: Wire, base: ArrayT, *, isa: str = "") -> tuple[ArrayT, int]:
    """Adds a difference to ``base``, and returns it and its hash: that of encode_difference, if ``base`` was the same.
    Raises RuntimeError if no encoder wrote ``body``."""
    wire = Call(None, device=HOST).any(body, "body")
    if wire.dtype != "uint8":
        raise TypeError(f"body: expected dtype uint8, got {wire.dtype}")
    hash_of_values = _core.decode_difference(wire.address, wire.num_elements, view_of(base, "base", writable=True), isa)
    return base, hash_of_values


def cpu_isas() -> list[str]:
    """Instruction sets to choose from on this machine, slowest first."""
    return list(_core.cpu_isas())


def view_of(array: Any, name: str, *, writable: bool = False) -> tuple[int, int, str]:
    """(address, number of elements, dtype) of an array of values on the CPU; ``name`` is what messages call it."""
    return Call(None, device=HOST).values(array, name, writable=writable).raw


def encode_in(
    call: Call, array: Array, format: str, isa: str, out: Wire | None, seed: int = 0, first_element: int = 0
) -> Wire:
    """encode() within ``call``."""
    values = call.values(array, "array")
    target, address = _target(call, out, wire_bytes(format, values.dtype, values.num_elements), array)
    _core.encode(values.raw, format, address, *_place(call, isa), seed, first_element)
    return target


def decode_in(call: Call, wire: Wire, format: str, out: ArrayT, isa: str) -> ArrayT:
    """decode() within ``call``."""
    values = call.values(out, "out", writable=True).raw
    _core.decode(_wire_of(call, wire, format, "wire", values), values, *_place(call, isa))
    return out


def _place(call: Call, isa: str) -> tuple[str, int, int]:
    if isa and call.device != HOST:
        raise ValueError(f"isa: expected none for arrays on {call.where}, got {isa!r}")
    return isa, call.device, call.stream


def _target(call: Call, out: Any, num_bytes: int, like: Any) -> tuple[Any, int]:
    """An array for a wire, and its address."""
    target = new_bytes(num_bytes, call, like, "out") if out is None else out
    view = call.any(target, "out", writable=True)
    if view.dtype != "uint8":
        raise TypeError(f"out: expected dtype uint8, got {view.dtype}")
    if view.num_elements != num_bytes:
        raise ValueError(f"out: expected {num_bytes} bytes, got {view.num_elements}")
    return target, view.address


def _terms_of(call: Call, wires: Sequence[Term], values: tuple[int, int, str]) -> list[tuple[int, str, str, float]]:
    """(address, format, dtype of the values, factor) of wires of as many values as ``values`` has."""
    terms = []
    for i, (wire, format, *factor) in enumerate(wires):
        terms.append((*_wire_of(call, wire, format, f"wires[{i}]", values), *(factor or (1.0,))))
    return terms


def _wire_of(call: Call, wire: Any, format: str, name: str, values: tuple[int, int, str]) -> tuple[int, str, str]:
    """(address, format, dtype of the values) of a wire of as many values as ``values`` has."""
    _, num_elements, dtype = values
    view = call.any(wire, name)
    if format == "exact" and view.dtype in VALUE_DTYPES:
        if view.num_elements != num_elements:
            raise ValueError(f"{name}: expected {num_elements} values, got {view.num_elements}")
        return view.address, format, view.dtype
    if view.dtype != "uint8":
        raise TypeError(f"{name}: expected dtype uint8, got {view.dtype}")
    if view.num_elements != (expected := wire_bytes(format, dtype, num_elements)):
        raise ValueError(
            f"{name}: expected {expected} bytes for {num_elements} {dtype} values as {format}, got {view.num_elements}"
        )
    return view.address, format, dtype
