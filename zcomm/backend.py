"""Makes the process groups of ``torch.distributed.init_process_group("zcomm")``."""

from __future__ import annotations

import atexit
import datetime
import importlib
import json
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zcomm import environment
from zcomm._version import __version__


def _load() -> Any:
    running = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    try:
        _c10d: Any = importlib.import_module("zcomm._c10d")
    except ImportError as error:
        raise ImportError(
            f"zcomm's torch binding does not load in torch {running}: a build serves one minor version of torch. "
            "Reinstall zcomm against this torch with 'pip install --no-build-isolation --force-reinstall --no-deps'. "
            f"The loader said: {error}"
        ) from error
    built = ".".join(_c10d.torch_version.split(".")[:2])
    if built != running:
        raise ImportError(
            f"zcomm was built for torch {built}, and this is torch {running}: reinstall zcomm against this torch with "
            "'pip install --no-build-isolation --force-reinstall --no-deps'"
        )
    return _c10d


_c10d: Any = _load()


class Options(_c10d.Options):  # type: ignore[misc]
    """How a group compresses: ``pg_options=`` of ``init_process_group`` and ``new_group``. Immutable.

    Args (None: the ``ZCOMM_*`` environment variable of the same name, else the default):
        all_gather: a format, default ``"int8:256"``.
        reduce_scatter: ``"INSIDE/BETWEEN"`` nodes, or one format for both; default ``"int8:128/int4:128"``.
        all_reduce: like ``reduce_scatter``; default ``"exact"``. The sum is gathered in the INSIDE format.
        min_bytes: smaller tensors (as gathered, scattered or reduced) stay exact; default 65536.
        out_of_place: compress all-gathers whose input is not its own slot of the output, too; default False.
        lists: compress list forms, too; default False.
        coalesced: compress coalesced forms, too; default False.
        strict: raise where a floating-point call of at least ``min_bytes`` would stay exact for any reason but its
            format; default False.
        node_size: ranks per node in rank order, for virtual nodes; default: found from the launcher or the host.
        chunk_bytes: values of a shard that travel as one piece, in bytes; default 1 MiB.

    A format is ``"exact"``, ``"bf16"``, ``"int8:B"`` or ``"int4:B"``, B a multiple of 32 from 32 to 4096 elements.
    Raises ValueError or TypeError that names the field, what was given and what is accepted.
    """

    def __init__(
        self,
        *,
        all_gather: str | None = None,
        reduce_scatter: str | None = None,
        all_reduce: str | None = None,
        min_bytes: int | None = None,
        out_of_place: bool | None = None,
        lists: bool | None = None,
        coalesced: bool | None = None,
        strict: bool | None = None,
        node_size: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__") and v is not None}
        super().__init__(**{**environment.option_fields(), **given})


_log = logging.getLogger("zcomm")
if environment.log_level() == "info":
    _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def create_backend(distributed: Any, pg_options: Any) -> Any:
    """The creator that torch calls for each group. ``distributed`` is its _DistributedBackendOptions."""
    options = _resolve(pg_options)
    timeout = distributed.timeout
    options._timeout = timeout
    options.group_name = distributed.group_id
    options.global_ranks_in_group = distributed.global_ranks_in_group
    return _make(
        distributed.store,
        distributed.group_rank,
        distributed.group_size,
        options,
        timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout),
    )


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    """The zcomm backend of ``group`` (default: the world). Raises ValueError if it has none."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError("group: torch.distributed is not initialized")
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, _c10d.ProcessGroup):
            return backend
    raise ValueError("group: it was not made with the backend 'zcomm'")


def _resolve(pg_options: Any) -> Any:
    if pg_options is None:
        return Options()
    if not isinstance(pg_options, _c10d.Options):
        raise TypeError(f"pg_options: got {type(pg_options).__name__}, need zcomm.Options or None")
    return pg_options.__copy__()


def _make_gloo(store: Any, rank: int, size: int, timeout: datetime.timedelta, options: Any) -> dist.ProcessGroupGloo:
    group = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group.options.group_name = options.group_name
    group.options.global_ranks_in_group = options.global_ranks_in_group
    group._set_sequence_number_for_group()
    return group


def _make(store: Any, rank: int, size: int, options: Any, timeout: datetime.timedelta) -> Any:
    def prefixed(name: str) -> PrefixStore:
        return PrefixStore(f"zcomm/{name}", store)

    def split(child_store: Any, ranks: list[int], child_options: Any) -> Any:
        resolved = _resolve(child_options if isinstance(child_options, _c10d.Options) else options)
        if child_options is not None:
            resolved.group_name = child_options.group_name
            resolved._timeout = child_options._timeout
            resolved.global_ranks_in_group = child_options.global_ranks_in_group
        return _make(child_store, ranks.index(rank), len(ranks), resolved, resolved._timeout)

    def summarize() -> None:
        from zcomm.statistics import stats_of

        _log.info("group '%s', rank %d: %s", options.group_name, rank, stats_of(reference()))

    backend = _c10d.ProcessGroup(
        exact=_make_gloo(prefixed("exact"), rank, size, timeout, options),
        store=prefixed("state"),
        options=options,
        agree=lambda: _agree(prefixed("agreement"), rank, size, options, timeout),
        make_transport_group=lambda: _make_gloo(prefixed("transport"), rank, size, timeout, options),
        split=split,
        at_shutdown=summarize if environment.log_level() == "info" else None,
    )
    reference = weakref.ref(backend)
    _living.add(backend)
    return backend


def _agree(store: Any, rank: int, size: int, options: Any, timeout: datetime.timedelta) -> list[int]:
    """Compares version and options of all ranks; returns the node of each rank, as numbers.

    Raises RuntimeError that names the first difference, or the ranks that did not come.
    """
    own = {"version": __version__, "options": repr(options), "node": environment.node_identity()}
    store.set(f"{rank}", json.dumps(own))
    try:
        store.wait([f"{other}" for other in range(size)], timeout)
    except RuntimeError as error:
        missing = [other for other in range(size) if not store.check([f"{other}"])]
        raise RuntimeError(
            f"zcomm, rank {rank} of group '{options.group_name}': ranks {missing} did not call a first collective "
            f"within {timeout.total_seconds():g} s"
        ) from error
    nodes: list[str] = []
    for other, text in enumerate(store.multi_get([f"{other}" for other in range(size)])):
        theirs = json.loads(text)
        for key in ("version", "options"):
            if theirs[key] != own[key]:
                raise RuntimeError(
                    f"zcomm, rank {rank} of group '{options.group_name}': ranks disagree on the {key}: this rank has "
                    f"{own[key]}, rank {other} has {theirs[key]}"
                )
        nodes.append(theirs["node"])
    if options.node_size is not None:
        return [other // options.node_size for other in range(size)]
    first_of = {node: number for number, node in reversed(list(enumerate(nodes)))}
    return [first_of[node] for node in nodes]


@atexit.register
def _shut_down_all() -> None:
    # A group that nobody destroyed has a thread that may need the interpreter, which is about to go.
    for backend in list(_living):
        backend.shutdown()
