"""Encode and decode arrays, without ranks, to see what a collective does to your numbers.

Arrays come from NumPy, torch or any library with DLPack or ``__cuda_array_interface__``. They are contiguous, of any
shape, of float32, float16 or bfloat16 (in NumPy: ml_dtypes), on the CPU or a GPU. All arrays of one call are on one
device; results have the same bits on every device.

Formats are "exact", "bf16", and "KIND:B". KIND is int8, int4, fp8, eden2, eden3 or eden4. B is a multiple of 32 from 32
to 4096, with eden a power of two up to 512. ":stochastic" may follow with int8 and int4. docs/wire_format.md specifies
them.

On a GPU, calls queue their work on ``stream`` and return at once: keep the arrays until the stream has passed the call.
``stream`` is a handle as an integer, or a stream of CuPy, torch, Numba or ``__cuda_stream__``. None is the current
stream of CuPy or torch if an array is theirs, else the legacy default stream. ``isa`` selects the CPU kernels: one of
cpu_isas(), by default the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import zcomm._core as _core
from zcomm._arrays import HOST, VALUE_DTYPES, Call, View, new_bytes
from zcomm.feedback import ErrorFeedback

__all__ = [
    "ErrorFeedback",
    "cpu_isas",
    "decode",
    "decode_difference",
    "decode_sum",
    "decode_sum_encode",
    "encode",
    "encode_difference",
    "set_step",
    "wire_bytes",
]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Array: TypeAlias = Any
Wire: TypeAlias = Any  # an array of uint8
Term: TypeAlias = tuple[Array, str] | tuple[Array, str, float]  # a wire or values, their format, a factor
ArrayT = TypeVar("ArrayT")


def wire_bytes(format: str, dtype: str, num_elements: int) -> int:
    """Return the bytes of the wire of ``num_elements`` values of ``dtype`` ("float32", "bfloat16" or "float16").

    >>> wire_bytes("int8:256", "bfloat16", 1 << 20)
    1056768
    """
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
    """Encode ``array`` and return its wire: ``out`` if given, else a new array. A new array is NumPy's on the CPU; on a
    GPU it belongs to the library of ``array``, which must be CuPy or torch. ``out`` must not overlap ``array``.

    ``seed`` (0 to 2^64 - 1) and ``first_element`` choose the random bits of stochastic formats. If ``array`` is a piece
    of a message, ``first_element`` is the index of its first element there, a multiple of 32: pieces then have the
    codes of the whole.

    >>> values = numpy.linspace(-1, 1, 1024, dtype="float32")
    >>> wire = encode(values, "int4:128")
    >>> values.nbytes, wire.nbytes
    (4096, 528)
    """
    call = Call(stream, array, out)
    values = call.values(array, "array")
    target, view = _target(call, out, wire_bytes(format, values.dtype, values.num_elements), array)
    _check_apart(view, values, "array")
    _core.encode(values.raw, format, view.address, *_place(call, isa), seed, first_element)
    return target


def decode(wire: Wire, format: str, out: ArrayT, *, isa: str = "", stream: Any = None) -> ArrayT:
    """Decode ``wire`` into ``out``, which it must not overlap, and return it. Finite values never become infinite.

    >>> values = numpy.linspace(-1, 1, 1024, dtype="float32")
    >>> decoded = decode(encode(values, "int8:128"), "int8:128", numpy.empty_like(values))
    >>> bool(abs(decoded - values).max() < 0.5 / 127 + 0.002)
    True
    """
    call = Call(stream, out, wire)
    values = call.values(out, "out", writable=True)
    view, format, dtype = _wire_of(call, wire, format, "wire", values.raw)
    _check_apart(values, view, "wire")
    _core.decode((view.address, format, dtype), values.raw, *_place(call, isa))
    return out


def decode_sum(wires: Sequence[Term], out: ArrayT, *, factor: float = 1.0, isa: str = "", stream: Any = None) -> ArrayT:
    """Fill ``out`` with factor * (wires[0] + wires[1] + ...), added in float32 and rounded once, and return it.

    ``wires`` are tuples (wire, format[, factor]). With "exact", a wire may be an array of values, including ``out``.
    Rotated wires are added first, in the order given; then the others.

    >>> ones = numpy.ones(256, "float32")
    >>> wires = [(encode(ones, "int8:128"), "int8:128"), (ones, "exact")]
    >>> round(float(decode_sum(wires, numpy.empty_like(ones), factor=0.5)[0]), 3)
    1.0
    """
    call = Call(stream, out, *(wire for wire, *_ in wires))
    values = call.values(out, "out", writable=True)
    num_bytes = wire_bytes("exact", values.dtype, values.num_elements)
    terms = _apart_from(values, num_bytes, _terms_of(call, wires, values.raw), values.num_elements)
    _core.decode_sum(terms, factor, values.raw, *_place(call, isa))
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
    """Encode wires[0] + wires[1] + ..., added as in decode_sum, and return the wire. ``dtype`` is the type of the
    values in exact wires given as bytes. ``out`` is as in encode, or one of the wires if it has the same format.
    ``seed`` and ``first_element`` are as in encode.

    >>> wire = encode(numpy.ones(256, "float32"), "int8:128")
    >>> total = decode_sum_encode([(wire, "int8:128")] * 3, 256, "int4:128")
    >>> round(float(decode(total, "int4:128", numpy.empty(256, "float32"))[0]), 1)
    3.0
    """
    call = Call(stream, out, *(wire for wire, *_ in wires))
    terms = _terms_of(call, wires, (0, num_elements, dtype))
    like = wires[0][0] if wires else None
    target, view = _target(call, out, wire_bytes(format, "float32", num_elements), like)
    addresses = _apart_from(view, view.num_bytes, terms, num_elements)
    _core.decode_sum_encode(addresses, num_elements, format, view.address, *_place(call, isa), seed, first_element)
    return target


def encode_difference(values: Array, base: Array, *, isa: str = "") -> tuple[Wire, int]:
    """Encode the lossless difference of ``values`` to ``base``, bfloat16 or float16 on the CPU, or an even number of
    elements of 8 bits. Return it as a new NumPy array of uint8, and the hash of ``values``. Copies ``values`` to
    ``base``, for the next difference.

    >>> base = numpy.full(4096, 1, "float16")
    >>> body, hash_of_values = encode_difference(numpy.full(4096, 1.001, "float16"), base)
    >>> base.nbytes, body.nbytes
    (8192, 1568)
    """
    new, old = _halves_of(values, "values"), _halves_of(base, "base", writable=True)
    if old.overlaps(new):
        raise ValueError("base: expected memory apart from values, got some that overlaps it")
    call = Call(None, device=HOST)
    body, view = _target(call, None, _core.max_lossless_bytes(new.num_bytes // 2), None)
    num_bytes, hash_of_values = _core.encode_difference(_raw_halves(new), _raw_halves(old), view.address, isa)
    return body[:num_bytes], hash_of_values


def decode_difference(body: Wire, base: ArrayT, *, isa: str = "") -> tuple[ArrayT, int]:
    """Add a difference to ``base``; return ``base`` and its hash. The hash equals encode_difference's if ``base`` was
    the same. Raises RuntimeError if no encoder wrote ``body``.

    >>> body, sent = encode_difference(numpy.ones(4096, "float16"), numpy.zeros(4096, "float16"))
    >>> values, received = decode_difference(body, numpy.zeros(4096, "float16"))
    >>> float(values[0]), sent == received
    (1.0, True)
    """
    wire = Call(None, device=HOST).any(body, "body")
    if wire.dtype != "uint8":
        raise TypeError(f"body: expected dtype uint8, got {wire.dtype}")
    hash_of_values = _core.decode_difference(
        wire.address, wire.num_elements, _raw_halves(_halves_of(base, "base", writable=True)), isa
    )
    return base, hash_of_values


def _halves_of(array: Array, name: str, *, writable: bool = False) -> View:
    """Return the view of an array whose lossless differences are made."""
    call = Call(None, device=HOST)
    view = call.any(array, name, writable=writable)
    if not _has_bytes(view):
        return call.values(array, name, writable=writable)
    if view.num_elements % 2:
        raise ValueError(f"{name}: expected an even number of {view.dtype}, got {view.num_elements}")
    return view


def _has_bytes(view: View) -> bool:
    return view.dtype in ("uint8", "int8") or view.dtype.startswith("float8")


def _raw_halves(view: View) -> tuple[int, int, str]:
    return (view.address, view.num_elements // 2, "byte_pairs") if _has_bytes(view) else view.raw


def cpu_isas() -> list[str]:
    """Return the instruction sets that this machine supports, slowest first."""
    return list(_core.cpu_isas())


def set_step(step: int, group: ProcessGroup | None = None) -> None:
    """Formats with ``:stochastic`` draw their random bits anew from here: bits that depend on ``step``, any number, on
    the compressed calls since, and on the rank. Called at the start of every training step, with its number, it makes a
    run that is resumed draw what it would have drawn. A CUDA graph repeats the bits of its capture.

    For ``compress="auto"`` the last step ends here, as it does where an optimizer of torch steps.

    Raises ValueError if ``group`` (default: all groups of this process) has no zcomm backend.

    Example::

        for step, batch in enumerate(batches, first_step):
            zcomm.codec.set_step(step)
            train(batch)
    """
    from zcomm.distributed.groups import backend_of, living_backends

    for backend in [backend_of(group)] if group is not None else living_backends():
        backend.set_step(step % 2**64)


def view_of(array: Any, name: str, *, writable: bool = False) -> tuple[int, int, str]:
    """Return (address, number of elements, dtype) of an array of values on the CPU; ``name`` is for messages."""
    return Call(None, device=HOST).values(array, name, writable=writable).raw


def _place(call: Call, isa: str) -> tuple[str, int, int]:
    if isa and call.device != HOST:
        raise ValueError(f"isa: expected none for arrays on {call.where}, got {isa!r}")
    return isa, call.device, call.stream


def _check_apart(out: View, read: View, name: str, exception: str = "") -> None:
    """Raise ValueError if memory is read after it is written."""
    if out.overlaps(read):
        raise ValueError(f"out: expected memory apart from {name}{exception}, got some that overlaps it")


def _target(call: Call, out: Any, num_bytes: int, like: Any) -> tuple[Any, View]:
    """Return an array for a wire, and its view."""
    target = new_bytes(num_bytes, call, like, "out") if out is None else out
    view = call.any(target, "out", writable=True)
    if view.dtype != "uint8":
        raise TypeError(f"out: expected dtype uint8, got {view.dtype}")
    if view.num_elements != num_bytes:
        raise ValueError(f"out: expected {num_bytes} bytes, got {view.num_elements}")
    return target, view


def _terms_of(call: Call, wires: Sequence[Term], values: tuple[int, int, str]) -> list[tuple[View, str, str, float]]:
    """Return (view, format, dtype of the values, factor) per wire; each has as many values as ``values``."""
    terms = []
    for i, (wire, format, *factor) in enumerate(wires):
        terms.append((*_wire_of(call, wire, format, f"wires[{i}]", values), *(factor or (1.0,))))
    return terms


def _apart_from(
    out: View, num_bytes: int, terms: list[tuple[View, str, str, float]], num_elements: int
) -> list[tuple[int, str, str, float]]:
    """Return the terms with their addresses. Raises ValueError if one overlaps ``out``, a wire of ``num_bytes`` or its
    values, unless it is all of it."""
    for i, (view, format, dtype, _) in enumerate(terms):
        # Compares bytes of wires: an exact one has padding, which its values may lack.
        if view.address != out.address or wire_bytes(format, dtype, num_elements) != num_bytes:
            _check_apart(out, view, f"wires[{i}]", ", or all of it")
    return [(view.address, format, dtype, factor) for view, format, dtype, factor in terms]


def _wire_of(call: Call, wire: Any, format: str, name: str, values: tuple[int, int, str]) -> tuple[View, str, str]:
    """Return (view, format, dtype of the values) of a wire with as many values as ``values``."""
    _, num_elements, dtype = values
    view = call.any(wire, name)
    if format == "exact" and view.dtype in VALUE_DTYPES:
        if view.num_elements != num_elements:
            raise ValueError(f"{name}: expected {num_elements} values, got {view.num_elements}")
        return view, format, view.dtype
    if view.dtype != "uint8":
        raise TypeError(f"{name}: expected dtype uint8, got {view.dtype}")
    if view.num_elements != (expected := wire_bytes(format, dtype, num_elements)):
        raise ValueError(
            f"{name}: expected {expected} bytes for {num_elements} {dtype} values as {format}, got {view.num_elements}"
        )
    return view, format, dtype
