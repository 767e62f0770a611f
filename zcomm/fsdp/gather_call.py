"""One all-gather of FSDP2, and how it is carried out by a plan."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from zcomm.distributed import _fsdp2
from zcomm.distributed.binding import _c10d
from zcomm.distributed.overrides import forced_exact
from zcomm.fsdp.fused import Deferred

#: Why torch carries out a call, if it is no operation.
Plan: TypeAlias = _c10d.Operation | _c10d.Verdict

#: What becomes of the values: by torch or by a plan in FSDP2's buffer, which FSDP2 copies; or without that buffer.
GatherWay = enum.Enum("GatherWay", "EXACT COPIED INTO_PARAMETERS LEFT_AS_WIRES")


@dataclass(frozen=True)
class GatherCall:
    """One all-gather of FSDP2. ``plan``: the operation, or why the call stays exact. ``parts``: of each parameter the
    place of all ranks' shards, if they are gathered there. Planned bytes are uint16."""

    way: GatherWay
    output: torch.Tensor
    shard: torch.Tensor
    group: dist.ProcessGroup
    plan: Plan
    async_op: bool
    previous: _fsdp2.AllGather  # gathers exactly
    parts: Sequence[torch.Tensor] = ()

    @property
    def target(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """Where values are gathered."""
        return self.parts or self.output

    @property
    def source(self) -> torch.Tensor | Sequence[torch.Tensor]:
        """This rank's values, copied for an asynchronous call, as in FSDP2: the weights may change meanwhile."""
        return self.shard.buffer.parts if isinstance(self.shard, Deferred) and not self.async_op else self.whole_shard

    @property
    def whole_shard(self) -> torch.Tensor:
        """This rank's values, end to end."""
        return self.shard.buffer.memory() if isinstance(self.shard, Deferred) else self.shard

    def run_alone(self, site: _c10d.Site) -> Any:
        """Carry it out without a secondary shard, as FSDP2's AllGather does."""
        if isinstance(self.plan, _c10d.Verdict):
            with forced_exact(self.plan):
                return self.previous(self.output, self.shard, self.group, self.async_op)
        return self.run(self.plan, site)

    def run(self, plan: _c10d.Operation, site: _c10d.Site, *, again: bool = False) -> Any:
        """Carry it out by ``plan``, from kept wires if ``again``."""
        source = None if again else self.source
        if self.way is not GatherWay.LEFT_AS_WIRES or not isinstance(self.output, Deferred):
            return finished(plan.run(self.target, source, site=site, async_op=self.async_op), self.async_op)
        wires = torch.empty(plan.wires_bytes, dtype=torch.uint8, device=self.output.device)
        self.output.buffer.decode_later(lambda values: plan.decode(values, wires))
        return finished(plan.run(None, source, wires=wires, site=site, async_op=self.async_op), self.async_op)


def finished(work: Any, async_op: bool) -> Any:
    """Return what FSDP2 expects: the work of an asynchronous call, or None once a synchronous one is done."""
    if async_op:
        return work
    work.wait()
    return None
