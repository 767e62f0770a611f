"""Creation of the process groups of ``torch.distributed.init_process_group("zcomm")``."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import hashlib
import json
import logging
import socket
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions

import zcomm._core as _core
import zcomm._nccl as _nccl
import zcomm._node as _node
from zcomm._version import __version__
from zcomm.distributed import _ddp, _states, decisions, elastic, environment, groups, hooks, rendezvous, threshold
from zcomm.distributed.binding import TORCH, _c10d
from zcomm.distributed.options import OPTION_NAMES, Options
from zcomm.distributed.overrides import tell_apart_what_is_traced
from zcomm.distributed.stats import stats_of

_log = logging.getLogger("zcomm")
if level := environment.log_level():
    _log.setLevel(level.upper())
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
    if level == "debug":
        hooks.log_calls()
_TOLD_AFTER = 3  # optimizer steps: see _Group.after_step
_NOTABLE = 0.2  # share of bytes that a setting would compress, from which on it is a warning, if it is not tiny
_LEAST_TO_CONNECT = datetime.timedelta(seconds=5)
_FAILED = "failed: "
_ORDER = " (ranks that share several groups make them in the same order?)"
_ONE_NODE = "it has one node: over NVLink exact calls are mostly as fast. Set compress='auto' or min_bytes, or use nccl"
_SAME = "(zcomm.exact(), override(), in-place use: the same on all ranks?)"


def create_backend(distributed: Any, pg_options: Any) -> Any:
    """Create the backend of a group; called by torch. ``distributed`` is its _DistributedBackendOptions."""
    _watch()
    options = _resolve(pg_options)
    options._timeout = distributed.timeout
    options.group_name = distributed.group_id
    options.global_ranks_in_group = distributed.global_ranks_in_group
    rank, size = distributed.group_rank, distributed.group_size
    if any(getattr(asked, "enable_reconfigure", False) for asked in (distributed, pg_options)):  # torch 2.14
        member = _make_member(options)
        return _c10d.ElasticGroup(rank, size, options, member.handle, member.make)
    store = _meeting_place(distributed)
    return _Group(lambda: store, rank, size, options).make()


def make_member(timeout: datetime.timedelta, name: str) -> elastic.Member:
    """Make this process a member of a group that changes its members, with the default options."""
    _watch()
    options: Any = Options()
    options._timeout, options.group_name, options.global_ranks_in_group = timeout, name, []
    return _make_member(options)


def _make_member(options: Any) -> elastic.Member:
    def make_group(connect: Callable[[], Any], rank: int, size: int, of_group: Any, is_over: Callable[[], bool]) -> Any:
        return _Group(connect, rank, size, of_group, is_over).make()

    address = elastic.address_of_interface() or _address_of_host()
    return elastic.Member(address, options, f"{_version()}, {_compared(options)}", make_group)


def _version() -> str:
    return f"{__version__}, protocol {rendezvous.PROTOCOL}"


def _compared(options: Any) -> dict[str, Any]:
    """Return the options that all ranks must have alike."""
    compared = {name: getattr(options, name) for name in OPTION_NAMES}
    if options.follows_link:
        compared["min_bytes"] = None  # unlike that of a rank which gives the default's value
    return compared


def _watch() -> None:
    """Begin to watch what torch does, and to record calls."""
    _ddp.watch_hooks()
    _states.keep_states_exact()
    groups.count_steps()
    groups.watch_descriptions()
    groups.watch_timeouts()
    environment.check_node_memory()
    _c10d.start_flight_recorder()


def _meeting_place(distributed: Any) -> Any:
    """Return the store of a group, under its ranks instead of torch's number for it if they are some of the world's.
    Numbers differ between ranks that make other groups, or in another order: they would meet nobody, or strangers."""
    ranks, store = distributed.global_ranks_in_group, distributed.store
    while ranks and dist.is_initialized() and isinstance(store, PrefixStore):
        store = store.underlying_store
        if store is dist.distributed_c10d._get_default_store():
            return PrefixStore(f"group of {hashlib.sha256(str(ranks).encode()).hexdigest()}", store)
    return distributed.store


def _resolve(pg_options: Any) -> Any:
    if pg_options is None:
        # Groups inherit the world's options, because DeviceMesh creates them without any.
        try:
            world = groups.backend_of()
        except ValueError:
            world = None
        return Options() if world is None else copy.copy(world.options)
    if isinstance(pg_options, _nccl_options()):  # trainers tune NCCL so
        resolved = _resolve(None)
        resolved.of_nccl = pg_options
        return resolved
    if not isinstance(pg_options, Options):
        kind = type(pg_options).__name__
        raise TypeError(f"pg_options: expected zcomm.Options, ProcessGroupNCCL.Options or None, got {kind}")
    return copy.copy(pg_options)


def _nccl_options() -> Any:
    """Return the class of torch's options for NCCL; an empty tuple if this torch has none."""
    return getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", ())


@functools.cache
def _address_of_host() -> str:
    """Return the address of the host's name that Gloo would take, else loopback's. Cached, because Gloo asks
    anew for each group, and a name server that is gone takes seconds."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    _log.warning("the host's name %r has no address of this host: Gloo uses loopback; set GLOO_SOCKET_IFNAME", name)
    return "127.0.0.1"


def _devices(lazy: bool | None) -> list[Any]:
    """Make Gloo devices on the interfaces that torch would choose. ``lazy``: they connect as peers are first sent to;
    None: as ``TORCH_GLOO_LAZY_INIT`` has it."""
    gloo: Any = dist.ProcessGroupGloo
    if interfaces := environment.gloo_interfaces():
        return [gloo.create_device(interface=name, lazy_init=lazy) for name in interfaces]
    return [gloo.create_device(hostname=_address_of_host(), lazy_init=lazy)]


def _make_gloo(store: Any, rank: int, size: int, options: Any, devices: list[Any], threads: int = 2) -> Any:
    """Make a Gloo group. ``devices`` has one per connection of two ranks. ``threads``: per device, for collectives, of
    which torch has 2."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs give its options other names
    gloo_options = gloo._Options()
    # Gloo waits for a connection five times as long: two and a half hours for a rank that ends meanwhile.
    shorter = max(options._timeout / 5, min(options._timeout, _LEAST_TO_CONNECT))
    gloo_options._timeout, gloo_options._devices = shorter, devices
    gloo_options._threads = threads * len(set(devices))
    try:
        group = gloo(store, rank, size, gloo_options)
    except RuntimeError as error:
        raise RuntimeError(
            f"this rank could not connect to all {size} ranks of group '{options.group_name}': one of them has ended, "
            f"or cannot be reached (GLOO_SOCKET_IFNAME chooses the network). Gloo says: {error}"
        ) from None
    group._set_default_timeout(options._timeout)
    group.options.group_name = options.group_name
    group.options.global_ranks_in_group = options.global_ranks_in_group
    if TORCH < (2, 14):
        group._set_sequence_number_for_group()  # of the first call: later it is 0, and asking for it warns
    return group


def _make_nccl(store: Any, rank: int, size: int, options: Any) -> Any:
    if _nccl.library_behind_front() is not None and (asked := environment.asked_of_front()):
        raise ValueError(
            "LD_PRELOAD: expected no front of NCCL beside the backend 'zcomm', got one that compresses exact calls, as "
            f"{', '.join(asked)} asks: unset LD_PRELOAD, or set zcomm.Options instead of variables"
        )
    if not dist.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL, which carries the exact calls on CUDA tensors")
    nccl_options = options.of_nccl or _nccl_options()(is_high_priority_stream=_c10d.has_high_priority())
    nccl_options._timeout = options._timeout
    nccl_options.group_name = options.group_name
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    if TORCH < (2, 14):  # has only one NCCL backend
        group = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
        group._set_sequence_number_for_group()
        return group
    # Uses torch's registered "nccl" backend, because torch has several now; from 2.15 it is not ProcessGroupNCCL.
    backends: Any = dist.Backend
    backends._ensure_backend_registered("nccl")
    wanted = _DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size = store, rank, size
    wanted.timeout, wanted.group_id = options._timeout, options.group_name
    wanted.global_ranks_in_group = options.global_ranks_in_group
    return backends._plugins["NCCL"].creator_fn(wanted, nccl_options)


def _id_or_failure(texts: list[str]) -> str:
    """Return rank 0's text, the id of a communicator, or that of the first rank that has no NCCL."""
    failed = [f"rank {rank} {text}" for rank, text in enumerate(texts) if text.startswith(_FAILED)]
    return failed[0] if failed else texts[0]


@functools.cache
def _warn_of_patterns(patterns: tuple[str, ...]) -> None:
    """Warn once of patterns of the option ``groups`` that match no group of this rank: they may be misspelt."""
    names = sorted({backend.description for backend in groups.living.values()})
    if missed := [one for one in patterns if not any(_c10d.names_group(one, name) for name in names)]:
        _log.warning("groups: %s match none of this rank's groups: %s", ", ".join(missed), ", ".join(names))


@functools.cache
def _warn_of_unread() -> None:
    if unread := environment.unread_of_nccl():
        _log.warning("exact calls alone obey %s: see the variables in docs/options.md", ", ".join(unread))


class _Group:
    """One rank of a group: the Python callbacks of its backend, which is registered under this object."""

    def __init__(
        self, connect: Callable[[], Any], rank: int, size: int, options: Any, is_over: Callable[[], bool] | None = None
    ) -> None:
        if "traced" in f"{options.forms}{options.groups}":  # of a split, too
            tell_apart_what_is_traced()
        self._rank = rank
        self._size = size
        sample_errors_every = environment.sample_errors_every()  # raises on a wrong one
        # Precedes Gloo's connections, because Gloo's timeout does not name the missing rank.
        mine = {"version": _version(), "options": _compared(options), "node": _node.node_identity(), "host": None}
        if options.follows_link:
            mine["host"] = threshold.this_host()
        self._keys, compared_by_all = rendezvous.meet(
            lambda: PrefixStore("zcomm", connect()), rank, size, options._timeout.total_seconds(),
            f"start of group '{options.group_name}'" + (_ORDER if options.global_ranks_in_group else ""),
            text=json.dumps(mine), digest=lambda texts: rendezvous.compare(texts, options),
            is_over=is_over or (lambda: False),
        )  # fmt: skip
        self._compared = json.loads(compared_by_all)
        chosen = self._compared.get("threshold")
        self._options = options.with_threshold(*chosen) if chosen else options
        self._options.sample_errors_every = sample_errors_every
        self._nodes: list[int] = []  # by rank, after the handshake
        self._told: set[str] = set()
        self._steps = 0  # since the group was made, of the optimizer that count_steps() watches
        self._is_elastic = is_over is not None  # its members may change

    def make(self) -> Any:
        """Make and register the backend."""
        file = self._options.decisions
        backend = _c10d.ProcessGroup(
            exact_cpu=_make_gloo(self._prefixed("exact"), self._rank, self._size, self._options, _devices(None)),
            options=self._options,
            agree=self._agree,
            make_exact_cuda=self._make_exact_cuda,
            make_transport_group=self._make_transport_group,
            meet_for_nccl=self._meet_for_nccl,
            message_store=self._prefixed("messages"),
            split=self._split,
            look_up=functools.partial(self._look_up, decisions.Table(file)) if file else None,
            now=perf_counter_ns,
            decided=self._tell_decision,
            no_node_memory=self._warn_of_memory,
            at_shutdown=self._end,
        )
        groups.living[self] = backend
        groups.use.rank = (self._options.global_ranks_in_group or range(self._size))[self._rank]
        groups.use.most_ranks = max(groups.use.most_ranks, self._size)
        return backend

    def after_step(self, backend: Any) -> None:
        """End a step. Log once, after a few of them, what has stayed exact in a group that spans nodes."""
        backend.end_step()
        self._steps += 1
        if self._steps == _TOLD_AFTER and groups.use.rank == 0:
            _warn_of_patterns(tuple(self._options.groups))
        if self._steps != _TOLD_AFTER or self._rank > 0 or len(set(self._nodes)) < 2:
            return
        changeable, total, line = stats_of(backend).explain_exact()
        is_notable = changeable >= max(_NOTABLE * total, self._steps * self._options.min_bytes, 1)
        level = logging.WARNING if is_notable else logging.INFO
        _log.log(level, "group '%s', between nodes: %s", self._options.group_name, line)

    def _tell_decision(self) -> None:
        backend = groups.living.get(self)
        if self._rank == 0 and backend is not None:
            _log.info("group '%s': compress='auto': %s", self._options.group_name, stats_of(backend).by_steps)

    def _warn_of_memory(self, reason: str) -> None:
        _log.warning(
            "group '%s': ranks of the node of rank %d send over Gloo, as they share no memory: %s; "
            "ZCOMM_NODE_MEMORY=off accepts that", self._options.group_name, self._rank, reason,
        )  # fmt: skip

    def _prefixed(self, name: str) -> PrefixStore:
        return PrefixStore(name, self._keys)

    def _meet(self, name: str, purpose: str, **text: Any) -> tuple[PrefixStore, str]:
        """Wait for all ranks; return keys that no earlier attempt has used, and the digest of all texts."""
        # Clones the store: a thread that waits keeps its connection locked.
        store: Any = self._prefixed(name)
        timeout = self._options._timeout.total_seconds()
        return rendezvous.meet(store.clone, self._rank, self._size, timeout, purpose, is_over=self._is_over, **text)

    def _is_over(self) -> bool:
        """Tell whether the backend was aborted or shut down."""
        backend = groups.living.get(self)
        return backend is None or backend.is_aborted

    def _agree(self) -> list[int]:
        groups.use.has_called = True  # this is the first call
        if "difference" in self._compared:
            raise RuntimeError(self._compared["difference"])
        self._nodes = self._compared["nodes"]
        return self._nodes

    def _make_transport_group(self, each_way: int) -> tuple[Any, int, PrefixStore]:
        """Return a Gloo group, the number of its connections between two ranks, and a store."""
        # Precedes Gloo's connections, because Gloo does not name a missing rank and cannot be aborted.
        keys, _ = self._meet("transport", f"first compressed call {_SAME}")
        # Connects eagerly: lazy contexts that share a device mistake each other's connections for their own.
        connections = [device for device in _devices(False) for _ in range(2 * each_way)]
        group = _make_gloo(PrefixStore("gloo", keys), self._rank, self._size, self._options, connections, threads=0)
        return group, len(connections), keys

    def _make_exact_cuda(self) -> Any:
        self._check_cpu()
        return _make_nccl(self._prefixed("exact-nccl"), self._rank, self._size, self._options)

    def _check_cpu(self) -> None:
        if self._is_elastic:
            raise RuntimeError("enable_reconfigure: expected CPU tensors, got some on a GPU")

    def _meet_for_nccl(self) -> tuple[bytes, PrefixStore]:
        """Return the id of the ranks' communicator, and a store. Raises on all ranks if one of them has no NCCL."""
        self._check_cpu()
        if groups.use.rank == 0:
            _warn_of_unread()
        try:
            _nccl.load()
            text = _core.make_unique_id().hex() if self._rank == 0 else ""
        except RuntimeError as error:
            text = f"{_FAILED}{error}"
        purpose = f"first compressed call on a GPU {_SAME}"
        keys, id_or_failure = self._meet("nccl", purpose, text=text, digest=_id_or_failure)
        if _FAILED in id_or_failure:
            raise RuntimeError(id_or_failure)
        if len(set(self._nodes)) == 1 and self._options.compress == "always":
            self._warn_once("one node", _ONE_NODE)
        return bytes.fromhex(id_or_failure), keys

    def _look_up(self, table: decisions.Table, num_bytes: int, *kind: Any) -> tuple[float, ...] | None:
        """Seconds of an exact call, a compressed one, and one in one hop. Tells once of calls that the table lacks,
        and once if it was measured on another machine."""
        kind = (str(_core.Topology(self._nodes)), *kind)
        found, file = table.seconds_of(kind, num_bytes), self._options.decisions
        if found is None:
            named = ", ".join(f"{name} {value}" for name, value in zip(decisions.KIND, kind, strict=True))
            lack = f"expected a row of {file} for {num_bytes} bytes of {named}, got none: it rehearses such calls"
            self._warn_once("lack", f"decisions: {lack}")
        elif differences := table.differences(kind[1]):
            self._warn_once("machine", f"decisions: {file} was measured with {differences}: its times may not hold")
        return found

    def _warn_once(self, what: str, text: str) -> None:
        if self._rank == 0 and what not in self._told:
            self._told.add(what)
            _log.warning("group '%s': %s", self._options.group_name, text)

    def _split(self, child_store: Any, ranks: list[int], child_options: Any) -> Any:
        """Make a group of some of the ranks; None on the others, as torch's own groups do."""
        if self._rank not in ranks:
            return None
        is_nccl = isinstance(child_options, _nccl_options())
        resolved = self._options.like(child_options) if isinstance(child_options, _c10d.Options) else self._options
        resolved = _resolve(resolved)
        resolved.of_nccl = child_options if is_nccl else None
        if child_options is not None:
            resolved.group_name = child_options.group_name
            resolved._timeout = child_options._timeout
        of_world = self._options.global_ranks_in_group or range(self._size)
        resolved.global_ranks_in_group = [of_world[rank] for rank in ranks]
        return _Group(lambda: child_store, ranks.index(self._rank), len(ranks), resolved).make()

    def _end(self) -> None:
        ended = groups.living.pop(self, None)
        if ended is not None and environment.log_level() == "info":
            _log.info("group '%s', rank %d: %s", self._options.group_name, self._rank, stats_of(ended).summary())
