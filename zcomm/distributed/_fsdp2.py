"""Access to FSDP2's private names, in torch 2.11 to 2.15. No other module reads them.

A *group* is an FSDPParamGroup, the parameters that one module gathers together; a *param* is one of its FSDPParams.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

__all__ = ["AllGather", "ReduceScatter"]

Within: TypeAlias = Callable[[Any], AbstractContextManager[Any]]

_Group: Any = FSDPParamGroup
used_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # those that watch_fsdp2() has seen in use
_numbers = itertools.count()

# Classes of torch that only call the process group. The second came with torch 2.12.
_PLAIN_GATHERS = tuple(
    getattr(_fsdp_collectives, name)
    for name in ("DefaultAllGather", "ProcessGroupAllocAllGather")
    if hasattr(_fsdp_collectives, name)
)

# Copies of a shard into the gathered buffer, from there into the parameters, and of gradients into the reduced buffer.
# None: this torch copies in another way, which then happens as ever.
COPIES: tuple[Any, ...] = tuple(
    getattr(getattr(torch.ops.fsdp, name, None), "default", None)
    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
)


def copy_parameters(gathered: torch.Tensor, sizes: Sequence[int], out: Sequence[torch.Tensor]) -> None:
    """Copy the parts of each row of ``gathered`` into the tensors ``out``, as FSDP2 does."""
    COPIES[1](gathered, sizes, dim=1, out=out)


def copy_gradients(gradients: Sequence[torch.Tensor], by_rank: torch.Tensor) -> None:
    """Copy the rows of each gradient into one row per rank, as FSDP2 does."""
    COPIES[2](gradients, 0, by_rank.shape[0], out=by_rank)


def before_first_use(observe: Callable[[Any], None]) -> None:
    """Call ``observe(group)`` before the first collective of each later group, and perhaps again afterwards."""
    initialize = _Group.lazy_init

    @functools.wraps(initialize)
    def lazy_init(group: Any) -> None:
        initialize(group)
        observe(group)

    _Group.lazy_init = lazy_init


def find_groups() -> None:
    """Add parameter groups made before watch_fsdp2() to ``used_groups``. Scans all objects of the process."""
    used_groups.update(one for one in gc.get_objects() if issubclass(type(one), _Group))


def reshard_holders(parameters: Sequence[torch.Tensor]) -> None:
    """Drop whole copies of these sharded parameters, which a write to them outdates: roots keep theirs after a forward
    pass without a backward pass, all groups with ``reshard_after_forward=False``."""
    ids = {id(parameter) for parameter in parameters}
    for group in list(used_groups):
        if not group.is_sharded and not ids.isdisjoint(map(parameter_id, group.fsdp_params)):
            group.reshard()


def around(*, allocations: Within, symmetric_memory: Within, custom_collectives: Within, reductions: Within) -> None:
    """Wrap later calls in the context managers ``within(group)``, or ``within(module)`` for collectives of the user's:
    choices of allocation from the process group and of symmetric memory, and gradient reductions."""
    for owner, name, within in (
        (_Group, "set_allocate_memory_from_process_group", allocations),
        (_Group, "set_symm_mem", symmetric_memory),
        (FSDPModule, "set_custom_all_gather", custom_collectives),
        (FSDPModule, "set_custom_reduce_scatter", custom_collectives),
        (_Group, "post_backward", reductions),
    ):
        if hasattr(owner, name):  # some came with later torch
            _wrap(owner, name, within)


def _wrap(owner: Any, name: str, within: Within) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        with within(self):
            return method(self, *arguments, **named)

    setattr(owner, name, call)


def process_groups_of(group: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the process groups of the shards and of HSDP's replicas; None if the mesh has none."""
    mesh_info = group.mesh_info
    return getattr(mesh_info, "shard_process_group", None), getattr(mesh_info, "replicate_process_group", None)


def reduces_replicas_alone(group: Any) -> bool:
    """Tell whether the group's reduction ends with the all-reduce of its replicas, without a user's hook."""
    return bool(group.reduce_grads and group.all_reduce_grads and group._all_reduce_hook is None)


def has_plain_gather(group: Any) -> bool:
    """Tell whether the group's all-gather is one of torch's that only call the process group."""
    return type(group._all_gather_comm) in _PLAIN_GATHERS


def name_in_root(group: Any) -> str:
    """Return the name of the group's module in the root, if known; "" for the root itself."""
    return group._module_fqn or ""


def groups_of(module: FSDPModule) -> Sequence[Any]:
    """Return the groups of one module, without those of its submodules."""
    state = module._get_fsdp_state()
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def collectives_of(group: Any) -> tuple[AllGather, ReduceScatter]:
    """Return the collectives that the group calls."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_collectives(group: Any, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
    """Make the group call these collectives."""
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter


def set_owner(group: Any, owner: Any) -> None:
    """Keep in the group what replaces its collectives."""
    group._zcomm_owner = owner


def owner_of(group: Any) -> Any:
    """Return what replaces the group's collectives, or would but for a user's own ones; None without such."""
    return getattr(group, "_zcomm_owner", None)


def gathers_again(group: Any) -> bool:
    """Tell whether the backward pass gathers the same shards as the forward pass."""
    return bool(group.post_forward_mesh_info == group.mesh_info)


def params_of(group: Any) -> Sequence[Any]:
    """Return the params, in the order of their parts in a shard."""
    params: Sequence[Any] = group.fsdp_params
    return params


def name_of(group: Any, param: Any) -> str:
    """Return the parameter's name in the module that gathers it."""
    info = param._module_info
    for module in group.modules:
        for prefix, inner in module.named_modules():
            if inner is info.module:
                return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)
    return str(info.param_name)


def places_of(param: Any) -> set[tuple[int, str]]:
    """Return the identity of each module that holds the parameter, and its name there: modules may share it."""
    info = param._module_info
    modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    return {(id(module), name) for module, name in zip(modules, names, strict=True)}


def num_elements(param: Any) -> int:
    """Return the number of elements of the whole parameter."""
    return int(param._orig_size.numel())


def is_sharded(param: Any) -> bool:
    """Tell whether the parameter is a shard of its own mesh. After the forward pass it may be one of another mesh."""
    return bool(param.sharded_state.name == "SHARDED")


def gathered_part(param: Any) -> tuple[int, torch.dtype | None]:
    """Return the number of elements, with padding, and the dtype of a rank's shard as it is gathered now. The dtype is
    None if a tensor subclass gathers other data instead."""
    data = param._sharded_param_data if is_sharded(param) else param._sharded_post_forward_param_data
    is_replaced = hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
    return data.numel(), None if is_replaced else param.param_dtype or data.dtype


def unsharded_data(group: Any, num_ranks: int, device: torch.device) -> list[torch.Tensor]:
    """Return the memory that each whole parameter will have, all ranks' shards in rank order. No tensor subclass may
    gather other data instead."""
    found: list[torch.Tensor] = []
    for param in group.fsdp_params:
        numel, dtype = gathered_part(param)
        param.init_all_gather_outputs([numel], [dtype], num_ranks, device)
        param.alloc_all_gather_outputs()
        found.extend(param.all_gather_outputs)
    return found


def shard_of(params: Sequence[Any]) -> torch.Tensor | None:
    """Return a copy of the shard that the next all-gather of a group with these params sends; None if only the gather
    itself can tell. They must be sharded: see version_of()."""
    if any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in params):
        return None
    with torch.no_grad():
        inputs = [part.reshape(-1) for param in params for part in param.all_gather_inputs]
        return torch.cat(inputs) if len({part.dtype for part in inputs}) == 1 else None


def reduced_elements(param: Any) -> int:
    """Return the number of elements, with padding, of a rank's shard of the gradient."""
    return int(param.padded_sharded_param_size.numel())


def values_of(param: Any) -> tuple[Any, str, torch.Tensor]:
    """Return the parameter's module, its name there, and this rank's values."""
    info = param._module_info
    return info.module, info.param_name, param._sharded_param_data


def requires_grad(param: Any) -> bool:
    return bool(param.sharded_param.requires_grad)


def parameter_id(param: Any) -> int:
    """Return the identity of the sharded parameter, which an optimizer holds."""
    return id(param.sharded_param)


def version_of(param: Any) -> tuple[int, ...] | None:
    """Return a version that changes with the values of the sharded parameter; None if PyTorch does not count it."""
    if not is_sharded(param):
        return None
    local = param._sharded_local_tensor
    if local.is_inference() or param.sharded_param.is_inference():
        return None  # PyTorch does not count their versions
    # Empty shards have no address that tells one parameter from the next. A weak reference to a parameter would keep
    # Module.to() from exchanging it.
    serial = vars(param.sharded_param).setdefault("_zcomm_serial", next(_numbers))
    return serial, param.sharded_param._version, local._version, local.data_ptr(), local.numel()
