"""Replacements of FSDP2's all-gather and reduce-scatter in a module."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zcomm.distributed import _fsdp2
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of, find_backend
from zcomm.distributed.overrides import forced_exact
from zcomm.distributed.residuals import residual_of
from zcomm.fsdp.codes import Codes, parts_of_params, tell_of_codes
from zcomm.fsdp.fused import COMPRESSIBLE, Buffer, Deferred, decodes_later, gradients_of, in_memory
from zcomm.fsdp.gather_call import GatherCall, GatherWay, Plan, finished
from zcomm.fsdp.layout import Layout, Parts, planned_dtype
from zcomm.fsdp.notices import Notices
from zcomm.fsdp.rule import ModuleStats, Rule
from zcomm.fsdp.secondary_shard import SecondaryShard

Backend: TypeAlias = "_c10d.ProcessGroup"


class Collectives:
    """Replaces the all-gather and reduce-scatter of one FSDP2 parameter group. Without a rule they are FSDP2's, in the
    formats of the process group."""

    def __init__(self, path: str, module: FSDPModule, param_group: Any) -> None:
        self.param_group = param_group
        self.notices = Notices("")
        self.rename(path, module)
        self.residual_key = self.name
        self.rule: Rule | None = None
        self.secondary: SecondaryShard | None = None  # what gathers, if any
        self.gathered = _c10d.Site(self.name, [])
        self.reduced = _c10d.Site(self.name, [])
        self.counted = ModuleStats("", "", elements=0, exempt_elements=0)  # under the rule; stats() adds to it
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
        self.notices.name = self.name

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

    def set_rule(self, rule: Rule) -> None:
        """Counts anew: what is sent differently is not added up. Leaves a rule of a later number."""
        if self.rule is not None and self.rule.number > rule.number:
            return
        self.take_over()
        self.drop_rule(self.rule)
        self.notices = Notices(self.name)
        numels = [_fsdp2.num_elements(param) for param in self.params]
        exempt_elements = sum(numel for numel, exempt in zip(numels, rule.exempt, strict=True) if exempt)
        self.counted = ModuleStats(rule.weights or "", rule.gradients or "", sum(numels), exempt_elements)
        self.rule = rule
        if rule.error_feedback is not None:
            self.residual_key = rule.error_feedback.claim(self, self.name)
        lossy = [param for param, exempt in zip(self.params, rule.exempt, strict=True) if not exempt]
        names = [_fsdp2.name_of(self.param_group, param) for param in lossy]
        self.gathered = _c10d.Site(self.name, names)
        self.reduced = _c10d.Site(self.name, list(compress(names, map(_fsdp2.requires_grad, lossy))))

    def drop_rule(self, rule: Rule | None) -> None:
        """Remove ``rule`` if it is still in force."""
        if self.rule is rule:
            if self.secondary is not None:
                self.secondary.forget()
            self.rule = self.secondary = None

    def stats(self) -> ModuleStats:
        """Return what was sent so far, under the rule."""
        sites = [self.gathered] if self.secondary is None else [self.gathered, self.secondary.intra_node]
        counted = replace(
            self.counted,
            gathers=sum(site.calls for site in sites),
            gathered_intra_node_bytes=sum(site.intra_node_bytes for site in sites),
            gathered_inter_node_bytes=sum(site.inter_node_bytes for site in sites),
            reduces=self.reduced.calls,
            reduced_intra_node_bytes=self.reduced.intra_node_bytes,
            reduced_inter_node_bytes=self.reduced.inter_node_bytes,
        )
        return self.secondary.add_to(counted) if self.secondary is not None else counted


class _Gather(_fsdp2.AllGather):  # type: ignore[misc]
    def __init__(self, owner: Collectives) -> None:
        self._owner = owner
        self._codes = Codes()
        # By the process group's name: of reshard_after_forward's mesh there is another one.
        self._plans: dict[str, _c10d.Operation] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocate = functools.partial(self._owner.previous_gather.allocate, size, dtype=dtype, device=device)
        return Deferred(Buffer(allocate), size, dtype, device) if self._defers(dtype, device) else allocate()

    def _defers(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Tell whether the next gather may decode into the parameters."""
        rule = self._owner.rule
        if rule is None or not rule.fused or rule.weights == "exact" or (rule.is_lossless and decodes_later(device)):
            return False
        return dtype in COMPRESSIBLE

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        owner = self._owner
        backend = find_backend(group)
        if backend is None and owner.rule is None:  # reshard_after_forward made a group with another backend
            return owner.previous_gather(in_memory(output_tensor), in_memory(input_tensor), group, async_op)
        backend = backend or backend_of(group)  # raises
        layout = self._layout_of(output_tensor, input_tensor, group, backend)
        call = self._call_of(layout, group, backend, async_op)
        return call.run_alone(owner.gathered) if owner.secondary is None else owner.secondary.gather(call)

    def _layout_of(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, backend: Backend
    ) -> Layout:
        owner, notices = self._owner, self._owner.notices
        gathered = [_fsdp2.gathered_part(param) for param in owner.params]
        layout = Layout(output, shard, gathered, owner.rule, planned_dtype(shard, gathered))
        may_tell = backend.is_strict or not notices.has_told("floats")
        if may_tell and layout.hides_floats and layout.would_plan(torch.float32, backend):
            what = "mixes float parameters with byte tensors; a separate FSDP module would compress them"
            notices.tell_exact("floats", what, backend)
        codes, found = self._codes.find(parts_of_params(owner.name, owner.params), group)
        tell_of_codes(found, owner.name, backend)
        layout = replace(layout, codes=codes)
        if owner.secondary is None:
            return layout
        is_odd = shard.nbytes % 2 == 1
        if is_odd and not notices.has_told("bytes") and layout.would_plan(torch.uint16, backend):
            notices.tell("bytes", "gathers an odd number of bytes: nodes do not keep them")
        return layout.in_pairs()

    def _call_of(self, layout: Layout, group: dist.ProcessGroup, backend: Backend, async_op: bool) -> GatherCall:
        """Plan the gather and choose its way, the first of

        | way             | if                                          | plan      | output       | shard           |
        |-----------------|---------------------------------------------|-----------|--------------|-----------------|
        | EXACT           | options, formats or parameters forbid a plan| Verdict   | FSDP2's      | FSDP2's         |
        | COPIED          | the layout cannot take the parameters       | Operation | a view       | a view          |
        | LEFT_AS_WIRES   | on a GPU; "lossless" defers no buffer there | Operation | deferred     | copied          |
        | INTO_PARAMETERS | on a CPU                                    | Operation | deferred     | may be deferred |

        Deferred tensors have no memory, all others have. Only INTO_PARAMETERS has parts."""
        owner, (output, shard) = self._owner, layout.views
        way, parts = GatherWay.COPIED, list[torch.Tensor]()
        if layout.takes_parameters:
            way = GatherWay.LEFT_AS_WIRES if decodes_later(output.device) else GatherWay.INTO_PARAMETERS
        if way is GatherWay.INTO_PARAMETERS:
            parts = _fsdp2.unsharded_data(owner.param_group, group.size(), shard.device)
        plan = self._plan(layout, parts, way, group.group_name, backend)
        if isinstance(plan, _c10d.Verdict):
            way, parts, output, shard = GatherWay.EXACT, [], layout.output, layout.shard
        owner.counted.gathers_plain += way is GatherWay.EXACT
        owner.counted.gathers_fused += way in (GatherWay.INTO_PARAMETERS, GatherWay.LEFT_AS_WIRES)
        if not isinstance(output, Deferred) or way in (GatherWay.EXACT, GatherWay.COPIED):
            output, shard = in_memory(output), in_memory(shard)
        elif way is GatherWay.INTO_PARAMETERS:
            output.buffer.gather_into(parts, group.size())
        elif isinstance(shard, Deferred):
            shard = torch.cat(shard.buffer.parts)  # a copy, which lives as long as its users
        return GatherCall(way, output, shard, group, plan, async_op, owner.previous_gather, parts)

    def _plan(self, layout: Layout, into: Sequence[torch.Tensor], way: GatherWay, group: str, backend: Backend) -> Plan:
        """Plan a gather in the process group of this name, or return why torch carries it out. ``into``: the memory of
        the parameters, if it is gathered there."""
        owner, (output, shard) = self._owner, layout.views
        if all(layout.codes) and layout.dtype != torch.uint16:
            return _c10d.Verdict.not_a_float
        formats = layout.rule.formats if layout.rule else None
        parts = layout.parts or [(part.numel() // backend.size(), False) for part in into]
        if parts and (total := sum(numel for numel, _ in parts)) != shard.numel():
            plan = backend.plan(into or output, shard, formats=formats)
            if isinstance(plan, _c10d.Verdict):
                return plan
            what = f"gathers {shard.numel()} elements, which are not its {total} parameters as they are"
            owner.notices.tell_exact("weights", what, backend)
            return _c10d.Verdict.layout
        keeps_wires = owner.secondary is not None and owner.secondary.keeps_wires()
        again = keeps_wires and _fsdp2.gathers_again(owner.param_group)
        like = self._plans.get(group)
        leaves_wires = way is GatherWay.LEFT_AS_WIRES
        plan = backend.plan(
            into or output, shard, formats=formats, parts=parts, again=again, leaves_wires=leaves_wires, like=like
        )
        if isinstance(plan, _c10d.Operation):
            self._plans[group] = plan
        return plan


class _Reduce(_fsdp2.ReduceScatter):  # type: ignore[misc]
    def __init__(self, owner: Collectives) -> None:
        self._owner = owner
        self._last_plan: _c10d.Operation | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        allocate = functools.partial(self._owner.previous_reduce.allocate, size, dtype=dtype, device=device)
        return Deferred(Buffer(allocate), size, dtype, device) if self._defers(math.prod(size), dtype) else allocate()

    def _defers(self, num_elements: int, dtype: torch.dtype) -> bool:
        """Tell whether a buffer of this size is the input of a reduction that may read the gradients themselves."""
        owner, rule = self._owner, self._owner.rule
        if rule is None or not rule.fused or rule.gradients == "exact" or dtype not in COMPRESSIBLE:
            return False
        shards, _ = _fsdp2.process_groups_of(owner.param_group)
        size = shards.size() if shards is not None else 1
        reduced = [_fsdp2.reduced_elements(param) for param in owner.params if _fsdp2.requires_grad(param)]
        return size > 1 and num_elements == size * sum(reduced) and 0 not in reduced

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        owner, rule = self._owner, self._owner.rule
        if rule is None:
            return owner.previous_reduce(output_tensor, in_memory(input_tensor), group, op, async_op)
        backend = backend_of(group)
        parts = gradients_of(input_tensor)
        whole = parts or in_memory(input_tensor)
        plan = self._plan(rule, output_tensor, whole, op, backend)
        if isinstance(plan, _c10d.Verdict):
            with forced_exact(plan):
                return owner.previous_reduce(output_tensor, in_memory(input_tensor), group, op, async_op)
        residual = self._residual_of(rule, output_tensor, plan, backend)
        work = plan.run(output_tensor, whole, op, residual=residual, site=owner.reduced, async_op=async_op)
        if parts and isinstance(input_tensor, Deferred):
            input_tensor.buffer.release_gradients()
            owner.counted.reduces_fused += 1
        return finished(work, async_op)

    def _plan(
        self, rule: Rule, output: torch.Tensor, whole: torch.Tensor | Sequence[torch.Tensor], op: Any, backend: Backend
    ) -> Plan:
        """Plan a reduce-scatter, or return why it stays exact."""
        parts: Parts = [
            (_fsdp2.reduced_elements(param), exempt)
            for param, exempt in zip(self._owner.params, rule.exempt, strict=True)
            if _fsdp2.requires_grad(param)
        ]
        if (total := sum(numel for numel, _ in parts)) != output.numel():
            plan = backend.plan(output, whole, op, formats=rule.formats)
            if isinstance(plan, _c10d.Verdict):
                return plan
            self._owner.notices.tell_exact(
                "gradients",
                f"has gradients for some of its parameters only ({output.numel()} elements of {total}), and "
                "which ones cannot be told: set_reduce_scatter_unused_params(True) sends zeros for the others",
                backend,
            )
            parts = [(output.numel(), True)]  # other ranks may have gradients of other parameters
            return backend.plan(output, whole, op, formats=rule.formats, parts=parts, compared=True)
        feedback = rule.error_feedback.block_format if rule.error_feedback else None
        plan = backend.plan(
            output, whole, op, formats=rule.formats, parts=parts, feedback=feedback, like=self._last_plan
        )
        if isinstance(plan, _c10d.Operation):
            self._last_plan = plan
        return plan

    def _residual_of(
        self, rule: Rule, output: torch.Tensor, plan: _c10d.Operation, backend: Backend
    ) -> tuple[torch.Tensor, float, bool] | None:
        if rule.error_feedback is None or plan is not self._last_plan:
            return None
        # What one parameter has lost is not another's, which may have the same plan, and is kept while it is frozen.
        params = self._owner.params
        reduced = [number for number, param in enumerate(params) if _fsdp2.requires_grad(param)]
        of = "" if len(reduced) == len(params) else f", parameters {reduced}"
        layout = f"{output.numel() * backend.size()} {output.dtype} in {plan.segments} of {plan.ranks}"
        key = f"{self._owner.residual_key}/rank {dist.get_rank()}{of}"
        return residual_of(rule.error_feedback, key, layout, plan.residual_bytes, output.device)
