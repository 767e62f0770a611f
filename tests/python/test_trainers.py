"""Training end to end: FSDP2, HSDP and DDP under zcomm against the same job under gloo."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expected import assert_same_bits
from test_backend import HALF_STEP
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from worlds import run

import zcomm

STEPS, WIDTH, BATCH = 6, 67, 16  # a width that no number of ranks divides: FSDP pads
# As variables, options reach the groups of a mesh, too.
EXACT = {"ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "exact"}
Tensors = dict[str, torch.Tensor]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def make_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in each step, so that the loss falls without noise."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs[:, :3].sin()


def shard_fully(mesh: Any = None, **fields: Any) -> Callable[[], nn.Module]:
    def wrap() -> nn.Module:
        model = make_model()
        chosen = dist.init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")) if mesh else None
        for block in [*model, model]:
            fully_shard(block, mesh=chosen, **fields)
        return model

    return wrap


@dataclass(frozen=True)
class Job:
    wrap: Callable[[], nn.Module]
    size: int


JOBS = {
    "FSDP2": Job(shard_fully(), 3),
    "FSDP2, bfloat16": Job(
        shard_fully(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)), 2
    ),
    "HSDP": Job(shard_fully((2, 2)), 4),
    "DDP": Job(lambda: DistributedDataParallel(make_model()), 2),
}


@dataclass
class Result:
    """What rank 0 saw; losses are the mean over ranks."""

    losses: list[float]
    gradients: Tensors  # of the first step
    parameters: Tensors  # at the end
    compressed: dict[str, int]  # collective -> calls


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain(name: str) -> str:
    return name.removeprefix("module.")


def train(job: Job) -> Result:
    model = job.wrap()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, gradients = [], {}
    for step in range(STEPS):
        inputs, targets = make_batch(dist.get_rank())
        loss = (model(inputs).float() - targets).square().mean()
        loss.backward()
        if step == 0:
            gradients = {plain(name): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(float(mean))
    parameters = {plain(name): whole(parameter) for name, parameter in model.named_parameters()}
    everybody: list[Any] = [None] * job.size
    dist.all_gather_object(everybody, parameters)
    for other in everybody:
        for name, parameter in parameters.items():
            assert_same_bits(other[name], parameter, f"replicas differ in {name}")
    return Result(losses, gradients, parameters, compressed_calls(model))


def compressed_calls(model: nn.Module) -> dict[str, int]:
    groups = {dist.group.WORLD}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            mesh = next(p for p in module.parameters()).device_mesh  # type: ignore[union-attr]
            groups |= set(mesh.get_all_groups())
    counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for group in groups:
        if dist.get_backend(group) == "zcomm":
            for name in counts:
                counts[name] += getattr(zcomm.stats(group), name).calls
    return counts


def trained(name: str, **fields: Any) -> Result:
    return run(lambda: train(JOBS[name]), JOBS[name].size, **fields)[0]


@pytest.fixture(scope="module")
def under_gloo() -> Callable[[str], Result]:
    """The same job under gloo, run once."""
    results: dict[str, Result] = {}

    def get(name: str) -> Result:
        if name not in results:
            results[name] = trained(name, backend="gloo")
        return results[name]

    return get


@pytest.mark.parametrize("name", JOBS)
def test_exact_training_is_bit_identical_to_gloo(name: str, under_gloo: Callable[[str], Result]) -> None:
    """With exact formats (and DDP by default) zcomm is gloo: every loss, gradient and parameter."""
    got, want = trained(name, env=EXACT), under_gloo(name)
    assert got.losses == want.losses
    assert sum(got.compressed.values()) == 0
    for kind in ("gradients", "parameters"):
        ours, theirs = getattr(got, kind), getattr(want, kind)
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same_bits(ours[key], theirs[key], f"{kind} of {key}")


@pytest.mark.parametrize("name", JOBS)
def test_compressed_training_stays_close_to_gloo(name: str, under_gloo: Callable[[str], Result]) -> None:
    """The loss falls as under gloo, and replicas stay identical to the last bit."""
    env = {"ZCOMM_MIN_BYTES": "1"} | ({"ZCOMM_ALL_REDUCE": "int8:128"} if name == "DDP" else {})
    got, want = trained(name, env=env), under_gloo(name)
    expected = ("all_reduce",) if name == "DDP" else ("all_gather", "reduce_scatter")
    assert all(got.compressed[collective] >= STEPS for collective in expected), got.compressed
    assert got.losses != want.losses
    for ours, theirs in zip(got.losses, want.losses, strict=True):
        assert math.isclose(ours, theirs, rel_tol=0.03), (got.losses, want.losses)
    assert got.losses[-1] < 0.9 * got.losses[0]


@pytest.mark.parametrize("name", ["FSDP2", "HSDP", "DDP"])
def test_first_gradients_are_within_half_a_step(name: str, under_gloo: Callable[[str], Result]) -> None:
    """With exact weights: half a step of what each other rank sends, by the largest gradient that it has anywhere."""
    size = JOBS[name].size
    env = {"ZCOMM_MIN_BYTES": "1", "ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "int8:128"}
    if name == "DDP":
        env["ZCOMM_ALL_REDUCE"] = "int8:128"
    got, want = trained(name, env=env).gradients, under_gloo(name).gradients

    def local_maximum(rank: int) -> float:
        model = make_model()
        inputs, targets = make_batch(rank)
        (model(inputs) - targets).square().mean().backward()
        return max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)

    def bound() -> list[float]:
        return [local_maximum(rank) for rank in range(size)]

    maxima = run(bound, 1, backend=None)[0]
    # DDP sums and divides, and quantizes the sum once more to gather it.
    limit = sum(maxima) / size / 127 * HALF_STEP * (2 if name == "DDP" else 1) + 1e-6
    errors = {key: float((got[key] - want[key]).abs().max()) for key in want}
    assert max(errors.values()) <= limit, (errors, limit)
    assert max(errors.values()) > limit / 50, "not compressed at all?"


@pytest.mark.parametrize("name", ["FSDP2", "HSDP"])
def test_checkpoints_are_bit_identical_to_the_weights(name: str, tmp_path: Path) -> None:
    """A full state dict and a DCP checkpoint hold what gloo's hold: the initial weights, to the last bit."""

    def save(backend: str) -> Tensors:
        model = JOBS[name].wrap()
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / backend)
        other = JOBS[name].wrap()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        loaded = get_model_state_dict(other)
        dcp.load(loaded, checkpoint_id=tmp_path / backend)
        for key, value in loaded.items():
            assert_same_bits(whole(value), whole(model.state_dict()[key]), key)
        return full

    def read(backend: str) -> Tensors:
        dcp_to_torch_save(tmp_path / backend, tmp_path / f"{backend}.pt")
        return torch.load(tmp_path / f"{backend}.pt")

    full, saved = {}, {}
    for backend in ("gloo", "zcomm"):
        env = {"ZCOMM_MIN_BYTES": "1"}
        full[backend] = run(lambda: save(backend), JOBS[name].size, backend=backend, env=env)[0]  # noqa: B023
        saved[backend] = run(lambda: read(backend), 1, backend=None)[0]  # noqa: B023
    want = run(lambda: dict(make_model().state_dict()), 1, backend=None)[0]
    for tensors in (*full.values(), *saved.values()):
        assert tensors.keys() == want.keys()
        for key, value in want.items():
            assert_same_bits(tensors[key], value, key)


def test_fsdp2_gradient_divide_factor() -> None:
    """set_gradient_divide_factor makes FSDP2 call PREMUL_SUM, for tensors below min_bytes, too."""

    def body() -> list[Tensors]:
        results = []
        for factor in (None, 2.0, 4.0):
            model = JOBS["FSDP2"].wrap()
            for module in model.modules() if factor is not None else ():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
            inputs, targets = make_batch(dist.get_rank())
            (model(inputs) - targets).square().mean().backward()
            results.append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        return results

    for min_bytes in ("1", "1000000000"):
        env = {"ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "bf16", "ZCOMM_MIN_BYTES": min_bytes}
        mean, same, half = run(body, 2, env=env)[0]
        for name, gradient in mean.items():
            scale = float(gradient.abs().max())
            assert ((same[name] - gradient).abs() <= scale * 0.02).all(), name
            assert ((half[name] - gradient / 2).abs() <= scale * 0.02).all(), name
