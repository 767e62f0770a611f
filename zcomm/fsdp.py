"""Secondary shards for FSDP2: weights cross nodes once, however often they are gathered.

The idea is hpZ of ZeRO++ (https://arxiv.org/abs/2306.10209): the ranks of a node keep the gathered weights among them,
so that the next gather stays inside the node. Here they keep the compressed bytes that came over the wire: each of L
ranks of a node keeps an L-th of them, and what is gathered from these has the same bits as the first gather.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcomm.backend import backend_of

_log = logging.getLogger("zcomm")


@dataclass
class ModuleStats:
    """What one module of FSDP has gathered."""

    gathers_between: int = 0  #: from the shards of all ranks, across nodes
    gathers_inside: int = 0  #: from secondary shards, inside the node
    gathers_plain: int = 0  #: without a secondary shard: left exact by the options, or beyond ``max_bytes``
    memory_bytes: int = 0  #: of this rank's secondary shard


def enable_secondary_shards(model: torch.nn.Module, *, max_bytes: int | None = None) -> SecondaryShards:
    """Give every module of ``model`` that ``fully_shard`` was, or will be, applied to a secondary shard.

    A gather of weights that have not changed since the last one then moves no byte between nodes: in the backward pass,
    in further micro-batches, in generation and evaluation. A change is noticed without synchronization: a step of an
    optimizer of torch.optim by a hook, in-place operations and ``load_state_dict`` by the version counters of the
    sharded parameters, exchanged parameters by their addresses. PyTorch counts neither a write through ``param.data``
    nor ``torch._foreach_*`` on sharded parameters: call ``invalidate()`` after these, and after a step of an optimizer
    that is not a ``torch.optim.Optimizer``. Ranks must change weights alike, as they do in training.

    Gathers that the options leave exact (below ``min_bytes``, other dtypes, ``zcomm.exact()``), and those of a
    ``reshard_after_forward`` mesh, are as without secondary shards.

    Args:
        max_bytes: limit of a rank's secondary shards. Modules whose shards would exceed it go without, and are named in
            a warning. Default: no limit.

    Raises:
        ValueError: ``max_bytes`` is negative.
        ValueError: at the first forward pass, if a module's process group was not made with the backend "zcomm".
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes: got {max_bytes}, need 0 or more, or None")
    return SecondaryShards(model, max_bytes)


class SecondaryShards:
    """What :func:`enable_secondary_shards` returns: it switches them off, and counts."""

    def __init__(self, model: torch.nn.Module, max_bytes: int | None) -> None:
        self._model = model
        self._gathers: dict[Any, tuple[_Gather, Any]] = {}  # by parameter group: ours, and the one it replaced
        self.max_bytes = max_bytes
        self._used_bytes = 0  # of the limit: the largest of all ranks, so that all decide alike
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: self._install(), prepend=True),
            register_optimizer_step_post_hook(_StepHook(self)),  # torch's own: it must not keep the model
        ]
        weakref.finalize(self, self._hooks[1].remove)
        self._install()

    def _install(self) -> None:
        for name, module in self._model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in _param_groups(module):
                if group not in self._gathers:
                    gather = _Gather(self, name or type(module).__name__, group)
                    self._gathers[group] = (gather, group._all_gather_comm)
                    group._all_gather_comm = gather

    def disable(self) -> None:
        """Gather as before, and free the secondary shards."""
        for hook in self._hooks:
            hook.remove()
        for group, (gather, previous) in self._gathers.items():
            gather.forget()
            group._all_gather_comm = previous
        self._gathers.clear()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Fused and foreach steps change sharded parameters without counting a version.
        changed = {id(param) for param_group in optimizer.param_groups for param in param_group["params"]}
        for group, (gather, _) in self._gathers.items():
            if any(id(param.sharded_param) in changed for param in group.fsdp_params):
                gather.outdate()

    def invalidate(self) -> None:
        """Gather across nodes next time: after a change that PyTorch does not count, on all ranks."""
        for gather, _ in self._gathers.values():
            gather.outdate()

    def memory_bytes(self) -> int:
        """Of all secondary shards on this rank."""
        return sum(gather.stats.memory_bytes for gather, _ in self._gathers.values())

    def stats(self) -> dict[str, ModuleStats]:
        """By the name of the module."""
        return {gather.name: gather.stats for gather, _ in self._gathers.values()}

    def _admit(self, gather: _Gather, num_bytes: int) -> bool:
        if self.max_bytes is not None and self._used_bytes + num_bytes > self.max_bytes:
            _log.warning(
                "%s goes without a secondary shard: its %d bytes would exceed max_bytes=%d, of which %d are in use",
                gather.name, num_bytes, self.max_bytes, self._used_bytes,
            )  # fmt: skip
            return False
        self._used_bytes += num_bytes
        return True


class _StepHook:
    def __init__(self, shards: SecondaryShards) -> None:
        self._shards = weakref.ref(shards)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if (shards := self._shards()) is not None:
            shards._after_step(optimizer)


class _Gather(AllGather):
    """The all-gather of one parameter group."""

    def __init__(self, owner: SecondaryShards, name: str, param_group: Any) -> None:
        self.name = name
        self.stats = ModuleStats()
        self._owner = owner
        self._param_group = param_group
        self._secondary: torch.Tensor | None = None
        self._format = ""
        self._state: list[Any] | None = None  # of the weights that the secondary shard has
        self._admitted: bool | None = None

    def outdate(self) -> None:
        self._state = None

    def forget(self) -> None:
        self.outdate()
        self._secondary = None
        self.stats.memory_bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        state = self._weights()
        if state is None or self._admitted is False:
            return self._gather_plainly(output_tensor, input_tensor, group, async_op)
        backend = backend_of(group)
        num_bytes, largest, format = backend.secondary_shard(output_tensor, input_tensor)
        if num_bytes == 0:
            return self._gather_plainly(output_tensor, input_tensor, group, async_op)
        if self._admitted is None:
            self._admitted = self._owner._admit(self, largest)
            if not self._admitted:
                return self._gather_plainly(output_tensor, input_tensor, group, async_op)
        state += [output_tensor.dtype, output_tensor.numel(), format]
        if state == self._state:
            self.stats.gathers_inside += 1
            work = backend.gather_secondary(output_tensor, self._secondary, format, async_op)
        else:
            if self._secondary is None or self._secondary.numel() != num_bytes:
                self._secondary = torch.empty(num_bytes, dtype=torch.uint8, device=output_tensor.device)
                self.stats.memory_bytes = num_bytes
            self._state = None  # while it is being written
            self.stats.gathers_between += 1
            work = backend.all_gather_keeping(output_tensor, input_tensor, self._secondary, format, async_op)
            self._state = state
        if async_op:
            return work
        work.wait()
        return None

    def _gather_plainly(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        self.stats.gathers_plain += 1
        return dist.all_gather_into_tensor(output, shard, group=group, async_op=async_op)

    def _weights(self) -> list[Any] | None:
        """What changes when the weights do; None if they cannot be watched."""
        state: list[Any] = []
        for param in self._param_group.fsdp_params:
            if param.sharded_state.name != "SHARDED":
                return None  # shards of a reshard_after_forward mesh
            local = param._sharded_local_tensor
            if local.is_inference() or param.sharded_param.is_inference():
                return None  # PyTorch does not count their versions
            state += [param.sharded_param._version, local._version, local.data_ptr(), local.numel()]
        return state


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
