"""Makes the process groups of ``torch.distributed.init_process_group("zcomm")``."""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from zcomm import _nccl
from zcomm._version import __version__
from zcomm.distributed import environment


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


_FIELDS = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "min_bytes",
    "out_of_place",
    "lists",
    "coalesced",
    "strict",
    "node_size",
    "chunk_bytes",
    "seed",
    "high_priority_stream",
    "blocking_wait",
    "telemetry_every",
]


class Options(_c10d.Options):  # type: ignore[misc]
    """How a group compresses: ``pg_options=`` of ``init_process_group`` and ``new_group``. Immutable. A group that is
    made without options has those of the world.

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
        node_size: ranks per node, in order of their rank in the world, for virtual nodes; default: found from the
            launcher or the host.
        chunk_bytes: values of a shard that travel as one piece, in bytes; default 1 MiB.
        seed: of formats with ``:stochastic``; default 0. See :func:`zcomm.set_step`.
        high_priority_stream: asynchronous calls on a GPU run on a stream of high priority; default False.
        blocking_wait: ``wait()`` of asynchronous calls on a GPU blocks the host until they are done; default False.
        telemetry_every: compressed calls of a site from one sample of what compression loses to the next, for
            :func:`zcomm.report`; default 0, no samples. May differ between ranks.

    A format is ``"exact"``, ``"bf16"`` or ``"int8:B"``, ``"int6:B"``, ``"int4:B"``, ``"int2:B"`` or ``"fp8:B"``,
    B a multiple of 32 from 32 to 4096 elements; ``":hadamard"`` and ``":stochastic"`` may follow B.
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
        seed: int | None = None,
        high_priority_stream: bool | None = None,
        blocking_wait: bool | None = None,
        telemetry_every: int | None = None,
    ) -> None:
        values = locals()
        given = {name: values[name] for name in _FIELDS if values[name] is not None}
        super().__init__(**{**environment.option_fields(), **given})

    def __copy__(self) -> Options:
        twin = Options.__new__(Options)
        _c10d.Options.__init__(twin, **{name: getattr(self, name) for name in _FIELDS})  # not the environment's
        twin._timeout = self._timeout
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self.__copy__()


_log = logging.getLogger("zcomm")
if environment.log_level() == "info":
    _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
_SAME = "(zcomm.exact(), override(), in-place use must be the same on all ranks)"
_living: dict[object, Any] = {}  # until they are shut down; torch holds groups in C++ alone, so weak ones would be dead


def create_backend(distributed: Any, pg_options: Any) -> Any:
    """The creator that torch calls for each group. ``distributed`` is its _DistributedBackendOptions."""
    options = _resolve(pg_options)
    options._timeout = distributed.timeout
    options.group_name = distributed.group_id
    options.global_ranks_in_group = distributed.global_ranks_in_group
    return _make(distributed.store, distributed.group_rank, distributed.group_size, options)


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
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


def _resolve(pg_options: Any) -> Any:
    if pg_options is None:
        # As the world is, so are its groups: a device mesh makes them without asking for options.
        try:
            return backend_of().options.__copy__()
        except ValueError:
            return Options()
    if not isinstance(pg_options, Options):
        raise TypeError(f"pg_options: got {type(pg_options).__name__}, need zcomm.Options or None")
    return pg_options.__copy__()


def _make_gloo(store: Any, rank: int, size: int, options: Any) -> dist.ProcessGroupGloo:
    group = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
    group.options.group_name = options.group_name
    group.options.global_ranks_in_group = options.global_ranks_in_group
    group._set_sequence_number_for_group()
    return group


def _make_nccl(store: Any, rank: int, size: int, options: Any) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL, which carries the exact calls on CUDA tensors")
    nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority_stream)
    nccl_options._timeout = options._timeout
    nccl_options.group_name = options.group_name
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    group = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
    group._set_sequence_number_for_group()
    return group


def _make(store: Any, rank: int, size: int, options: Any) -> Any:
    def prefixed(name: str) -> PrefixStore:
        return PrefixStore(f"zcomm/{name}", store)

    splits: dict[str, int] = {}

    def split(child_store: Any, ranks: list[int], child_options: Any) -> Any:
        resolved = _resolve(child_options if isinstance(child_options, Options) else options)
        if child_options is not None:
            resolved.group_name = child_options.group_name
            resolved._timeout = child_options._timeout
            resolved.global_ranks_in_group = child_options.global_ranks_in_group
        # A name may come again once its group has ended, and the store keeps what that has left.
        number = splits[resolved.group_name] = splits.get(resolved.group_name, 0) + 1
        return _make(PrefixStore(f"split{number}", child_store), ranks.index(rank), len(ranks), resolved)

    def meet(name: str, purpose: str) -> list[str]:
        return _meet(prefixed(name), size, options._timeout.total_seconds(), purpose, lambda: _is_over(key))

    def make_transport_group() -> dist.ProcessGroupGloo:
        # First, as what Gloo says of a rank that does not come names none, and cannot be aborted.
        prefixed("transport-meeting").set(f"{rank}", "")
        meet("transport-meeting", f"first compressed call {_SAME}")
        return _make_gloo(prefixed("transport"), rank, size, options)

    def meet_for_nccl() -> str:
        prefixed("nccl-meeting").set(f"{rank}", "")
        meet("nccl-meeting", f"first compressed call on a GPU {_SAME}")
        return _nccl.wheel_path()

    def end() -> None:
        ended = _living.pop(key, None)
        if ended is not None and environment.log_level() == "info":
            from zcomm.distributed.stats import stats_of

            _log.info("group '%s', rank %d: %s", options.group_name, rank, stats_of(ended))

    # Before Gloo connects all ranks, so that comparing never waits for one that does something else first.
    introduction = {"version": __version__, "options": repr(options), "node": environment.node_identity()}
    prefixed("agreement").set(f"{rank}", json.dumps(introduction))
    key = object()
    _living[key] = _c10d.ProcessGroup(
        exact_cpu=_make_gloo(prefixed("exact"), rank, size, options),
        store=prefixed("state"),
        options=options,
        agree=lambda: _agree(meet("agreement", "first collective"), rank, options),
        make_exact_cuda=lambda: _make_nccl(prefixed("exact-nccl"), rank, size, options),
        make_transport_group=make_transport_group,
        meet_for_nccl=meet_for_nccl,
        split=split,
        at_shutdown=end,
    )
    return _living[key]


def _is_over(key: object) -> bool:
    backend = _living.get(key)
    return backend is None or backend.is_aborted


def _meet(store: Any, size: int, timeout: float, purpose: str, is_over: Callable[[], bool]) -> list[str]:
    """What every rank has set in ``store``, in rank order, once all have. Raises RuntimeError that names the ranks that
    have not within ``timeout`` seconds; ends early if the group is aborted."""
    keys = [f"{rank}" for rank in range(size)]
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while not store.check(keys):
        if is_over():
            raise RuntimeError(f"aborted before the {purpose}")
        if time.monotonic() > deadline:
            missing = [rank for rank in range(size) if not store.check([f"{rank}"])]
            raise RuntimeError(f"ranks {missing} did not come to the {purpose} within the timeout of {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return [text.decode() for text in store.multi_get(keys)]


def _agree(introductions: list[str], rank: int, options: Any) -> list[int]:
    """Compares version and options of all ranks; returns the node of each rank, as numbers.

    Raises RuntimeError that names the first difference.
    """
    everyone = [json.loads(text) for text in introductions]
    own = everyone[rank]
    for other, theirs in enumerate(everyone):
        for item in ("version", "options"):
            if theirs[item] != own[item]:
                raise RuntimeError(
                    f"ranks disagree on the {item}: this rank has {own[item]}, rank {other} has {theirs[item]}"
                )
    if options.node_size is not None:
        return [world_rank // options.node_size for world_rank in options.global_ranks_in_group or range(len(everyone))]
    nodes = [theirs["node"] for theirs in everyone]
    first_of = {node: number for number, node in reversed(list(enumerate(nodes)))}
    return [first_of[node] for node in nodes]


def living_backends() -> list[Any]:
    """Of all groups that this process has not ended. Raises ValueError if there is none."""
    if not _living:
        raise ValueError("group: no process group has the backend 'zcomm'")
    return list(_living.values())


@atexit.register
def _shut_down_all() -> None:
    # A group that nobody destroyed has a thread that may need the interpreter, which is about to go.
    for backend in list(_living.values()):
        backend.shutdown()
