"""Exact weights, of 16 bits or as bytes of narrower ones, by lossless differences between nodes.

In each node the holder of a rank's shard is the rank of the same local rank, modulo the ranks of the node. Holders keep
the values of the last gather. The owner of a shard sends what has changed since; inside a node the values are sent
exactly: ``make_lossless_gather`` in include/zcomm/operation.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zcomm.distributed.groups import backend_of
from zcomm.fsdp.gathers import GatherCall, finished

if TYPE_CHECKING:
    from zcomm.distributed.binding import _c10d


def plan_lossless(name: str, call: GatherCall, like: _c10d.Operation | None) -> _c10d.Operation:
    """How the gather of the module ``name`` goes by differences: ``like``, if it is like that one.

    Raises ValueError where it cannot.
    """
    try:
        parts = [(part.numel() // call.group.size(), True) for part in call.parts]
        return backend_of(call.group).plan_lossless(call.target, call.source, parts=parts, like=like)
    except ValueError as error:
        is_wide = call.shard.dtype in (torch.float32, torch.float64)
        hint = "; MixedPrecisionPolicy(param_dtype=torch.bfloat16) saves more than they would" if is_wide else ""
        raise ValueError(f"weights: {name} cannot be sent as 'lossless': {error}{hint}") from None


def prepare(
    group: dist.ProcessGroup, gathers: Sequence[tuple[LosslessGather, torch.Tensor, _c10d.Site]], async_op: bool
) -> None:
    """Encode these shards before their next gathers; wait for the GPU once, for all sizes."""
    backend_of(group).prepare([(each.held, shard, site) for each, shard, site in gathers], async_op=async_op).wait()


class LosslessGather:
    """Gathers of one parameter group's shards, which are like ``output``, and the values that this rank keeps of
    them."""

    def __init__(self, plan: _c10d.Operation, output: torch.Tensor) -> None:
        self.plan = plan
        self.is_bytes = output.dtype == torch.uint16  #: in pairs
        self.kept = torch.empty(plan.kept_bytes, dtype=torch.uint8, device=output.device)
        self.held = plan.keeping(self.kept)
        #: NCCL needs the size of a difference on the host before it is sent: see prepare().
        self.needs_sizes = output.device.type != "cpu"
        self._shard_bytes = 0

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, or per byte, that the last gather sent to a holder, with headers."""
        return (8 if self.is_bytes else 16) * self.held.sent_bytes / self._shard_bytes if self._shard_bytes else 0.0

    def gather(self, call: GatherCall, site: _c10d.Site) -> Any:
        """Fill the output with every rank's shard. Raises RuntimeError if a received shard differs from its owner's."""
        self._shard_bytes = call.shard.nbytes
        work = self.held.run(call.target, call.whole_shard, site=site, async_op=call.async_op)
        return finished(work, call.async_op)

    def gather_again(self, call: GatherCall, site: _c10d.Site) -> Any:
        """Gather the values of the last gather again, within the node. Raises RuntimeError if a rank's kept values have
        been changed."""
        work = self.held.run(call.target, site=site, async_op=call.async_op)
        return finished(work, call.async_op)
