"""How many TCP connections two sites need: as many as make the transfers of outer steps faster."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from zcomm.distributed.environment import gloo_interfaces
from zcomm.distributed.groups import backend_of

_log = logging.getLogger("zcomm")

_NUMBERS = (1, 4, 16)
_FAR_SECONDS = 0.005  # of a tiny all-reduce
_REDUCTIONS = 4  # that are measured with each number, after one that is not
_GAIN = 1.25
_SPARE_FILES = 64  # that a process may still open after a change
_COLLECTIVES = ("reduce_scatter", "all_gather")


@contextlib.contextmanager
def losses_told(action: str) -> Iterator[None]:
    """Raise torch's DistBackendError in place of Gloo's bare RuntimeError, of a rank that is gone or late.

    ``action``: what the ranks did meanwhile."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # it says by itself what went wrong
            raise
        raise dist.DistBackendError(f"lost a rank while the ranks {action}: {error}") from error


class Connections:
    """Chooses ``number``, the TCP connections each way between two ranks of a group, by its first reductions.

    Where frames are lost, one connection may be much slower than a far link. So reductions over 1, then 4, then 16
    connections are compared, as long as more of them are at least 1.25 times as fast. Nothing is tried where a tiny
    all-reduce takes less than 5 ms, where another outer step of the group has chosen, or where a process may not open
    as many files. All ranks decide alike, by the slowest one's times of reductions that they begin together.
    """

    def __init__(self, group: Any) -> None:
        self.number = self._tried = _NUMBERS[0]
        self._group = group
        self._is_settled = False
        self._best = float("inf")  # seconds per byte, over fewer connections
        self._reductions = 0  # since the last change of the number
        self._start = (0.0, 0)

    def begin_reduction(self) -> None:
        """Call before each reduction of compressed CPU tensors, on all ranks. May wait for those before it."""
        backend = backend_of(self._group)
        if backend.connections != self._tried:
            self._is_settled = True
        if not self._is_settled:
            self._go_on(backend)
        self.number = backend.connections

    def _go_on(self, backend: Any) -> None:
        if self._reductions == 0 and self._tried == _NUMBERS[0]:
            self._is_settled = self._round_trip() < _FAR_SECONDS
        elif self._reductions == 1:
            self._start = self._waited(backend)
        elif self._reductions == 1 + _REDUCTIONS:
            self._decide(backend)
        self._reductions += 1
        if not self._is_settled:
            self._begin_together()

    def _decide(self, backend: Any) -> None:
        """Try more connections, or settle for the best number so far."""
        waited, sent = self._waited(backend)
        seconds, num_bytes = waited - self._start[0], sent - self._start[1]
        cost = self._slowest(seconds / max(num_bytes, 1))
        place = _NUMBERS.index(self._tried)
        is_better = cost * _GAIN <= self._best
        more = _NUMBERS[place + 1 : place + 2] if is_better and self._slowest(num_bytes) > 0 else ()
        self._is_settled = not (more and self._may_open(more[0], backend.size()))
        if is_better and self._is_settled:
            return
        number = more[0] if is_better else _NUMBERS[place - 1]
        backend.set_connections(number)
        self._tried, self._best, self._reductions = number, cost, 0

    def _may_open(self, number: int, size: int) -> bool:
        """Tell whether all ranks may open the sockets of so many connections beside what they have open."""
        interfaces = max(len(gloo_interfaces()), 1)
        wanted = len(os.listdir("/proc/self/fd")) + 2 * number * interfaces * (size - 1) + _SPARE_FILES
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        lacks = limit != resource.RLIM_INFINITY and wanted > limit
        if lacks:
            _log.warning("%d TCP connections between sites are not tried: they need %d open files, and the limit is %d "
                         "(ulimit -n)", number, wanted, limit)  # fmt: skip
        return self._slowest(lacks) == 0

    def _begin_together(self) -> None:
        """Wait for all ranks, so that none of them takes the others' delay for a transfer."""
        self._slowest(0.0)

    def _waited(self, backend: Any) -> tuple[float, int]:
        """Return the seconds for which this rank has waited for transfers, and the bytes that it has sent in them."""
        backend.drain_host()
        stats = backend.stats()
        calls = [stats[name] for name in _COLLECTIVES]
        return sum(each["transfer_seconds"] for each in calls), sum(each["inter_node_bytes"] for each in calls)

    def _round_trip(self) -> float:
        seconds = []
        for _ in range(5):
            start = time.monotonic()
            self._slowest(0.0)
            seconds.append(time.monotonic() - start)
        return self._slowest(min(seconds))

    def _slowest(self, number: float) -> float:
        """Return the largest of all ranks' numbers."""
        largest = torch.tensor([number], dtype=torch.float64, device="cpu")
        with losses_told("compared their times"):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        return float(largest.item())
