"""Registry of this process's groups with the backend "zcomm"."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcomm.distributed.binding import _c10d

# By the _Group of backend.py that made each. Strong references, until shutdown: torch holds groups only in C++, so weak
# ones would be dead.
living: dict[Any, _c10d.ProcessGroup] = {}


def backend_of(group: dist.ProcessGroup | None = None) -> _c10d.ProcessGroup:
    """Return the zcomm backend of ``group`` (default: the world). Raises ValueError if it has none."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("group: torch.distributed is not initialized")
    of_others: object = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns to other ranks
    if group == of_others:
        raise ValueError("group: expected one that this rank is in, got NON_GROUP_MEMBER")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, got {group!r}")
    backend = find_backend(group)
    if backend is None:
        backend_name = dist.get_backend(group)
        raise ValueError(
            f"group: expected the backend 'zcomm', as init_process_group('zcomm') has it, got {backend_name!r}"
        )
    return backend


def find_backend(group: dist.ProcessGroup) -> _c10d.ProcessGroup | None:
    """Return the zcomm backend of ``group``, or None."""
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _c10d.ProcessGroup):
            return backend
    return None


def living_backends() -> list[_c10d.ProcessGroup]:
    """Return the backends of all groups that this process has not shut down. Raises ValueError if there is none."""
    if not living:
        raise ValueError("group: no process group has the backend 'zcomm'")
    return list(living.values())


def dump_flight_recorder(prefix: str | os.PathLike[str]) -> Path:
    """Write the last collectives of all zcomm groups of this process to a file and return its path: ``prefix`` plus the
    rank, such as ``dumps/rank_3``. ``torchfrtrace dumps`` reads the files of all ranks, to analyze a hang.

    Thread-safe, also during a collective. Raises ValueError before ``init_process_group``, and OSError.
    """
    path = Path(f"{os.fspath(prefix)}{dist.get_rank()}")
    path.write_bytes(_c10d.flight_recorder_dump())
    return path


@functools.cache
def count_steps() -> None:
    """Call ``after_step`` of each _Group after every later step of one optimizer: the first that makes a step."""

    first: weakref.ref[Any] | None = None

    def count(optimizer: Any, *_: Any) -> None:
        nonlocal first
        if first is None or first() is None:
            first = weakref.ref(optimizer)
        if first() is optimizer:  # others belong to the same step
            for group, backend in list(living.items()):
                group.after_step(backend)

    register_optimizer_step_post_hook(count)


def _leave_to_parent() -> None:
    """Leak the groups in a forked child, which has neither the threads that they would join, nor their GPU."""
    for backend in living.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # so that they never end here
    living.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _shut_down_all() -> None:
    # Shuts down groups that nobody destroyed: their threads may need the interpreter, which is about to end.
    for backend in list(living.values()):
        backend.shutdown()
