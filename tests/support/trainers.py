"""The trainers of torch, each with the small training of `training`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from support.training import (
    STEPS,
    Job,
    Result,
    make_model,
    trained,
)


def fsdp2(
    mesh: tuple[int, int] | None = None, block: Callable[[nn.Module], nn.Module] = lambda block: block, **fields: Any
) -> Callable[[], nn.Module]:
    def wrap() -> nn.Module:
        model = nn.Sequential(*(block(child) for child in make_model()))
        chosen = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")) if mesh else None
        for module in [*model, model]:
            fully_shard(module, mesh=chosen, **fields)
        return model

    return wrap


def fsdp1(**fields: Any) -> Callable[[], nn.Module]:
    def wrap() -> nn.Module:
        hybrid = fields.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD
        # A mesh makes state dicts of DTensors; the older ShardedTensors load only on CUDA.
        mesh = dist.init_device_mesh("cpu", (2, 2) if hybrid else (dist.get_world_size(),))
        # Original parameters give gradients their names.
        all_fields = {"use_orig_params": True, "device_id": torch.device("cpu"), "device_mesh": mesh, **fields}
        blocks = [FullyShardedDataParallel(block, **all_fields) for block in make_model()]
        return FullyShardedDataParallel(nn.Sequential(*blocks), **all_fields)

    return wrap


def tensor_parallel() -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = make_model()
    for block in list(model)[:2]:
        parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in [*model, model]:
        fully_shard(module, mesh=mesh["data"])
    return model


def agree_on_replicated_gradients(model: nn.Module) -> None:
    """Copies of a parameter on tensor-parallel ranks are each rounded beside other values: make them agree again."""
    for parameter in model.parameters():
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        names = mesh.mesh_dim_names
        if "tensor" not in names or placements[names.index("tensor")].is_replicate():
            group = mesh._get_root_mesh().get_group("tensor")
            dist.broadcast(parameter.grad.to_local(), group=group, group_src=0)  # type: ignore[union-attr]


def ddp() -> nn.Module:
    return DistributedDataParallel(make_model())


def zero_redundancy(model: nn.Module) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
TWO_NODES = [0, 0, 1, 1]
ALL_REDUCE = {"all_reduce": "int8:128"}
JOBS = {
    "FSDP2": Job(fsdp2(), 3),
    "FSDP2 on two nodes": Job(fsdp2(), 4, TWO_NODES),
    "FSDP2, bfloat16": Job(fsdp2(mp_policy=BFLOAT16), dtype=torch.bfloat16),
    "FSDP2, float16": Job(fsdp2(mp_policy=FLOAT16), dtype=torch.float16, reduce_dtype=torch.float16),
    "FSDP2, weights kept": Job(fsdp2(reshard_after_forward=False), 3, twin="FSDP2"),
    "FSDP2, weights kept by 2": Job(fsdp2(reshard_after_forward=2), 4),
    "FSDP2, offloaded": Job(fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)), 3, twin="FSDP2"),
    "FSDP2, activations checkpointed": Job(fsdp2(block=checkpoint_wrapper), 3, twin="FSDP2"),
    "HSDP": Job(fsdp2((2, 2)), 4),
    "FSDP2, tensor parallel": Job(tensor_parallel, 4, ranks_per_batch=2, before_step=agree_on_replicated_gradients),
    "FSDP1": Job(fsdp1(), 3),
    "FSDP1, bfloat16": Job(
        fsdp1(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        dtype=torch.bfloat16,
    ),
    "FSDP1, weights kept": Job(fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), 3, twin="FSDP1"),
    "FSDP1, hybrid": Job(fsdp1(sharding_strategy=ShardingStrategy.HYBRID_SHARD), 4),
    "DDP": Job(ddp, options=ALL_REDUCE, exact={}, compressed=("all_reduce",)),
    "ZeroRedundancyOptimizer": Job(
        ddp, optimizer=zero_redundancy, options=ALL_REDUCE, exact={}, compressed=("all_reduce",), twin="DDP"
    ),
}


@functools.cache
def under_gloo(name: str, steps: int = STEPS) -> list[Result]:
    return trained(JOBS[name], steps, backend="gloo")
