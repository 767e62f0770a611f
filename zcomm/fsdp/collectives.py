"""What takes the place of FSDP2's own all-gather and reduce-scatter in a module."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from zcomm.distributed.backend import _c10d, backend_of
from zcomm.distributed.overrides import override
from zcomm.feedback import ErrorFeedback

_log = logging.getLogger("zcomm")

#: How many elements of a shard travel in which format, from its first element on.
Segments = list[tuple[int, str]]

#: After the format of an all-gather: what travels is the difference to what an earlier gather has left.
DIFFERENCE = ":difference"


class Rule:
    """The formats of one parameter group. ``exempt`` says of each of its parameters if it travels as it is. Formats
    are those of the process group where None."""

    def __init__(
        self,
        all_gather: str | None,
        reduce_scatter: str | None,
        exempt: Sequence[bool],
        error_feedback: ErrorFeedback | None,
    ) -> None:
        self.difference = all_gather is not None and all_gather.endswith(DIFFERENCE)
        self.all_gather = all_gather.removesuffix(DIFFERENCE) if all_gather is not None else None
        self.reduce_scatter = reduce_scatter
        self.exempt = exempt
        self.error_feedback = error_feedback

    def segments(self, format: str, numels: Sequence[int], which: Sequence[int]) -> Segments | None:
        """Of a shard that holds the parameters ``which``, so many elements of each. None: all are exempt."""
        segments: Segments = []
        for index, numel in zip(which, numels, strict=True):
            if not self.exempt[index]:
                segments.append((numel, format))
            elif segments and segments[-1][1] == "exact":
                segments[-1] = (segments[-1][0] + numel, "exact")
            else:
                segments.append((numel, "exact"))
        return None if all(part == "exact" for _, part in segments) else segments


class Collectives:
    """Those of one parameter group. With neither a rule nor a secondary shard they are what they were before."""

    def __init__(self, name: str, path: str, param_group: Any) -> None:
        self.name = name
        self.path = path  # of the module, in the largest model that was seen; "" for that model itself
        self._residual_key = name
        self.param_group = param_group
        self.rule: Rule | None = None
        self.secondary: Any = None
        self.resident: Resident | None = None  # where differences travel
        self.gathered = _c10d.Site(name, [])
        self.gathered_inside = _c10d.Site(name, [])  # from secondary shards
        self.reduced = _c10d.Site(name, [])
        self._previous = (param_group._all_gather_comm, param_group._reduce_scatter_comm)
        self._warned = False
        param_group._all_gather_comm = _Gather(self, self._previous[0])
        param_group._reduce_scatter_comm = _Reduce(self, self._previous[1])

    def set_rule(self, rule: Rule) -> None:
        """Counts anew: what travels differently is not added up. See check()."""
        self.rule = rule
        if rule.error_feedback is not None:
            self._residual_key = rule.error_feedback.claim(self, self.name)
        self.resident = Resident() if rule.difference else None
        params = self.param_group.fsdp_params
        lossy = [param for param, exempt in zip(params, rule.exempt, strict=True) if not exempt]
        names = {id(param): self._name_of(param) for param in lossy}
        self.gathered = _c10d.Site(self.name, [names[id(param)] for param in lossy])
        with_gradient = [param for param in lossy if param.sharded_param.requires_grad]
        self.reduced = _c10d.Site(self.name, [names[id(param)] for param in with_gradient])

    def _name_of(self, param: Any) -> str:
        info = param._module_info
        for module in self.param_group.modules:
            for prefix, inner in module.named_modules():
                if inner is info.module:
                    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)
        return str(info.param_name)

    def check(self, difference: bool, secondary: bool) -> None:
        if difference and secondary:
            raise ValueError(
                f"all_gather: {self.name} has a secondary shard, which keeps whole weights: '{DIFFERENCE}' needs "
                "one of the two"
            )
        after_forward = self.param_group.post_forward_mesh_info
        if difference and after_forward not in (None, self.param_group.mesh_info):
            raise ValueError(
                f"all_gather: {self.name} gathers from two meshes, as reshard_after_forward is an integer: "
                f"'{DIFFERENCE}' needs it to be False or True"
            )

    def release(self) -> None:
        """Gives FSDP2 its own collectives back once nothing is set any more."""
        if self.rule is None and self.secondary is None:
            self.param_group._all_gather_comm, self.param_group._reduce_scatter_comm = self._previous

    def gather_segments(self, output: torch.Tensor, shard: torch.Tensor, backend: Any) -> Segments | None:
        """None: the gather is left exact."""
        rule = self.rule
        format = backend.gather_format(output, shard, (rule.all_gather or "") if rule else "")
        if format == "exact":
            return None
        if rule is None:
            return [(shard.numel(), format)]
        params = self.param_group.fsdp_params
        numels = [_gathered_data(param).numel() for param in params]
        if sum(numels) != shard.numel():
            self._warn(
                f"gathers {shard.numel()} elements, which are not its {sum(numels)} parameters as they are", backend
            )
            return None
        return rule.segments(format, numels, range(len(params)))

    def reduce_segments(self, output: torch.Tensor, whole: torch.Tensor, op: Any, backend: Any) -> Segments | None:
        """None: the reduce-scatter is left exact."""
        rule = self.rule
        assert rule is not None
        formats = backend.reduce_format(output, whole, op, rule.reduce_scatter or "")
        if formats == "exact":
            return None
        params = self.param_group.fsdp_params
        which = [index for index, param in enumerate(params) if param.sharded_param.requires_grad]
        numels = [params[index].padded_sharded_param_size.numel() for index in which]
        if sum(numels) != output.numel():
            self._warn(
                f"has gradients for some of its parameters only ({output.numel()} elements of {sum(numels)}), and "
                "which ones cannot be told: set_reduce_scatter_unused_params(True) sends zeros for the others",
                backend,
            )
            return None
        return rule.segments(formats, numels, which)

    def feedback_of(self, whole: torch.Tensor, segments: Segments, backend: Any) -> Any:
        feedback = self.rule.error_feedback if self.rule else None
        if feedback is None:
            return None
        residual, empty = feedback.use(
            f"{self._residual_key}/rank {backend.rank()}",
            f"{whole.numel()} {whole.dtype} in {segments}",
            backend.feedback_bytes(whole, segments, feedback.format),
            lambda size: torch.empty(size, dtype=torch.uint8, device=whole.device),
        )
        return residual, feedback.format, feedback.decay, empty

    def _warn(self, what: str, backend: Any) -> None:
        if backend.is_strict:
            raise RuntimeError(f"strict=True forbids that a call goes out exact: {self.name} {what}")
        if not self._warned:
            self._warned = True
            _log.warning("%s %s: left exact", self.name, what)


class Resident:
    """What the gathers of a module leave on this rank, for the next one to send differences to."""

    def __init__(self) -> None:
        self._whole: torch.Tensor | None = None
        self.own: torch.Tensor | None = None  # what other ranks hold of this rank's shard

    def whole(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._whole is None or (self._whole.shape, self._whole.dtype, self._whole.device) != (size, dtype, device):
            self._whole = torch.empty(size, dtype=dtype, device=device)
            self.own = None
        return self._whole

    def is_filled(self, shard: torch.Tensor) -> bool:
        return self.own is not None and self.own.shape == shard.shape

    def fill(self, shard: torch.Tensor) -> None:
        self.own = shard.clone()

    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._whole, self.own) if tensor is not None)


class _Gather(AllGather):  # type: ignore[misc,unused-ignore]
    def __init__(self, owner: Collectives, previous: AllGather) -> None:
        self._owner = owner
        self._previous = previous

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._owner.resident is not None:
            return self._owner.resident.whole(tuple(size), dtype, device)
        return self._previous.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        owner = self._owner
        backend = backend_of(group)
        segments = owner.gather_segments(output_tensor, input_tensor, backend)
        resident = owner.resident
        if resident is not None and (segments is None or not resident.is_filled(input_tensor)):
            with override(all_gather="exact"):
                work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
            resident.fill(input_tensor)
            return _finished(work, async_op)
        if resident is not None:
            work = backend.all_gather_segments(
                output_tensor, input_tensor, segments, None, resident.own, owner.gathered, async_op
            )
            return _finished(work, async_op)
        if segments is None:
            if owner.secondary is not None:
                owner.secondary.gathers_plain += 1
            with _left_exact(owner.rule is not None, "all_gather"):
                return self._previous(output_tensor, input_tensor, group, async_op)
        work = None
        if owner.secondary is not None:
            work = owner.secondary.gather(output_tensor, input_tensor, segments, backend, async_op)
        if work is None:
            work = backend.all_gather_segments(
                output_tensor, input_tensor, segments, None, None, owner.gathered, async_op
            )
        return _finished(work, async_op)


class _Reduce(ReduceScatter):  # type: ignore[misc,unused-ignore]
    def __init__(self, owner: Collectives, previous: ReduceScatter) -> None:
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
        segments = owner.reduce_segments(output_tensor, input_tensor, op, backend)
        if segments is None:
            with _left_exact(True, "reduce_scatter"):
                return self._previous(output_tensor, input_tensor, group, op, async_op)
        feedback = owner.feedback_of(input_tensor, segments, backend)
        work = backend.reduce_scatter_segments(
            output_tensor, input_tensor, op, segments, feedback, owner.reduced, async_op
        )
        return _finished(work, async_op)


def _left_exact(has_rule: bool, collective: str) -> Any:
    # The group's options may have it otherwise.
    return override(**{collective: "exact"}) if has_rule else contextlib.nullcontext()


def _finished(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None


def _gathered_data(param: Any) -> torch.Tensor:
    data: torch.Tensor = (
        param._sharded_param_data if param.sharded_state.name == "SHARDED" else param._sharded_post_forward_param_data
    )
    return data


def collectives_of(model: torch.nn.Module) -> Iterator[Collectives]:
    """Of every parameter group in ``model``, in the order of its modules; ours from now on."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        for number, param_group in enumerate(groups):
            full_name = (name or type(module).__name__) + (f"[{number}]" if len(groups) > 1 else "")
            current = param_group._all_gather_comm
            if isinstance(current, _Gather):
                owner = current._owner
                if len(name) > len(owner.path):  # a larger model has it
                    owner.name, owner.path = full_name, name
                yield owner
            else:
                yield Collectives(full_name, name, param_group)
