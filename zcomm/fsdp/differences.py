"""Exact 16-bit weights for fewer bytes than 8-bit ones: lossless differences between nodes.

In each node the holder of a rank's shard is the rank of the same local rank, modulo the ranks of the node. Holders keep
the values of the last gather. The owner of a shard sends what has changed since; inside a node the values are sent
exactly: ``all_gather`` of a DifferencePlan in include/zcomm/collectives.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zcomm.distributed.groups import backend_of
from zcomm.fsdp.collectives import GatherCall, finished

if TYPE_CHECKING:
    from zcomm.distributed.binding import _c10d


def plan_differences(name: str, call: GatherCall, kept: _c10d.PlannedDifferences | None) -> _c10d.PlannedDifferences:
    """How the gather of the module ``name`` goes by differences: ``kept``, if it is like that one.

    Raises ValueError where it cannot.
    """
    try:
        return backend_of(call.group).plan_differences(call.output, call.shard, kept=kept)
    except ValueError as error:
        is_float32 = call.shard.dtype == torch.float32
        hint = "; MixedPrecisionPolicy(param_dtype=torch.bfloat16) saves more than they would" if is_float32 else ""
        raise ValueError(f"wire: {name} cannot gather by differences: {error}{hint}") from None


def prepare(
    group: dist.ProcessGroup, gathers: Sequence[tuple[DifferenceGather, torch.Tensor, _c10d.Site]], async_op: bool
) -> None:
    """Encodes these shards ahead of their next gathers, and waits for the GPU once, for the sizes of all."""
    backend_of(group).prepare_differences(
        [(each.plan, shard, each.held, site) for each, shard, site in gathers], async_op=async_op
    ).wait()


class DifferenceGather:
    """The gathers of one parameter group's shards, and what they leave with this rank."""

    def __init__(self, plan: _c10d.PlannedDifferences, device: torch.device) -> None:
        self.plan = plan
        self.held = plan.hold(torch.empty(plan.kept_bytes, dtype=torch.uint8, device=device))
        #: Over NCCL the host must know the size of a difference before it is sent: see prepare().
        self.needs_sizes = device.type != "cpu"
        self._num_elements = 0  # of a shard

    @property
    def bits_per_weight(self) -> float:
        """That the last gather sent to a holder, headers included."""
        return 8 * self.held.sent_bytes / self._num_elements if self._num_elements else 0.0

    def gather(self, call: GatherCall, site: _c10d.Site) -> Any:
        """Fills the output with every rank's shard. Raises RuntimeError if a shard that arrives is not the one that its
        owner has."""
        self._num_elements = call.shard.numel()
        work = self.plan.run(call.output, call.shard, self.held, site=site, async_op=call.async_op)
        return finished(work, call.async_op)

    def gather_again(self, call: GatherCall, site: _c10d.Site) -> Any:
        """The values of the last gather once more, inside the node. Raises RuntimeError if what a rank keeps of them
        has been written to."""
        work = self.plan.run_from_held(call.output, self.held, site=site, async_op=call.async_op)
        return finished(work, call.async_op)
