"""The trainers of torch under zcomm against the same training under gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
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
    _flat_param,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import (
    EXACT_STEPS,
    STEPS,
    Job,
    Result,
    assert_same_tensors,
    assert_within_one_percent,
    bound_of_mean,
    first_gradients,
    make_model,
    part,
    trained,
)
from worlds import options


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
        _flat_param._FLAT_PARAM_PADDING_VALUE = 0  # FSDP1 pads with 42, from which a block would have its scale
        hybrid = fields.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD
        # With a mesh, state dicts have DTensors: the older ShardedTensors are loaded by CUDA alone.
        mesh = dist.init_device_mesh("cpu", (2, 2) if hybrid else (dist.get_world_size(),))
        # With original parameters, so that their gradients have names.
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
LISTS = {"lists": True}  # as FSDP1 gathers on CPUs
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
    "FSDP1": Job(fsdp1(), 3, options=LISTS),
    "FSDP1, bfloat16": Job(
        fsdp1(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        options=LISTS,
        dtype=torch.bfloat16,
    ),
    "FSDP1, weights kept": Job(fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), 3, options=LISTS, twin="FSDP1"),
    "FSDP1, hybrid": Job(fsdp1(sharding_strategy=ShardingStrategy.HYBRID_SHARD), 4, options=LISTS),
    "DDP": Job(ddp, options=ALL_REDUCE, exact={}, compressed=("all_reduce",)),
    "ZeroRedundancyOptimizer": Job(
        ddp, optimizer=zero_redundancy, options=ALL_REDUCE, exact={}, compressed=("all_reduce",), twin="DDP"
    ),
}
TWINS = [name for name, job in JOBS.items() if job.twin]
OTHERS = [name for name, job in JOBS.items() if not job.twin]
SLOW = (
    "FSDP2 on two nodes", "FSDP2, float16", "FSDP2, weights kept by 2", "FSDP2, tensor parallel", "FSDP1, bfloat16",
    "FSDP1, hybrid",
)  # fmt: skip


@functools.cache
def under_gloo(name: str, steps: int = STEPS) -> list[Result]:
    return trained(JOBS[name], steps, backend="gloo")


@functools.cache
def compressed(name: str) -> list[Result]:
    return trained(JOBS[name], EXACT_STEPS, options=options(**JOBS[name].options))


def assert_compressed(job: Job, result: Result, steps: int) -> None:
    for collective, calls in result.compressed.items():
        assert (calls >= steps) if collective in job.compressed else calls == 0, (collective, result.compressed)


@pytest.mark.parametrize("name", JOBS)
def test_exact_training_is_bit_identical_to_gloo(name: str) -> None:
    """With exact formats, and without all-reduces by default, zcomm is gloo: every loss, gradient and parameter."""
    job = JOBS[name]
    want = under_gloo(name, EXACT_STEPS)
    for ours, theirs in zip(trained(job, EXACT_STEPS, options=options(**job.exact)), want, strict=True):
        assert ours.losses == theirs.losses
        assert sum(ours.compressed.values()) == 0
        assert_same_tensors(ours.gradients, theirs.gradients, "gradients")
        assert_same_tensors(ours.parameters, theirs.parameters, "parameters")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in OTHERS]
)
def test_compressed_training_stays_within_one_percent_of_gloo(name: str) -> None:
    """Every loss of 50 steps; the calls that should be are compressed, and replicas stay identical to the last bit."""
    job = JOBS[name]
    got, want = trained(job, options=options(**job.options)), under_gloo(name)
    for result in got:
        assert_compressed(job, result, STEPS)
        assert_same_tensors(result.last_parameters, got[0].last_parameters, "replicas")
    assert_within_one_percent(got, want)


@pytest.mark.parametrize("name", TWINS)
def test_compressed_training_is_that_of_the_twin(name: str) -> None:
    """Where weights are kept, and what is computed again, changes no bit of what is compressed."""
    job = JOBS[name]
    assert job.twin is not None
    for ours, theirs in zip(compressed(name), compressed(job.twin), strict=True):
        assert_compressed(job, ours, EXACT_STEPS)
        assert ours.losses == theirs.losses
        assert_same_tensors(ours.gradients, theirs.gradients, "gradients")
        assert_same_tensors(ours.parameters, theirs.parameters, "parameters")


@pytest.mark.parametrize("name", OTHERS)
def test_first_gradients_are_within_half_a_step_per_hop(name: str) -> None:
    """With exact weights: off by half a step of what each rank sends, by the largest gradient that it has in the part
    of the model that is sent."""
    job = JOBS[name]
    want = under_gloo(name, EXACT_STEPS)[0].gradients
    for got, maxima in job.run(lambda: first_gradients(job), options=options(**job.options)):
        assert got.keys() == want.keys()
        worst = 0.0
        for key in want:
            whole_model = "all_reduce" in job.compressed  # a bucket of DDP has more than a part
            sent = [max(of.values()) if whole_model else of[part(key)] for of in maxima]
            limit = bound_of_mean(sent, job.nodes)
            limit *= 2 if whole_model else 1  # the mean is quantized once more, to be gathered
            limit += sum(sent) * torch.finfo(job.reduce_dtype).eps  # sums are rounded, here and by gloo
            error = float((got[key] - want[key]).abs().max())
            assert error <= limit, (key, error, limit)
            worst = max(worst, error / limit)
        assert worst > 0.05, "not compressed at all?"
