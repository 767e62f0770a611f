"""Replacements of FSDP2's all-gather and reduce-scatter in a module."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zcomm.distributed import _fsdp2
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of, find_backend
from zcomm.distributed.overrides import kept_exact, override
from zcomm.distributed.residuals import residual_of
from zcomm.fsdp.fused import COMPRESSIBLE, Buffer, Deferred, gradients_of, in_memory
from zcomm.fsdp.gathers import GatherCall, Keeper, ModuleStats, Rule, finished

_log = logging.getLogger("zcomm")

Backend: TypeAlias = "_c10d.ProcessGroup"

#: Pairs (number of elements of a shard, whether they are sent exactly), from its first element on.
Parts = list[tuple[int, bool]]


class Collectives:
    """Those of one parameter group. Without a rule they are FSDP2's, in the formats of the process group."""

    def __init__(self, path: str, module: FSDPModule, param_group: Any) -> None:
        self.param_group = param_group
        self.rename(path, module)
        self._residual_key = self.name
        self.rule: Rule | None = None
        self.secondary: Keeper | None = None  # gathers in place of gather()
        self.gathered = _c10d.Site(self.name, [])
        self.reduced = _c10d.Site(self.name, [])
        self._told: set[str] = set()  # what warnings were about
        self.counted = ModuleStats("", "", elements=0, exempt_elements=0)  # under the rule; stats() adds to it
        # By the process group's name: of reshard_after_forward's mesh there is another one.
        self._gather_plans: dict[str, _c10d.Operation] = {}
        self._reduce_plan: _c10d.Operation | None = None
        self._gather, self._reduce = _Gather(self), _Reduce(self)
        #: FSDP2's own, or a user's.
        self.previous_gather, self.previous_reduce = _fsdp2.collectives_of(param_group)
        _fsdp2.set_owner(param_group, self)
        self.take_over()

    def rename(self, path: str, module: FSDPModule) -> None:
        """Name it after ``module``. ``path``: its name in the largest model seen; "" for that model itself."""
        groups = list(_fsdp2.groups_of(module))
        self.path = path
        self.name = path or type(module).__name__
        if len(groups) > 1:
            self.name += f"[{groups.index(self.param_group)}]"

    @property
    def params(self) -> Sequence[Any]:
        """Params of FSDP2: see _fsdp2."""
        return _fsdp2.params_of(self.param_group)

    def take_over(self, gather: bool = True, reduce: bool = True) -> None:
        """Replace these collectives of the group, those of a user, too."""
        found = _fsdp2.collectives_of(self.param_group)
        if gather and found[0] is not self._gather:
            self.previous_gather = found[0]
        if reduce and found[1] is not self._reduce:
            self.previous_reduce = found[1]
        ours = self._gather if gather else found[0], self._reduce if reduce else found[1]
        _fsdp2.set_collectives(self.param_group, *ours)

    def are_ours(self) -> tuple[bool, bool]:
        """Tell whether the gather and the reduction of the group are these, and not a user's."""
        gather, reduce = _fsdp2.collectives_of(self.param_group)
        return gather is self._gather, reduce is self._reduce

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Restore the collectives that were replaced, inside of a block."""
        gather, reduce = _fsdp2.collectives_of(self.param_group)
        is_ours = self.are_ours()
        previous = self.previous_gather if is_ours[0] else gather, self.previous_reduce if is_ours[1] else reduce
        _fsdp2.set_collectives(self.param_group, *previous)
        try:
            yield
        finally:
            self.take_over(*is_ours)

    def set_rule(self, rule: Rule, secondary: Keeper | None) -> None:
        """Counts anew: what is sent differently is not added up. Leaves a rule of a later number."""
        if self.rule is not None and self.rule.number > rule.number:
            return
        self.take_over()
        self.drop_rule(self.rule)
        self._told.clear()
        numels = [_fsdp2.num_elements(param) for param in self.params]
        exempt_elements = sum(numel for numel, exempt in zip(numels, rule.exempt, strict=True) if exempt)
        self.counted = ModuleStats(rule.weights or "", rule.gradients or "", sum(numels), exempt_elements)
        self.rule, self.secondary = rule, secondary
        if rule.error_feedback is not None:
            self._residual_key = rule.error_feedback.claim(self, self.name)
        lossy = [param for param, exempt in zip(self.params, rule.exempt, strict=True) if not exempt]
        names = {id(param): _fsdp2.name_of(self.param_group, param) for param in lossy}
        self.gathered = _c10d.Site(self.name, [names[id(param)] for param in lossy])
        self.reduced = _c10d.Site(self.name, [names[id(param)] for param in lossy if _fsdp2.requires_grad(param)])

    def drop_rule(self, rule: Rule | None) -> None:
        """Remove ``rule`` if it is still in force."""
        if self.rule is rule:
            if self.secondary is not None:
                self.secondary.forget()
            self.rule = self.secondary = None

    def stats(self) -> ModuleStats:
        """Return what was sent so far, under the rule."""
        counted = replace(
            self.counted,
            gathers=self.gathered.calls,
            gathered_intra_node_bytes=self.gathered.intra_node_bytes,
            gathered_inter_node_bytes=self.gathered.inter_node_bytes,
            reduces=self.reduced.calls,
            reduced_intra_node_bytes=self.reduced.intra_node_bytes,
            reduced_inter_node_bytes=self.reduced.inter_node_bytes,
        )
        return self.secondary.add_to(counted) if self.secondary is not None else counted

    def gather(self, call: GatherCall) -> Any:
        """Do as FSDP2's AllGather does, without a secondary shard."""
        if isinstance(call.plan, _c10d.Verdict):
            with kept_exact(call.plan):
                return self.previous_gather(call.output, call.shard, call.group, call.async_op)
        return call.run(call.plan, self.gathered)

    def as_values(self, output: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View shards of several dtypes, which FSDP2 gathers as bytes, as the float dtype with the most bytes."""
        if shard.dtype != torch.uint8:
            return output, shard
        num_bytes: dict[torch.dtype, list[int]] = {}
        for numel, dtype in (_fsdp2.gathered_part(param) for param in self.params):
            if dtype is None:
                return output, shard
            num_bytes.setdefault(dtype, []).append(numel * dtype.itemsize)
        for dtype in sorted(num_bytes.keys() & COMPRESSIBLE, key=lambda dtype: -sum(num_bytes[dtype])):
            if all(size % dtype.itemsize == 0 for sizes in num_bytes.values() for size in sizes):
                return output.view(dtype), shard.view(dtype)
        return output, shard

    def _parts_of(self, shard: torch.Tensor, is_mixed: bool) -> Parts:
        """Return the parts; none if all parameters have the same format. Parameters of other dtypes are exact."""
        rule = None if self.rule is None or self.rule.is_lossless else self.rule
        if rule is None and not is_mixed:
            return []
        gathered = [_fsdp2.gathered_part(param) for param in self.params]
        others = [dtype not in (None, shard.dtype) for _, dtype in gathered]
        exempt = rule.exempt if rule else [False] * len(gathered)
        return [
            (numel * (dtype or shard.dtype).itemsize // shard.itemsize, is_exempt or is_other)
            for (numel, dtype), is_exempt, is_other in zip(gathered, exempt, others, strict=True)
        ]

    def defers_gather(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Tell whether the next gather may decode into the parameters."""
        rule = self.rule
        if rule is None or not rule.fused or rule.weights == "exact" or (rule.is_lossless and decodes_later(device)):
            return False
        return dtype in COMPRESSIBLE and (self.secondary is None or self.secondary.takes_parts())

    def defers_reduce(self, num_elements: int, dtype: torch.dtype) -> bool:
        """Tell whether a buffer of this size is the input of a reduction that may read the gradients themselves."""
        rule = self.rule
        if rule is None or not rule.fused or rule.gradients == "exact" or dtype not in COMPRESSIBLE:
            return False
        shards, _ = _fsdp2.process_groups_of(self.param_group)
        size = shards.size() if shards is not None else 1
        reduced = [_fsdp2.reduced_elements(param) for param in self.params if _fsdp2.requires_grad(param)]
        return size > 1 and num_elements == size * sum(reduced) and 0 not in reduced

    def as_pairs(self, output: torch.Tensor, shard: torch.Tensor, backend: Backend) -> tuple[torch.Tensor, ...]:
        """View bytes that nodes may keep in pairs, as uint16."""
        if self.secondary is None or shard.itemsize != 1:
            return output, shard
        if shard.numel() % 2 == 0:
            return output.view(torch.uint16), shard.view(torch.uint16)
        if "bytes" not in self._told and self._would_plan(torch.uint16, output, shard, backend):
            self._told.add("bytes")
            _log.warning("%s gathers an odd number of bytes: nodes do not keep them", self.name)
        return output, shard

    def _would_plan(self, dtype: torch.dtype, output: torch.Tensor, shard: torch.Tensor, backend: Backend) -> bool:
        """Tell whether such bytes would be planned as elements of ``dtype``, if that gains anything."""
        numel = shard.numel() // dtype.itemsize * dtype.itemsize
        whole, own = (output[: size * numel].view(dtype) for size in (backend.size(), 1))
        with override(policy="always"):  # a trial would make calls that nobody asked for
            plan = backend.plan_gather(whole, own, formats=self.rule.formats if self.rule else None)
        return isinstance(plan, _c10d.Operation)

    def warn_of_floats(self, output: torch.Tensor, shard: torch.Tensor, backend: Backend) -> None:
        """Warn if parameters that could be compressed are gathered as bytes, among those of others."""
        rule = self.rule
        is_told = "floats" in self._told and not backend.is_strict
        if shard.itemsize != 1 or is_told or (rule is not None and rule.is_lossless):
            return
        dtypes = [_fsdp2.gathered_part(param)[1] for param in self.params]
        exempt = rule.exempt if rule else [False] * len(dtypes)
        has_floats = any(dtype in COMPRESSIBLE and not each for dtype, each in zip(dtypes, exempt, strict=True))
        if has_floats and self._would_plan(torch.float32, output, shard, backend):
            what = "gathers floats among the bytes of others, and would compress them in a module apart"
            self.warn("floats", what, backend)

    def plan_gather(
        self,
        output: torch.Tensor | Sequence[torch.Tensor],
        shard: torch.Tensor,
        backend: Backend,
        *,
        group: str,
        is_mixed: bool,
    ) -> _c10d.Operation | _c10d.Verdict:
        """Plan a gather in the process group of this name, or return why torch carries it out. ``is_mixed``: parameters
        have several dtypes."""
        rule = self.rule
        formats = rule.formats if rule else None
        is_bytes = shard.dtype == torch.uint16
        parts = [] if is_bytes else self._parts_of(shard, is_mixed)
        if not parts and not isinstance(output, torch.Tensor):
            parts = [(part.numel() // backend.size(), False) for part in output]
        if parts and (total := sum(numel for numel, _ in parts)) != shard.numel():
            plan = backend.plan_gather(output, shard, formats=formats)
            if isinstance(plan, _c10d.Verdict):
                return plan
            what = f"gathers {shard.numel()} elements, which are not its {total} parameters as they are"
            self.warn("weights", what, backend)
            return _c10d.Verdict.layout
        keeps_wires = self.secondary is not None and self.secondary.keeps_wires()
        again = keeps_wires and _fsdp2.gathers_again(self.param_group)
        like = self._gather_plans.get(group)
        plan = backend.plan_gather(output, shard, formats=formats, parts=parts, again=again, like=like)
        if isinstance(plan, _c10d.Operation):
            self._gather_plans[group] = plan
        return plan

    def plan_reduce(
        self, output: torch.Tensor, whole: torch.Tensor | Sequence[torch.Tensor], op: Any, backend: Backend
    ) -> _c10d.Operation | _c10d.Verdict:
        """Plan a reduce-scatter, or return why it stays exact."""
        rule = self.rule
        assert rule is not None
        parts: Parts = [
            (_fsdp2.reduced_elements(param), exempt)
            for param, exempt in zip(self.params, rule.exempt, strict=True)
            if _fsdp2.requires_grad(param)
        ]
        total = sum(numel for numel, _ in parts)
        if total != output.numel():
            plan = backend.plan_reduce(output, whole, op, formats=rule.formats)
            if isinstance(plan, _c10d.Verdict):
                return plan
            self.warn(
                "gradients",
                f"has gradients for some of its parameters only ({output.numel()} elements of {total}), and "
                "which ones cannot be told: set_reduce_scatter_unused_params(True) sends zeros for the others",
                backend,
            )
            return _c10d.Verdict.layout
        feedback = rule.error_feedback.block_format if rule.error_feedback else None
        plan = backend.plan_reduce(
            output, whole, op, formats=rule.formats, parts=parts, feedback=feedback, like=self._reduce_plan
        )
        if isinstance(plan, _c10d.Operation):
            self._reduce_plan = plan
        return plan

    def residual_of(
        self, output: torch.Tensor, plan: _c10d.Operation, backend: Backend
    ) -> tuple[torch.Tensor, float, bool] | None:
        feedback = self.rule.error_feedback if self.rule else None
        if feedback is None:
            return None
        # What one parameter has lost is not another's, which may have the same plan, and is kept while it is frozen.
        reduced = [number for number, param in enumerate(self.params) if _fsdp2.requires_grad(param)]
        of = "" if len(reduced) == len(self.params) else f", parameters {reduced}"
        layout = f"{output.numel() * backend.size()} {output.dtype} in {plan.segments} of {plan.ranks}"
        key = f"{self._residual_key}/rank {dist.get_rank()}{of}"
        return residual_of(feedback, key, layout, plan.residual_bytes, output.device)

    def warn(self, about: str, what: str, backend: Backend) -> None:
        """Tell once why calls of this kind stay exact; raise RuntimeError where that is forbidden."""
        if backend.is_strict:
            raise RuntimeError(f"strict=True forbids that a call goes out exact: {self.name} {what}")
        if about not in self._told:
            self._told.add(about)
            _log.warning("%s %s: left exact", self.name, what)


class _Gather(_fsdp2.AllGather):  # type: ignore[misc]
    def __init__(self, owner: Collectives) -> None:
        self.owner = owner

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocate = functools.partial(self.owner.previous_gather.allocate, size, dtype=dtype, device=device)
        is_deferred = self.owner.defers_gather(dtype, device)
        return Deferred(Buffer(allocate), size, dtype, device) if is_deferred else allocate()

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        owner = self.owner
        backend = find_backend(group)
        if backend is None and owner.rule is None:  # reshard_after_forward made a group with another backend
            return owner.previous_gather(in_memory(output_tensor), in_memory(input_tensor), group, async_op)
        backend = backend or backend_of(group)  # raises
        output, shard = owner.as_values(output_tensor, input_tensor)
        owner.warn_of_floats(output, shard, backend)
        # A shard with the parameters' own values, in their dtype.
        is_whole = all(dtype == shard.dtype for _, dtype in map(_fsdp2.gathered_part, owner.params))
        is_fused = isinstance(output, Deferred) and is_whole
        is_late = is_fused and decodes_later(output.device)
        parts: Sequence[torch.Tensor] = ()
        if is_fused and not is_late:
            parts = _fsdp2.unsharded_data(owner.param_group, group.size(), shard.device)
        is_mixed = shard is not input_tensor
        output, shard = owner.as_pairs(output, shard, backend)
        plan = owner.plan_gather(parts or output, shard, backend, group=group.group_name, is_mixed=is_mixed)
        if isinstance(plan, _c10d.Verdict):  # exact gathers keep FSDP2's view as bytes
            output, shard, parts, is_late = output_tensor, input_tensor, (), False
            owner.counted.gathers_plain += 1
        if parts and isinstance(output, Deferred):
            output.buffer.gather_into(parts, group.size())
        elif not is_late:
            output = in_memory(output)
        if is_late and isinstance(shard, Deferred):
            shard = torch.cat(shard.buffer.parts)  # a copy, which lives as long as its users
        elif not parts:
            shard = in_memory(shard)
        owner.counted.gathers_fused += bool(parts) or is_late
        gathering = owner if owner.secondary is None else owner.secondary
        return gathering.gather(GatherCall(output, shard, group, plan, async_op, parts))


class _Reduce(_fsdp2.ReduceScatter):  # type: ignore[misc]
    def __init__(self, owner: Collectives) -> None:
        self._owner = owner

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocate = functools.partial(self._owner.previous_reduce.allocate, size, dtype=dtype, device=device)
        is_deferred = self._owner.defers_reduce(math.prod(size), dtype)
        return Deferred(Buffer(allocate), size, dtype, device) if is_deferred else allocate()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        owner = self._owner
        if owner.rule is None:
            return owner.previous_reduce(output_tensor, in_memory(input_tensor), group, op, async_op)
        backend = backend_of(group)
        parts = gradients_of(input_tensor)
        whole = parts or in_memory(input_tensor)
        plan = owner.plan_reduce(output_tensor, whole, op, backend)
        if isinstance(plan, _c10d.Verdict):
            with kept_exact(plan):
                return owner.previous_reduce(output_tensor, in_memory(input_tensor), group, op, async_op)
        residual = owner.residual_of(output_tensor, plan, backend)
        work = plan.run(output_tensor, whole, op, residual=residual, site=owner.reduced, async_op=async_op)
        if parts and isinstance(input_tensor, Deferred):
            input_tensor.buffer.spend_gradients()
            owner.counted.reduces_fused += 1
        return finished(work, async_op)


def decodes_later(device: torch.device) -> bool:
    """Tell whether gathers leave wires. On a GPU parameters' memory belongs to the stream that computes; a gather runs
    on another one, which would have to wait until nothing uses that memory. On a CPU values are decoded while others
    are on their way."""
    return bool(device.type != "cpu")


def collectives_of(model: torch.nn.Module) -> Iterator[Collectives]:
    """Replace the collectives of every parameter group in ``model``; yield them in the order of modules."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for param_group in _fsdp2.groups_of(module):
            owner = _fsdp2.owner_of(param_group) or Collectives(name, module, param_group)
            if len(name) >= len(owner.path):  # longer in a larger model
                owner.rename(name, module)
            yield owner
