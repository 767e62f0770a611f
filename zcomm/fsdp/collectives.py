"""What takes the place of FSDP2's own all-gather and reduce-scatter in a module."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import override
from zcomm.distributed.single import all_gather_single
from zcomm.feedback import ErrorFeedback
from zcomm.fsdp import _fsdp2

_log = logging.getLogger("zcomm")

Backend: TypeAlias = "_c10d.ProcessGroup"

#: How many elements of a shard, from its first one on, and whether they are sent exactly.
Parts = list[tuple[int, bool]]


@dataclass(frozen=True)
class GatherCall:
    """One all-gather of FSDP2. ``plan``: how the shard is sent; None: it is left exact."""

    output: torch.Tensor
    shard: torch.Tensor
    group: dist.ProcessGroup
    plan: _c10d.PlannedGather | None
    async_op: bool


class GatherStrategy(Protocol):
    """How the gathers of a parameter group are made. The first two methods have the meaning that FSDP2 gives them."""

    def allocate(self, size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def gather(self, call: GatherCall) -> Any: ...

    def keeps_wires(self) -> bool:
        """A later gather of the same weights is made from what this one keeps."""
        ...


@dataclass(frozen=True, eq=False)
class Rule:
    """The formats of one parameter group. ``exempt`` says of each of its parameters if it is sent exactly. Formats
    are those of the process group where None. ``difference``: weights are sent as the change since the last gather."""

    all_gather: str | None
    reduce_scatter: str | None
    difference: bool
    exempt: Sequence[bool]
    error_feedback: ErrorFeedback | None

    @functools.cached_property
    def formats(self) -> _c10d.PolicyOverride:
        """Read once."""
        named = {"all_gather": self.all_gather, "reduce_scatter": self.reduce_scatter}
        return _c10d.PolicyOverride(**{name: format for name, format in named.items() if format})


class Collectives:
    """Those of one parameter group. With neither a rule nor another strategy they are what they were before."""

    def __init__(self, name: str, path: str, param_group: Any) -> None:
        self.name = name
        self.path = path  # of the module, in the largest model that was seen; "" for that model itself
        self._residual_key = name
        self._param_group = param_group
        self.rule: Rule | None = None
        self.gathered = _c10d.Site(name, [])
        self.reduced = _c10d.Site(name, [])
        self._warned = False
        self._gather_plan: _c10d.PlannedGather | None = None  # of the last compressed gather, and reduction
        self._reduce_plan: _c10d.PlannedReduce | None = None
        self._reduce_layout = ""
        self._previous = _fsdp2.collectives_of(param_group)
        self.plain = Plain(self, self._previous[0])
        self.strategy: GatherStrategy = self.plain
        _fsdp2.set_collectives(param_group, _Gather(self), _Reduce(self, self._previous[1]))

    @property
    def params(self) -> Sequence[Any]:
        """Of FSDP2: see _fsdp2."""
        return _fsdp2.params_of(self._param_group)

    @property
    def last_gather_plan(self) -> _c10d.PlannedGather | None:
        return self._gather_plan

    def shard(self) -> torch.Tensor | None:
        """See _fsdp2.shard_of."""
        return _fsdp2.shard_of(self._param_group)

    def set_rule(self, rule: Rule) -> None:
        """Counts anew: what is sent differently is not added up. See check_difference()."""
        self.rule = rule
        if rule.error_feedback is not None:
            self._residual_key = rule.error_feedback.claim(self, self.name)
        if rule.difference:
            self.strategy = Differences(self)
        elif isinstance(self.strategy, Differences):
            self.strategy = self.plain
        lossy = [param for param, exempt in zip(self.params, rule.exempt, strict=True) if not exempt]
        names = {id(param): _fsdp2.name_of(self._param_group, param) for param in lossy}
        self.gathered = _c10d.Site(self.name, [names[id(param)] for param in lossy])
        self.reduced = _c10d.Site(self.name, [names[id(param)] for param in lossy if _fsdp2.requires_grad(param)])

    def drop_rule(self, rule: Rule) -> None:
        """Takes ``rule`` back, if it is still the last one."""
        if self.rule is rule:
            self.rule = None
            if rule.difference:
                self.strategy = self.plain
            self._release()

    def drop_strategy(self, strategy: GatherStrategy) -> None:
        """Takes ``strategy`` back, if it is still the last one."""
        if self.strategy is strategy:
            self.strategy = self.plain
            self._release()

    def check_difference(self) -> None:
        """Raises ValueError if differences cannot be sent."""
        if not isinstance(self.strategy, Plain | Differences):
            raise self.not_both()
        if _fsdp2.gathers_from_two_meshes(self._param_group):
            raise ValueError(
                f"difference: expected reshard_after_forward=False or True of {self.name}, got an integer: it gathers "
                "from two meshes"
            )

    def not_both(self) -> ValueError:
        return ValueError(
            f"difference: {self.name} has a secondary shard, which keeps whole weights: a module has differences or a "
            "secondary shard"
        )

    def resident_bytes(self) -> int:
        """Kept for differences."""
        return self.strategy.memory_bytes() if isinstance(self.strategy, Differences) else 0

    def _release(self) -> None:
        """Gives FSDP2 its own collectives back once nothing is set any more."""
        if self.rule is None and self.strategy is self.plain:
            _fsdp2.set_collectives(self._param_group, *self._previous)

    def plan_gather(self, output: torch.Tensor, shard: torch.Tensor, backend: Backend) -> _c10d.PlannedGather | None:
        """None: the gather is left exact."""
        rule = self.rule
        formats = rule.formats if rule else None
        parts: Parts = []
        if rule is not None:
            numels = [_fsdp2.gathered_elements(param) for param in self.params]
            if sum(numels) != shard.numel():
                if backend.plan_gather(output, shard, formats=formats) is not None:
                    what = f"gathers {shard.numel()} elements, which are not its {sum(numels)} parameters as they are"
                    self._warn(what, backend)
                return None
            parts = list(zip(numels, rule.exempt, strict=True))
        again = self.strategy.keeps_wires() and _fsdp2.gathers_again(self._param_group)
        plan = backend.plan_gather(output, shard, formats=formats, parts=parts, again=again, kept=self._gather_plan)
        self._gather_plan = plan or self._gather_plan
        return plan

    def plan_reduce(
        self, output: torch.Tensor, whole: torch.Tensor, op: Any, backend: Backend
    ) -> _c10d.PlannedReduce | None:
        """None: the reduce-scatter is left exact."""
        rule = self.rule
        assert rule is not None
        parts: Parts = [
            (_fsdp2.reduced_elements(param), exempt)
            for param, exempt in zip(self.params, rule.exempt, strict=True)
            if _fsdp2.requires_grad(param)
        ]
        total = sum(numel for numel, _ in parts)
        if total != output.numel():
            if backend.plan_reduce(output, whole, op, formats=rule.formats) is not None:
                self._warn(
                    f"has gradients for some of its parameters only ({output.numel()} elements of {total}), and "
                    "which ones cannot be told: set_reduce_scatter_unused_params(True) sends zeros for the others",
                    backend,
                )
            return None
        feedback = rule.error_feedback.block_format if rule.error_feedback else None
        plan = backend.plan_reduce(
            output, whole, op, formats=rule.formats, parts=parts, feedback=feedback, kept=self._reduce_plan
        )
        if plan is not None and plan is not self._reduce_plan:
            self._reduce_plan = plan
            self._reduce_layout = f"{whole.numel()} {whole.dtype} in {plan.segments}"
        return plan

    def residual_of(self, whole: torch.Tensor, plan: _c10d.PlannedReduce, backend: Backend) -> _c10d.Residual | None:
        feedback = self.rule.error_feedback if self.rule else None
        if feedback is None:
            return None
        data, empty = feedback.use(
            f"{self._residual_key}/rank {backend.rank()}",
            self._reduce_layout,
            plan.residual_bytes,
            lambda size: torch.empty(size, dtype=torch.uint8, device=whole.device),
        )
        return _c10d.Residual(data, decay=feedback.decay, empty=empty)

    def _warn(self, what: str, backend: Backend) -> None:
        if backend.is_strict:
            raise RuntimeError(f"strict=True forbids that a call goes out exact: {self.name} {what}")
        if not self._warned:
            self._warned = True
            _log.warning("%s %s: left exact", self.name, what)


class Plain:
    """A gather in the formats of the rule, or of the process group."""

    def __init__(self, owner: Collectives, previous: _fsdp2.AllGather) -> None:
        self._owner = owner
        self._previous = previous

    def allocate(self, size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._previous.allocate(size, dtype=dtype, device=device)

    def gather(self, call: GatherCall) -> Any:
        if call.plan is None:
            with _left_exact(self._owner.rule is not None, "all_gather"):
                return self._previous(call.output, call.shard, call.group, call.async_op)
        work = call.plan.run(call.output, call.shard, site=self._owner.gathered, async_op=call.async_op)
        return finished(work, call.async_op)

    def keeps_wires(self) -> bool:
        return False


class Differences:
    """Gathers that send the change since the one before, whose result each rank keeps."""

    def __init__(self, owner: Collectives) -> None:
        self._owner = owner
        self._whole: torch.Tensor | None = None
        self._own: torch.Tensor | None = None  # what other ranks hold of this rank's shard

    def allocate(self, size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        wanted = (tuple(size), dtype, device)
        if self._whole is None or (self._whole.shape, self._whole.dtype, self._whole.device) != wanted:
            self._whole = torch.empty(wanted[0], dtype=dtype, device=device)
            self._own = None
        return self._whole

    def gather(self, call: GatherCall) -> Any:
        if call.plan is None or self._own is None or self._own.shape != call.shard.shape:
            with override(all_gather="exact"):
                work = all_gather_single(call.output, call.shard, group=call.group, async_op=True)
            self._own = call.shard.clone()
        else:
            work = call.plan.run(
                call.output, call.shard, reference=self._own, site=self._owner.gathered, async_op=call.async_op
            )
        return finished(work, call.async_op)

    def keeps_wires(self) -> bool:
        return False

    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._whole, self._own) if tensor is not None)


class _Gather(_fsdp2.AllGather):  # type: ignore[misc,unused-ignore]
    def __init__(self, owner: Collectives) -> None:
        self.owner = owner

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.owner.strategy.allocate(size, dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        backend = backend_of(group)
        plan = self.owner.plan_gather(output_tensor, input_tensor, backend)
        call = GatherCall(output_tensor, input_tensor, group, plan, async_op)
        return self.owner.strategy.gather(call)


class _Reduce(_fsdp2.ReduceScatter):  # type: ignore[misc,unused-ignore]
    def __init__(self, owner: Collectives, previous: _fsdp2.ReduceScatter) -> None:
        self._owner = owner
        self._previous = previous

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._previous.allocate(size, dtype=dtype, device=device)

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
            return self._previous(output_tensor, input_tensor, group, op, async_op)
        backend = backend_of(group)
        plan = owner.plan_reduce(output_tensor, input_tensor, op, backend)
        if plan is None:
            with _left_exact(True, "reduce_scatter"):
                return self._previous(output_tensor, input_tensor, group, op, async_op)
        residual = owner.residual_of(input_tensor, plan, backend)
        work = plan.run(output_tensor, input_tensor, op, residual=residual, site=owner.reduced, async_op=async_op)
        return finished(work, async_op)


def _left_exact(has_rule: bool, collective: str) -> Any:
    # The group's options may have it otherwise.
    return override(**{collective: "exact"}) if has_rule else contextlib.nullcontext()


def finished(work: Any, async_op: bool) -> Any:
    """What FSDP2 expects of a call: its work, or None once it is done."""
    if async_op:
        return work
    work.wait()
    return None


def collectives_of(model: torch.nn.Module) -> Iterator[Collectives]:
    """Of every parameter group in ``model``, in the order of its modules; ours from now on."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = _fsdp2.groups_of(module)
        for number, param_group in enumerate(groups):
            full_name = (name or type(module).__name__) + (f"[{number}]" if len(groups) > 1 else "")
            current = _fsdp2.collectives_of(param_group)[0]
            if isinstance(current, _Gather):
                owner = current.owner
                if len(name) > len(owner.path):  # a larger model has it
                    owner.name, owner.path = full_name, name
                yield owner
            else:
                yield Collectives(full_name, name, param_group)
