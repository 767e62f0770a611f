"""The mean of a tensor over a group, in few bits, with error feedback on both of its ways."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist

import zcomm.codec as codec
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import override
from zcomm.distributed.residuals import residual_of
from zcomm.feedback import ErrorFeedback
from zcomm.outer.errors import lost_ranks_named

_AVERAGED = "averaged their values"
_CONNECTIONS = 8  # at most 1.4 times as slow as the best number, under BBR and under Reno: docs/outer.md


def set_connections(backend: _c10d.ProcessGroup, each_way: int | None) -> None:
    """Set the number of TCP connections between two sites. None: those that the group has made by now, else 8.

    Raises ValueError if the group has made others."""
    with contextlib.suppress(ValueError) if each_way is None else contextlib.nullcontext():
        backend.connections = _CONNECTIONS if each_way is None else each_way


class Averaging:
    """Averages ``num_elements`` of float32 over a group, again and again: reduce(), gather(), finish().

    It is a reduce_scatter and an all_gather, as an all_reduce is. But here the owner of a part also keeps what its
    encoding of the mean loses, for the next mean. The feedback of an all_reduce leaves that out.

    ``bytes``: what this rank sends each time; ``exact_bytes``: what an exact all_reduce would. ``count``: times so far.
    ``wait_seconds``: what this rank has waited for transfers. All ranks of the group call the functions of all
    averagings in the same order. ``key`` names the residuals.
    """

    def __init__(
        self, num_elements: int, device: torch.device, format: str, feedback: ErrorFeedback | None, key: str, group: Any
    ) -> None:
        self._num_elements, self._device, self._format = num_elements, device, format
        self._feedback, self._key, self._group = feedback, key, group
        backend = backend_of(group)  # torch knows nothing of a group of Sites
        self._size, self._rank = backend.size(), backend.rank()
        self._layout = f"{num_elements} values in {format} among {self._size}"  # of the residuals
        self.bytes = self.exact_bytes = 2 * (self._size - 1) * 4 * num_elements // self._size
        self._plans: tuple[_c10d.Operation, _c10d.Operation] | None = None
        if format != "exact" and self.exact_bytes > 0:
            self._plans = self._make_plans()
            self.bytes = sum((plan.intra_node_bytes or 0) + (plan.inter_node_bytes or 0) for plan in self._plans)
        self._buffer = self._shard = torch.empty(0)
        self._work: dist.Work | None = None
        self._is_gathering = False
        self.count = 0
        self.wait_seconds = 0.0

    @property
    def is_compressed(self) -> bool:
        return self._plans is not None

    def new_buffer(self) -> torch.Tensor:
        """Return a tensor for the values: ``num_elements``, then zeros up to equal parts."""
        length = -(-self._num_elements // self._size) * self._size
        buffer = torch.empty(length, dtype=torch.float32, device=self._device)
        buffer[self._num_elements :] = 0
        return buffer

    def reduce(self, buffer: torch.Tensor) -> None:
        """Begin to average ``buffer``, of new_buffer()."""
        self._buffer, self._is_gathering = buffer, False
        self.count += 1
        if self._plans is None:
            if self.exact_bytes > 0:
                with override(all_reduce="exact"), lost_ranks_named(_AVERAGED):
                    self._work = dist.all_reduce(buffer, dist.ReduceOp.AVG, group=self._group, async_op=True)
            return
        plan, residual = self._plans[0], None
        self._shard = torch.empty_like(self._part(buffer))
        if self._feedback is not None:
            key = f"{self._key}, sums"
            residual = residual_of(self._feedback, key, self._layout, plan.residual_bytes, self._device)
        with lost_ranks_named(_AVERAGED):
            self._work = plan.run(self._shard, buffer, op=dist.ReduceOp.AVG, residual=residual, async_op=True)

    def gather(self) -> None:
        """Wait for the sums, and begin to gather the means."""
        if self._plans is None or self._is_gathering:
            return
        self._wait()
        self._is_gathering = True
        if self._feedback is not None:
            num_bytes = codec.wire_bytes(self._feedback.format, "float32", len(self._shard))
            self._lost, empty = self._feedback.use(f"{self._key}, means", self._layout, num_bytes, self._new_bytes)
            if not empty:
                self._add_lost(self._feedback)
        with lost_ranks_named(_AVERAGED):
            self._work = self._plans[1].run(self._buffer, self._shard, async_op=True)

    def finish(self) -> torch.Tensor:
        """Wait for the means, and return them. They have the same bits on all ranks."""
        self.gather()
        self._wait()
        if self._plans is not None and self._feedback is not None:
            arrived = (self._part(self._buffer), "exact", -1.0)
            codec.decode_sum_encode(
                [(self._shard, "exact"), arrived], len(self._shard), self._feedback.format, out=self._lost
            )
        means = self._buffer[: self._num_elements]
        self._buffer = self._shard = torch.empty(0)
        return means

    def _add_lost(self, feedback: ErrorFeedback) -> None:
        """Add to the sums what the last encoding of means lost."""
        sums = self._shard.clone()
        codec.decode_sum([(sums, "exact"), (self._lost, feedback.format, feedback.decay)], self._shard)
        # Blocks that were not finite start over, as in the reductions: else their NaNs would stay.
        torch.where(self._shard.isfinite(), self._shard, sums, out=self._shard)

    def _wait(self) -> None:
        if self._work is not None:
            start = time.monotonic()
            with lost_ranks_named(_AVERAGED):
                self._work.wait()
            self.wait_seconds += time.monotonic() - start
            self._work = None

    def _make_plans(self) -> tuple[_c10d.Operation, _c10d.Operation]:
        formats: dict[str, Any] = {"reduce_scatter": self._format, "all_gather": self._format}
        policy = _c10d.PolicyOverride(compress="always", forms="out_of_place", min_bytes=1, **formats)
        buffer, backend = self.new_buffer(), backend_of(self._group)
        shard = torch.empty_like(self._part(buffer))
        residual = self._feedback.block_format if self._feedback is not None else None
        reduced = backend.plan(shard, buffer, dist.ReduceOp.AVG, formats=policy, feedback=residual)
        gathered = backend.plan(buffer, shard, formats=policy)
        if (
            isinstance(reduced, _c10d.Verdict)
            or isinstance(gathered, _c10d.Verdict)
            or {reduced.format, gathered.format} != {self._format}
        ):
            raise RuntimeError(
                f"format: expected {self._format!r} to hold, got a zcomm.exact() or zcomm.override() around this call"
            )
        return reduced, gathered

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(self._size, -1)[self._rank]

    def _new_bytes(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
