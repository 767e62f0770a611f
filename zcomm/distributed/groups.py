"""Registry of this process's groups with the backend "zcomm"."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import functools
import logging
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcomm.distributed import environment
from zcomm.distributed.binding import TORCH, _c10d

_log = logging.getLogger("zcomm")

# By the _Group of backend.py that made each. Strong references, until shutdown: torch holds groups only in C++, so weak
# ones would be dead.
living: dict[Any, _c10d.ProcessGroup] = {}


@dataclass
class Use:
    """What this process has asked of zcomm, for :func:`_tell_if_idle`."""

    has_options: bool = False
    rank: int | None = None  # in the world, of a process that has made a group
    most_ranks: int = 0  # of its groups
    has_called: bool = False  # a group


use = Use()


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
        if backend_name == "zcomm":
            raise ValueError("group: expected reconfigure() before its first use, as it has enable_reconfigure")
        raise ValueError(
            f"group: expected the backend 'zcomm', as init_process_group('zcomm') has it, got {backend_name!r}"
        )
    return backend


def find_backend(group: dist.ProcessGroup) -> _c10d.ProcessGroup | None:
    """Return the zcomm backend of ``group``, of its present members if they change; or None."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        if TORCH >= (2, 14) and isinstance(backend, _c10d.ElasticGroup):
            backend = backend.members
        if isinstance(backend, _c10d.ProcessGroup):
            return backend
    return None


@functools.cache
def watch_descriptions() -> None:
    """Give each backend its group's description: under TORCH_DISTRIBUTED_DEBUG=DETAIL torch describes its own wrapper
    of the backend alone."""
    describe = dist.ProcessGroup._set_group_desc

    @functools.wraps(describe)
    def set_group_desc(group: dist.ProcessGroup, description: str) -> None:
        describe(group, description)
        backend = find_backend(group)
        if backend is not None:
            backend.description = description

    dist.ProcessGroup._set_group_desc = set_group_desc  # type: ignore[method-assign, assignment]


@functools.cache
def watch_timeouts() -> None:
    """Let ``_set_pg_timeout``, by which trainers shorten timeouts, reach zcomm: before torch 2.14 it leaves out all
    backends but NCCL's and Gloo's."""
    if hasattr(dist, "set_timeout"):
        return
    set_timeout = distributed_c10d._set_pg_timeout

    @functools.wraps(set_timeout)
    def set_pg_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
        of_group = group if group is not None else dist.group.WORLD
        if not isinstance(of_group, dist.ProcessGroup) or find_backend(of_group) is None:
            set_timeout(timeout, group)
        else:
            of_group.set_timeout(timeout)

    distributed_c10d._set_pg_timeout = set_pg_timeout


def living_backends() -> list[_c10d.ProcessGroup]:
    """Return the backends of all groups that this process has not shut down. Raises ValueError if there is none."""
    if not living:
        raise ValueError("group: no process group has the backend 'zcomm'")
    return list(living.values())


def dump_flight_recorder(prefix: str | os.PathLike[str]) -> Path:
    """Write the last collectives of all zcomm groups of this process to a file and return its path: ``prefix`` plus the
    rank, such as ``dumps/rank_3``. ``torchfrtrace dumps`` reads the files of all ranks, to analyze a hang.

    Thread-safe, also during a collective. Raises ValueError before ``init_process_group``, and OSError.

    Example::

        zcomm.dump_flight_recorder("dumps/rank_")
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
    use.__dict__.update(Use().__dict__)


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _shut_down_all() -> None:
    # Shuts down groups that nobody destroyed: their threads may need the interpreter, which is about to end.
    for backend in list(living.values()):
        backend.shutdown()
    if getattr(sys, "last_value", None) is None:  # an error has told more
        _tell_if_idle()


def _tell_if_idle() -> None:
    """Warn on rank 0 of a job that asked for zcomm and never called it: its ranks may train each on its own."""
    rank, size = environment.launched()
    rank, size = use.rank if use.rank is not None else rank, max(size, use.most_ranks)
    if use.has_called or rank > 0 or size < 2 or not (use.has_options or use.most_ranks):
        return
    why = "its zcomm groups were never called: the trainer uses other groups, or each rank trains on its own"
    if not use.most_ranks:
        why = "zcomm.Options are for groups of the backend 'zcomm', and none was made: init_process_group('zcomm')"
    _log.warning("zcomm compressed nothing in this job of %d ranks: %s", size, why)
