"""Secondary shards for FSDP2: weights cross nodes once, however often they are gathered.

The idea is hpZ of ZeRO++ (https://arxiv.org/abs/2306.10209): the ranks of a node keep the gathered weights among them,
so that the next gather stays inside the node. Here they keep the compressed bytes that came over the wire: each of L
ranks of a node keeps an L-th of them, and what is gathered from these has the same bits as the first gather.
"""

from __future__ import annotations

import logging
import os
import statistics
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcomm._renamed import NODE_BYTES, renamed
from zcomm.distributed.binding import _c10d
from zcomm.distributed.overrides import override
from zcomm.distributed.report import WEIGHT_SENDERS
from zcomm.distributed.single import all_gather_single
from zcomm.fsdp import _fsdp2
from zcomm.fsdp.collectives import Collectives, Differences, GatherCall, collectives_of, finished
from zcomm.fsdp.differences import DifferenceGather, plan_differences, prepare

_log = logging.getLogger("zcomm")

#: What is sent between nodes: wires in the formats of the options, or lossless differences.
WIRES = ("compressed", "difference")


@renamed({**NODE_BYTES, "gathers_inside": "gathers_intra_node", "gathers_between": "gathers_inter_node"})
@dataclass
class ModuleStats:
    """What one module of FSDP has gathered. Bytes were sent by this rank; they are counted when a gather is done."""

    gathers_inter_node: int = 0  #: from the shards of all ranks, across nodes
    gathers_intra_node: int = 0  #: from secondary shards, inside the node
    gathers_plain: int = 0  #: left exact by the options, or of weights that cannot be watched
    gathers_beyond_limit: int = 0  #: compressed, and without a secondary shard, as ``max_bytes`` is used up
    inter_node_bytes: int = 0  #: sent to other nodes
    intra_node_bytes: int = 0  #: sent to ranks of the node
    memory_bytes: int = 0  #: of this rank's secondary shard
    generation: int = 0  #: of lossless differences: gathers since whole weights were sent, that one included
    bits_per_weight: float = 0.0  #: that the last lossless difference took on its way to another node; 0 without one


def enable_secondary_shards(
    model: torch.nn.Module, *, max_bytes: int | None = None, wire: str | None = None
) -> SecondaryShards:
    """Give every module of ``model`` that ``fully_shard`` was, or will be, applied to a secondary shard.

    A gather of weights that have not changed since the last one then moves no byte between nodes: in the backward pass,
    in further micro-batches, in generation and evaluation. A change is noticed without synchronization: a step of an
    optimizer of torch.optim by a hook, in-place operations and ``load_state_dict`` by the version counters of the
    sharded parameters, exchanged parameters by their addresses. PyTorch does not count a write through ``param.data``,
    NumPy or a kernel of one's own, ``torch._foreach_*`` on sharded parameters, or what a collective or a receive of
    torch.distributed writes into them: call ``invalidate()`` after these, and after a step of an optimizer that is not
    a ``torch.optim.Optimizer``. Ranks must change weights alike, as they do in training.

    Gathers that the options leave exact (below ``min_bytes``, other dtypes, ``zcomm.exact()``), and those of a
    ``reshard_after_forward`` mesh, are as without secondary shards.

    With ``wire="difference"`` weights are exact, bit for bit: what crosses nodes are lossless differences to what the
    holders of secondary shards still have, of bfloat16 or float16. The first gather sends whole weights. On a GPU the
    host waits for the GPU once per optimizer step, and CUDA graphs cannot capture the gathers. Secondary shards are
    then the weights themselves, 2 bytes each: on a rank of a node of L an L-th of the model, and all of it where a node
    has one rank. What the options would compress is sent so; a module for which :func:`compress` has set a format for
    ``all_gather`` keeps that.

    Args:
        wire: ``"compressed"``, in the formats of the options, or ``"difference"``; default: the environment's
            ``ZCOMM_SECONDARY_WIRE``, else ``"compressed"``.
        max_bytes: limit of a rank's secondary shards. Modules whose shards would exceed it go without, and are named in
            a warning. Default: no limit.

    Raises:
        ValueError: ``max_bytes`` is negative, or ``wire`` is unknown.
        ValueError: at a gather of float32, if ``wire`` is ``"difference"``.
        RuntimeError: at a gather that a CUDA graph captures, if ``wire`` is ``"difference"``.
        ValueError: at the first forward pass, if a module's process group was not made with the backend "zcomm".
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes: expected 0 or more, or None, got {max_bytes}")
    return SecondaryShards(model, max_bytes, checked_wire(wire or os.environ.get("ZCOMM_SECONDARY_WIRE") or WIRES[0]))


def checked_wire(wire: str) -> str:
    if wire not in WIRES:
        raise ValueError(f"wire: expected {' or '.join(map(repr, WIRES))}, got {wire!r}")
    return wire


class SecondaryShards:
    """What :func:`enable_secondary_shards` returns: it switches them off, and counts."""

    def __init__(self, model: torch.nn.Module, max_bytes: int | None, wire: str) -> None:
        self._model = model
        self._wire = wire
        self._shards: dict[Collectives, _Shard] = {}
        self.max_bytes = max_bytes
        self._used_bytes = 0  # of the limit: the largest of all ranks, so that all decide alike
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._install(), prepend=True),
            register_optimizer_step_post_hook(_StepHook(self)),  # torch's own: it must not keep the model
        ]
        weakref.finalize(self, self._hooks[1].remove)
        WEIGHT_SENDERS.add(self)
        self._install()

    def _install(self) -> None:
        for group in collectives_of(self._model):
            if group not in self._shards:
                if isinstance(group.strategy, Differences):
                    raise group.not_both()
                group.strategy = self._shards[group] = _Shard(self, group)

    def disable(self) -> None:
        """Gather as before, and free the secondary shards."""
        for hook in self._hooks:
            hook.remove()
        for group, shard in self._shards.items():
            group.drop_strategy(shard)
        self._shards.clear()

    @property
    def wire(self) -> str:
        """What is sent between nodes. It can be set while training, on all ranks alike."""
        return self._wire

    @wire.setter
    def wire(self, wire: str) -> None:
        if checked_wire(wire) != self._wire:
            self._wire = wire
            for shard in self._shards.values():
                shard.forget()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Fused and foreach steps change sharded parameters without counting a version. Those without a gradient stay as
        # they are.
        params = (param for param_group in optimizer.param_groups for param in param_group["params"])
        changed = {id(param) for param in params if param.requires_grad or param.grad is not None}
        for group, shard in self._shards.items():
            if any(_fsdp2.parameter_id(param) in changed for param in group.params):
                shard.outdate()

    def invalidate(self) -> None:
        """Gather across nodes next time: after a change that PyTorch does not count, on all ranks."""
        for shard in self._shards.values():
            shard.outdate()

    def memory_bytes(self) -> int:
        """Of all secondary shards on this rank."""
        return sum(shard.memory_bytes for shard in self._shards.values())

    def stats(self) -> dict[str, ModuleStats]:
        """By the name of the module."""
        return {group.name: shard.stats() for group, shard in self._shards.items()}

    def explain(self, group: str) -> list[str]:
        """How the modules that gather in the group of this name send their weights, for :func:`zcomm.report`."""
        taken = {
            name: costs
            for name, costs in ((of.name, shard.costs(group)) for of, shard in self._shards.items())
            if costs is not None
        }
        if not taken:
            return []
        bits = [cost.bits_per_weight for cost in taken.values()]
        lines = [
            f"weights of {len(taken)} modules cross nodes as lossless differences, exact to the bit: "
            f"{min(bits):.3g} to {max(bits):.3g} bits per weight in their last gathers, the median is "
            f"{statistics.median(bits):.3g}"
        ]
        for name, cost in taken.items():
            if cost.bits_per_weight > cost.compressed_bits:
                lines.append(
                    f"{name}: its last difference took {cost.bits_per_weight:.3g} bits per weight, {cost.format} "
                    f"would take {cost.compressed_bits:.3g} and round: zcomm.fsdp.compress(all_gather="
                    f"{cost.format!r}) of this module sends less"
                )
        return lines

    def _prepare(self, first: _Shard, call: GatherCall, version: WeightsVersion) -> None:
        """Before ``first`` gathers by differences on a GPU: encodes those of all modules whose weights have changed, so
        that the host waits for the GPU once after a step, and not once for each module."""
        gathers = [first.to_prepare(call.shard, version)]
        for shard in self._shards.values():
            if shard is not first and (other := shard.outdated_in(call.group.group_name)) is not None:
                gathers.append(shard.to_prepare(*other))
        prepare(call.group, gathers, call.async_op)

    def _reserve(self, name: str, num_bytes: int) -> bool:
        if self.max_bytes is not None and self._used_bytes + num_bytes > self.max_bytes:
            _log.warning(
                "%s goes without a secondary shard: its %d bytes would exceed max_bytes=%d, of which %d are in use",
                name, num_bytes, self.max_bytes, self._used_bytes,
            )  # fmt: skip
            return False
        self._used_bytes += num_bytes
        return True

    def _release(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes


class _StepHook:
    def __init__(self, shards: SecondaryShards) -> None:
        self._shards = weakref.ref(shards)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (shards := self._shards()) is not None:
            shards._after_step(optimizer)


@dataclass(frozen=True)
class DifferenceCosts:
    """Of a module's last gather by a lossless difference, beside what ``format`` would have taken."""

    bits_per_weight: float
    format: str
    compressed_bits: float


@dataclass(frozen=True)
class WeightsVersion:
    """What a secondary shard was made of. Two that are equal are of the same weights, in the same message."""

    params: tuple[tuple[int, ...], ...]
    plan: _c10d.PlannedGather


class _Shard:
    """The secondary shard of one parameter group, from which it gathers where it can."""

    def __init__(self, owner: SecondaryShards, group: Collectives) -> None:
        self._owner = owner
        self._group = group
        self._intra_node = _c10d.Site(group.name, [])
        self._kept: torch.Tensor | None = None
        self._differences: DifferenceGather | None = None  # in place of that
        self._difference_plan: _c10d.PlannedDifferences | None = None
        self._group_name = ""  # of the last difference
        self._alternative: _c10d.PlannedGather | None = None  # what would be sent instead
        self._kept_version: WeightsVersion | None = None  # of the weights that are kept
        self._prepared_version: WeightsVersion | None = None  # of the weights that the next gather will send
        self._reserved: int | None = None  # of max_bytes: 0 if it does not fit, None if it is not decided
        self.gathers_inter_node = 0
        self.gathers_intra_node = 0
        self.gathers_plain = 0
        self.gathers_beyond_limit = 0

    @property
    def memory_bytes(self) -> int:
        kept = self._kept if self._differences is None else self._differences.held.data
        return 0 if kept is None else kept.numel()

    def stats(self) -> ModuleStats:
        across, intra_node, exact = self._group.gathered, self._intra_node, self._differences
        return ModuleStats(
            gathers_inter_node=self.gathers_inter_node,
            gathers_intra_node=self.gathers_intra_node,
            gathers_plain=self.gathers_plain,
            gathers_beyond_limit=self.gathers_beyond_limit,
            inter_node_bytes=across.inter_node_bytes + intra_node.inter_node_bytes,
            intra_node_bytes=across.intra_node_bytes + intra_node.intra_node_bytes,
            memory_bytes=self.memory_bytes,
            generation=exact.held.generation if exact else 0,
            bits_per_weight=exact.bits_per_weight if exact else 0.0,
        )

    def costs(self, group: str) -> DifferenceCosts | None:
        """None: this module has sent no difference in that group."""
        exact, other = self._differences, self._alternative
        if exact is None or other is None or self._group_name != group or exact.held.generation < 2:
            return None
        compressed_bits = 16 * other.largest_secondary_bytes / exact.plan.largest_kept_bytes
        return DifferenceCosts(exact.bits_per_weight, other.format, compressed_bits)

    def outdate(self) -> None:
        self._kept_version = self._prepared_version = None

    def forget(self) -> None:
        """What is kept is not what the next gathers need."""
        self._owner._release(self._reserved or 0)
        self._kept = self._kept_version = self._prepared_version = self._differences = self._reserved = None

    def _fits(self, num_bytes: int) -> bool:
        """``num_bytes``: of the rank that needs most, so that all ranks decide alike."""
        if self._reserved is None:
            self._reserved = num_bytes if self._owner._reserve(self._group.name, num_bytes) else 0
        return self._reserved > 0 or num_bytes == 0

    def allocate(self, size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._group.plain.allocate(size, dtype, device)

    def keeps_wires(self) -> bool:
        return not self._is_exact() and self._reserved != 0

    def gather(self, call: GatherCall) -> Any:
        plan = call.plan
        version = None if plan is None else self._version_of(plan)
        if plan is None or version is None:
            self.gathers_plain += 1
            return self._group.plain.gather(call)
        if self._is_exact():
            return self._gather_exactly(call, version)
        if self._differences is not None:  # the module has a format of its own since then
            self.forget()
        if self._kept is not None and version == self._kept_version:
            self.gathers_intra_node += 1
            work = plan.run_from_secondary(call.output, self._kept, site=self._intra_node, async_op=call.async_op)
            return finished(work, call.async_op)
        if not self._fits(plan.largest_secondary_bytes):
            self.gathers_beyond_limit += 1
            return self._group.plain.gather(call)
        if self._kept is None or self._kept.numel() != plan.secondary_bytes:
            self._kept = torch.empty(plan.secondary_bytes, dtype=torch.uint8, device=call.output.device)
        self._kept_version = None  # while it is being written
        self.gathers_inter_node += 1
        work = plan.run(
            call.output, call.shard, secondary=self._kept, site=self._group.gathered, async_op=call.async_op
        )
        self._kept_version = version
        return finished(work, call.async_op)

    def _gather_exactly(self, call: GatherCall, version: WeightsVersion) -> Any:
        """By lossless differences."""
        plan = self._difference_plan = plan_differences(self._group.name, call, self._difference_plan)
        if not self._fits(plan.largest_kept_bytes):
            self.gathers_beyond_limit += 1
            with override(all_gather="exact"):
                work = all_gather_single(call.output, call.shard, group=call.group, async_op=True)
            return finished(work, call.async_op)
        if self._differences is None or self._differences.plan is not plan:
            self._kept = self._kept_version = self._prepared_version = None
            self._differences = DifferenceGather(plan, call.output.device)
            self._group_name = call.group.group_name
        self._alternative = call.plan
        if version == self._kept_version:
            self.gathers_intra_node += 1
            return self._differences.gather_again(call, self._intra_node)
        self._kept_version = None  # while it is being written
        self.gathers_inter_node += 1
        if self._differences.needs_sizes and self._prepared_version != version:
            self._owner._prepare(self, call, version)
        self._prepared_version = None
        work = self._differences.gather(call, self._group.gathered)
        self._kept_version = version
        return work

    def _is_exact(self) -> bool:
        rule = self._group.rule
        return self._owner.wire == "difference" and (rule is None or rule.all_gather is None)

    def outdated_in(self, group: str) -> tuple[torch.Tensor, WeightsVersion] | None:
        """The weights that the next gather in that process group will send, and their version, if that is known: the
        module has sent differences before, and its weights have changed since."""
        plan = self._group.last_gather_plan
        if self._group.strategy is not self or not self._is_exact():
            return None
        if self._differences is None or self._group_name != group or plan is None:
            return None
        version = self._version_of(plan)
        if version is None or version in (self._kept_version, self._prepared_version):
            return None
        shard = self._group.shard()
        return None if shard is None else (shard, version)

    def to_prepare(self, shard: torch.Tensor, version: WeightsVersion) -> tuple[DifferenceGather, torch.Tensor, Any]:
        assert self._differences is not None
        self._prepared_version = version
        return self._differences, shard, self._group.gathered

    def _version_of(self, plan: _c10d.PlannedGather) -> WeightsVersion | None:
        """None: the weights cannot be watched."""
        params = []
        for param in self._group.params:
            version = _fsdp2.version_of(param)
            if version is None:
                return None
            params.append(version)
        return WeightsVersion(tuple(params), plan)
