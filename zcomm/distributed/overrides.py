"""Overrides of options for a block of code."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from zcomm._formats import Format, Forms, Groups
from zcomm.distributed import _dtensor
from zcomm.distributed.binding import _c10d
from zcomm.distributed.options import given_of

if TYPE_CHECKING:
    from typing_extensions import Never, Self


class _Change:
    """A ``with`` block with other options. Threads may share it, as their state has what is in force."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __enter__(self) -> Self:
        _activate(_Active(self._fields, _active()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        active = _active()
        _activate(active.outer if active else None)


class override(_Change):
    """Change options for the calls of this thread (and of the backward passes that it starts) inside a ``with`` block.

    The arguments are those of :class:`zcomm.Options`. An inner override changes only what it names. All ranks of a
    group must override the same calls in the same way: a rank that compresses a call which another sends exactly waits
    for it until the timeout. Callbacks of futures may run on another thread: override inside of them.

    Example::

        with zcomm.override(reduce_scatter="int8:128"):  # 8-bit gradients in these steps
            train_step(model)
    """

    def __init__(
        self,
        *,
        compress: Literal["always", "auto"] | None = None,
        all_gather: Format | None = None,
        reduce_scatter: Format | None = None,
        all_reduce: Format | None = None,
        exchanges: Format | None = None,
        min_bytes: int | None = None,
        forms: Forms | None = None,
        groups: Groups | None = None,
        strict: bool | None = None,
        **unknown: Never,
    ) -> None:
        super().__init__({**given_of(locals()), **unknown})
        _c10d.PolicyOverride(**self._fields)  # raises on a wrong field now, not at the first call
        if "traced" in f"{forms}{groups}":
            tell_apart_what_is_traced()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing overrides the calls in this block, whatever is in force around it."""
    active = _active()
    _activate(None)
    try:
        yield
    finally:
        _activate(active)


def forced_exact(because: _c10d.Verdict) -> _Change:
    """Calls stay exact, and are counted by this reason."""
    return _Change({"_exact_because": because})


def known(*, copies: bool = True, **formats: str) -> _Change:
    """Calls carry weights or gradients for certain, so that no form has to be opted in. ``copies``: no optimizer steps
    the slots that are gathered in place. ``formats``: ``_weights`` of gathers, and ``_gradients`` of reductions,
    all-reduces and all-to-alls, "" for those of the group's reduce-scatters. Formats of an override win."""
    return _Change({"_known": copies, **formats})


def all_reduce_of(group: _c10d.ProcessGroup, formats: str) -> _Change:
    """All-reduces of this group have these formats, unless an inner override names others."""
    return _Change({"_all_reduce_of": (group, formats)})


@functools.cache
def tell_apart_what_is_traced() -> None:
    """Exclude DTensor's own redistributions, such as full state dicts, from the calls of compiled graphs."""
    _dtensor.around_redistributions(lambda: _Change({"_drops_traced": True}))


def exact() -> override:
    """Nothing is compressed inside this ``with`` block, and torch's own backends make all calls: metrics, checkpoints,
    comparisons.

    Example::

        with zcomm.exact():
            dist.all_reduce(loss)
    """
    return override(all_gather="exact", reduce_scatter="exact", all_reduce="exact", exchanges="exact")


def overridden(field: str) -> Any:
    """Return what the :class:`override` around this thread has of ``field``; None if it has nothing."""
    active = _active()
    return active.fields.get(field) if active is not None else None


class _Active(_c10d.PolicyOverride):
    """Override with all fields of its outer ones, for the C++ side, and the same fields for inner overrides."""

    def __init__(self, fields: dict[str, Any], outer: _Active | None) -> None:
        self.fields: dict[str, Any] = {**(outer.fields if outer else {}), **fields}
        self.outer = outer  # what its block puts back
        super().__init__(**self.fields)


def _active() -> _Active | None:
    return torch._C._get_obj_in_tls(_c10d.OVERRIDE_KEY) if torch._C._is_key_in_tls(_c10d.OVERRIDE_KEY) else None


def _activate(active: _Active | None) -> None:
    if _STASH_TAKES_NO_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(active))
    torch._C._stash_obj_in_tls(_c10d.OVERRIDE_KEY, active)


def _stash_takes_no_reference() -> bool:
    """Tell whether this torch, like 2.11, later releases a reference that it never took."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("zcomm.probe", probe)
    taken = sys.getrefcount(probe) - before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return not taken


_STASH_TAKES_NO_REFERENCE = _stash_takes_no_reference()
