"""The groups of this process that have the backend "zcomm"."""

from __future__ import annotations

import atexit
import ctypes
import os

import torch.distributed as dist

from zcomm.distributed.binding import _c10d

_nodes: dict[object, list[int]] = {}  # of the ranks of a group, once they have compared
# Until they are shut down; torch holds groups in C++ alone, so weak ones would be dead.
_living: dict[object, _c10d.ProcessGroup] = {}


def register(key: object, backend: _c10d.ProcessGroup) -> None:
    """Keeps ``backend`` until ``forget(key)``."""
    _living[key] = backend


def forget(key: object) -> _c10d.ProcessGroup | None:
    """The backend that was registered as ``key``; None if it is forgotten already."""
    _nodes.pop(key, None)
    return _living.pop(key, None)


def set_nodes(key: object, nodes: list[int]) -> list[int]:
    """Keeps the node of each rank until ``forget(key)``. Returns ``nodes``."""
    _nodes[key] = nodes
    return nodes


def nodes_of(backend: _c10d.ProcessGroup) -> list[int]:
    """The node of each rank, as numbers: of a group that has made a collective."""
    return next(_nodes[key] for key, other in _living.items() if other is backend)


def is_over(key: object) -> bool:
    """Whether the backend was aborted, or shut down."""
    backend = _living.get(key)
    return backend is None or backend.is_aborted


def backend_of(group: dist.ProcessGroup | None = None) -> _c10d.ProcessGroup:
    """The zcomm backend of ``group`` (default: the world). Raises ValueError if it has none."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("group: torch.distributed is not initialized")
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _c10d.ProcessGroup):
            return backend
    raise ValueError("group: it was not made with the backend 'zcomm'")


def living_backends() -> list[_c10d.ProcessGroup]:
    """Of all groups that this process has not ended. Raises ValueError if there is none."""
    if not _living:
        raise ValueError("group: no process group has the backend 'zcomm'")
    return list(_living.values())


def _leave_to_parent() -> None:
    """In a forked child, which has neither the threads that the groups of its parent would join, nor their GPU."""
    for backend in _living.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # so that they never end here
    _living.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _shut_down_all() -> None:
    # A group that nobody destroyed has a thread that may need the interpreter, which is about to go.
    for backend in list(_living.values()):
        backend.shutdown()
