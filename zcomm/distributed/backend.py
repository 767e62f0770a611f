"""Makes the process groups of ``torch.distributed.init_process_group("zcomm")``."""

from __future__ import annotations

import json
import logging
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions

from zcomm import _nccl
from zcomm._version import __version__
from zcomm.distributed import calibration, environment, groups, rendezvous
from zcomm.distributed.binding import TORCH, _c10d
from zcomm.distributed.options import Options
from zcomm.distributed.stats import stats_of

_log = logging.getLogger("zcomm")
if environment.log_level() == "info":
    _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
_SAME = "(zcomm.exact(), override(), in-place use: the same on all ranks?)"


def create_backend(distributed: Any, pg_options: Any) -> Any:
    """The creator that torch calls for each group. ``distributed`` is its _DistributedBackendOptions."""
    options = _resolve(pg_options)
    options._timeout = distributed.timeout
    options.group_name = distributed.group_id
    options.global_ranks_in_group = distributed.global_ranks_in_group
    return _Group(distributed.store, distributed.group_rank, distributed.group_size, options).make()


def _resolve(pg_options: Any) -> Any:
    if pg_options is None:
        # As the world is, so are its groups: a device mesh makes them without asking for options.
        try:
            return groups.backend_of().options.__copy__()
        except ValueError:
            return Options()
    if not isinstance(pg_options, Options):
        raise TypeError(f"pg_options: expected zcomm.Options or None, got {type(pg_options).__name__}")
    return pg_options.__copy__()


def _number_calls(group: Any) -> None:
    """Let the ranks agree on the number of their first call. From torch 2.14 on it is 0, and asking for it warns."""
    if TORCH < (2, 14):
        group._set_sequence_number_for_group()


def _make_gloo(store: Any, rank: int, size: int, options: Any, devices: Any = None) -> Any:
    """``devices``: one for each connection of two ranks; None: as torch chooses them."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs give its options other names
    if devices is None:
        group = gloo(store, rank, size, timeout=options._timeout)
    else:
        gloo_options = gloo._Options()
        gloo_options._timeout, gloo_options._devices = options._timeout, devices
        group = gloo(store, rank, size, gloo_options)
    group.options.group_name = options.group_name
    group.options.global_ranks_in_group = options.global_ranks_in_group
    _number_calls(group)
    return group


def _make_nccl(store: Any, rank: int, size: int, options: Any) -> Any:
    if not dist.is_nccl_available():
        raise RuntimeError("this torch was built without NCCL, which carries the exact calls on CUDA tensors")
    nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.high_priority_stream)
    nccl_options._timeout = options._timeout
    nccl_options.group_name = options.group_name
    nccl_options.global_ranks_in_group = options.global_ranks_in_group
    if TORCH < (2, 14):  # one engine for NCCL
        group = dist.ProcessGroupNCCL(store, rank, size, nccl_options)
        _number_calls(group)
        return group
    # Several: this makes the one that torch calls "nccl", as torch does; from 2.15 that is not ProcessGroupNCCL.
    backends: Any = dist.Backend
    backends._ensure_backend_registered("nccl")
    wanted = _DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size = store, rank, size
    wanted.timeout, wanted.group_id = options._timeout, options.group_name
    wanted.global_ranks_in_group = options.global_ranks_in_group
    return backends._plugins["NCCL"].creator_fn(wanted, nccl_options)


class _Group:
    """One rank of a group: what its backend asks of Python. It is the key under which the backend is registered."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._keys = rendezvous.fresh_keys(store, size)
        self._rank = rank
        self._size = size
        self._options = options
        self._splits: dict[str, int] = {}
        self._nodes: list[int] = []  # of the ranks, once they have compared

    def make(self) -> Any:
        """The backend."""
        # Before Gloo connects all ranks, so that comparing never waits for one that does something else first.
        options = self._options.handshake_text()
        handshake = {"version": __version__, "options": options, "node": environment.node_identity()}
        self._prefixed("agreement").set(f"{self._rank}", json.dumps(handshake))
        exact_cpu = _make_gloo(self._prefixed("exact"), self._rank, self._size, self._options)
        devices = exact_cpu.options._devices
        backend = _c10d.ProcessGroup(
            exact_cpu=exact_cpu,
            store=self._prefixed("state"),
            options=self._options,
            agree=self._agree,
            make_exact_cuda=lambda: _make_nccl(self._prefixed("exact-nccl"), self._rank, self._size, self._options),
            make_transport_group=lambda: self._make_transport_group(devices),
            meet_for_nccl=self._meet_for_nccl,
            split=self._split,
            predict=self._predictor(),
            at_shutdown=self._end,
        )
        groups.register(self, backend)
        return backend

    def _prefixed(self, name: str) -> PrefixStore:
        return PrefixStore(name, self._keys)

    def _meet(self, name: str, purpose: str) -> list[str]:
        timeout = self._options._timeout.total_seconds()
        return rendezvous.wait_for_all(self._prefixed(name), self._size, timeout, purpose, lambda: groups.is_over(self))

    def _agree(self) -> list[int]:
        nodes = rendezvous.compare(self._meet("agreement", "first collective"), self._rank, self._options)
        self._nodes = groups.set_nodes(self, nodes)
        return self._nodes

    def _make_transport_group(self, devices: list[Any]) -> tuple[Any, int]:
        """Also the number of its connections between two ranks."""
        # First, as what Gloo says of a rank that does not come names none, and cannot be aborted.
        self._prefixed("transport-meeting").set(f"{self._rank}", "")
        self._meet("transport-meeting", f"first compressed call {_SAME}")
        connections = [device for device in devices for _direction in range(2)]
        group = _make_gloo(self._prefixed("transport"), self._rank, self._size, self._options, connections)
        return group, len(connections)

    def _meet_for_nccl(self) -> str:
        self._prefixed("nccl-meeting").set(f"{self._rank}", "")
        self._meet("nccl-meeting", f"first compressed call on a GPU {_SAME}")
        return _nccl.wheel_path()

    def _predictor(self) -> Any:
        if not self._options.calibration:
            return None
        measured = calibration.read(self._options.calibration)
        return lambda *call: calibration.predict(measured, self._nodes, *call)

    def _split(self, child_store: Any, ranks: list[int], child_options: Any) -> Any:
        resolved = _resolve(child_options if isinstance(child_options, Options) else self._options)
        if child_options is not None:
            resolved.group_name = child_options.group_name
            resolved._timeout = child_options._timeout
            resolved.global_ranks_in_group = child_options.global_ranks_in_group
        # A name may come again once its group has ended, and the store keeps what that has left.
        number = self._splits[resolved.group_name] = self._splits.get(resolved.group_name, 0) + 1
        return _Group(PrefixStore(f"split{number}", child_store), ranks.index(self._rank), len(ranks), resolved).make()

    def _end(self) -> None:
        ended = groups.forget(self)
        if ended is not None and environment.log_level() == "info":
            _log.info("group '%s', rank %d: %s", self._options.group_name, self._rank, stats_of(ended))
