"""Which calls are compressed, for a stretch of code."""

from __future__ import annotations

import ctypes
import sys
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of, living_backends


class override:
    """Changes options for the calls of this thread (and of the backward passes that it starts) inside a ``with`` block.

    Takes the fields of :class:`zcomm.Options` except ``node_size`` and ``chunk_bytes``. An inner override changes only
    what it names. All ranks of a group must override the same calls in the same way: a rank that compresses a call
    which another sends exactly waits for it until the timeout.
    """

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        _c10d.PolicyOverride(**fields)  # raises on a wrong field now, not at the first call
        self._outer: list[_Active | None] = []

    def __enter__(self) -> override:
        outer = _active()
        self._outer.append(outer)
        _activate(_Active({**(outer.fields if outer else {}), **self._fields}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _activate(self._outer.pop())


def exact() -> override:
    """Nothing is compressed inside this ``with`` block: metrics, checkpoints, comparisons."""
    return override(all_gather="exact", reduce_scatter="exact", all_reduce="exact")


def set_step(step: int, group: dist.ProcessGroup | None = None) -> None:
    """Formats with ``:stochastic`` draw their random bits anew from here: bits that depend on ``Options(seed=)``, this
    step, the number of compressed calls since, and the rank. Called at the start of every training step, with its
    number, it makes a run that is resumed draw what it would have drawn. A CUDA graph repeats the bits of its capture.

    Raises ValueError if ``step`` is negative or ``group`` (default: all groups of this process) has no zcomm backend.
    """
    if step < 0:
        raise ValueError(f"step: expected 0 or more, got {step}")
    for backend in [backend_of(group)] if group is not None else living_backends():
        backend.set_step(step)


class _Active(_c10d.PolicyOverride):
    """An override with all fields of its outer ones, which the C++ side reads, and the fields to extend it by."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self.fields = fields


def _active() -> _Active | None:
    return torch._C._get_obj_in_tls(_c10d.OVERRIDE_KEY) if torch._C._is_key_in_tls(_c10d.OVERRIDE_KEY) else None


def _activate(active: _Active | None) -> None:
    if _STASH_TAKES_NO_REFERENCE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(active))
    torch._C._stash_obj_in_tls(_c10d.OVERRIDE_KEY, active)


def _stash_takes_no_reference() -> bool:
    """Whether this torch, as 2.11 does, later gives back a reference that it never took."""
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls("zcomm.probe", probe)
    taken = sys.getrefcount(probe) - before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return not taken


_STASH_TAKES_NO_REFERENCE = _stash_takes_no_reference()
