"""What zcomm knows of FSDP2's insides: no other module reads its private names. As of torch 2.11 to 2.13.

A *group* is an FSDPParamGroup, the parameters that one module gathers together; a *param* is one of its FSDPParams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = ["AllGather", "ReduceScatter"]


def groups_of(module: FSDPModule) -> Sequence[Any]:
    """The groups of one module, without those of modules inside it."""
    state = module._get_fsdp_state()
    groups: Sequence[Any] | None = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return groups


def collectives_of(group: Any) -> tuple[AllGather, ReduceScatter]:
    """The collectives that the group calls."""
    return group._all_gather_comm, group._reduce_scatter_comm


def set_collectives(group: Any, all_gather: AllGather, reduce_scatter: ReduceScatter) -> None:
    """Makes the group call these."""
    group._all_gather_comm, group._reduce_scatter_comm = all_gather, reduce_scatter


def gathers_from_two_meshes(group: Any) -> bool:
    """Whether the backward pass gathers from other shards than the forward pass: reshard_after_forward is a number."""
    return group.post_forward_mesh_info not in (None, group.mesh_info)


def gathers_again(group: Any) -> bool:
    """Whether the backward pass gathers what the forward pass has gathered."""
    return bool(group.post_forward_mesh_info == group.mesh_info)


def params_of(group: Any) -> Sequence[Any]:
    """The params, in the order in which their parts lie in a shard."""
    params: Sequence[Any] = group.fsdp_params
    return params


def name_of(group: Any, param: Any) -> str:
    """The parameter's name in the module that gathers it."""
    info = param._module_info
    for module in group.modules:
        for prefix, inner in module.named_modules():
            if inner is info.module:
                return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)
    return str(info.param_name)


def places_of(param: Any) -> set[tuple[int, str]]:
    """The modules that hold the parameter, by identity, and its name in each: several modules may share it."""
    info = param._module_info
    modules, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
    return {(id(module), name) for module, name in zip(modules, names, strict=True)}


def num_elements(param: Any) -> int:
    """Of the whole parameter."""
    numel: int = param._orig_size.numel()
    return numel


def gathered_elements(param: Any) -> int:
    """Of a rank's shard as it is gathered now, padding included."""
    is_sharded = param.sharded_state.name == "SHARDED"
    data = param._sharded_param_data if is_sharded else param._sharded_post_forward_param_data
    numel: int = data.numel()
    return numel


def shard_of(group: Any) -> torch.Tensor | None:
    """What the next all-gather of the group sends of this rank, in memory of its own; None where only the gather itself
    can tell. Its parameters are sharded: see version_of()."""
    if any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params):
        return None
    with torch.no_grad():
        inputs = [part.reshape(-1) for param in group.fsdp_params for part in param.all_gather_inputs]
        return torch.cat(inputs) if len({part.dtype for part in inputs}) == 1 else None


def reduced_elements(param: Any) -> int:
    """Of a rank's shard of the gradient, padding included."""
    numel: int = param.padded_sharded_param_size.numel()
    return numel


def requires_grad(param: Any) -> bool:
    return bool(param.sharded_param.requires_grad)


def parameter_id(param: Any) -> int:
    """The identity of the sharded parameter, which an optimizer holds."""
    return id(param.sharded_param)


def version_of(param: Any) -> tuple[int, ...] | None:
    """What changes when the values of the sharded parameter do; None where it cannot be watched."""
    if param.sharded_state.name != "SHARDED":
        return None  # shards of a reshard_after_forward mesh
    local = param._sharded_local_tensor
    if local.is_inference() or param.sharded_param.is_inference():
        return None  # PyTorch does not count their versions
    return param.sharded_param._version, local._version, local.data_ptr(), local.numel()
