"""One small training, the same for every trainer, and what it gave: losses, first gradients, parameters, calls."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import zcomm
from support.expected import HALF_STEP, assert_same_bits
from support.worlds import run

STEPS, EXACT_STEPS = 50, 4
WIDTH, BATCH = 67, 16  # a width that no number of ranks divides: FSDP pads
EXACT = {"all_gather": "exact", "reduce_scatter": "exact"}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
Tensors = dict[str, torch.Tensor]


class Block(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # torch.compile leaves that of torch's own class alone
        for layer in self:
            inputs = layer(inputs)
        return inputs


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3))


def make_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a batch that is the same in each step, so that the loss falls without noise."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs[:, :3].sin()


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    inputs, targets = make_batch(rank)
    return (model(inputs).float() - targets).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@dataclass(frozen=True)
class Job:
    """A trainer's way to train the model."""

    wrap: Callable[[], nn.Module]
    size: int = 2
    nodes: list[int] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    options: Mapping[str, Any] = field(default_factory=dict)  # for compression
    exact: Mapping[str, Any] = field(default_factory=lambda: EXACT)  # for results equal to gloo's
    compressed: tuple[str, ...] = ("all_gather", "reduce_scatter")
    dtype: torch.dtype = torch.float32  # of the forward and backward pass
    reduce_dtype: torch.dtype = torch.float32
    ranks_per_batch: int = 1
    before_step: Callable[[nn.Module], None] = lambda model: None
    twin: str | None = None  # the job that this one is to equal, compressed or not, bit for bit

    def run(self, body: Callable[[], Any], **fields: Any) -> list[Any]:
        return run(body, self.size, nodes=self.nodes, **fields)

    def loss(self, model: nn.Module) -> torch.Tensor:
        return loss_of(model, dist.get_rank() // self.ranks_per_batch)


@dataclass
class Result:
    """Results on a rank."""

    losses: list[float]
    gradients: Tensors  # of the first step
    parameters: Tensors  # after EXACT_STEPS steps
    last_parameters: Tensors
    compressed: dict[str, int]  # collective -> calls


def train(job: Job, steps: int) -> Result:
    model = job.wrap()
    optimizer = job.optimizer(model)
    losses: list[float] = []
    gradients, parameters = {}, {}
    for step in range(steps):
        loss = job.loss(model)
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = whole_tensors(model, gradients=True)
        job.before_step(model)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == EXACT_STEPS:
            parameters = whole_tensors(model)
    return Result(losses, gradients, parameters, whole_tensors(model), compressed_calls(model))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_tensors(model: nn.Module, gradients: bool = False) -> Tensors:
    """Parameters, or their gradients, by their names in the model that was wrapped; exact, on all ranks."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(zcomm.exact())
        if isinstance(model, FullyShardedDataParallel):
            stack.enter_context(FullyShardedDataParallel.summon_full_params(model, with_grads=gradients))
        tensors = {plain(name): p.grad if gradients else p for name, p in model.named_parameters()}
        return {name: whole(tensor) for name, tensor in tensors.items() if tensor is not None}


def plain(name: str) -> str:
    wrappers = ("module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def groups_of(model: nn.Module) -> set[dist.ProcessGroup]:
    groups = {dist.group.WORLD}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            mesh = next(p for p in module.parameters() if isinstance(p, DTensor)).device_mesh
            groups |= set(mesh.get_all_groups())
        if isinstance(module, FullyShardedDataParallel):
            groups.add(module.process_group)
    return groups


def compressed_calls(model: nn.Module) -> dict[str, int]:
    groups = [group for group in groups_of(model) if dist.get_backend(group) == "zcomm"]
    return {name: sum(getattr(zcomm.stats(group), name).calls for group in groups) for name in COLLECTIVES}


def trained(job: Job, steps: int = STEPS, **fields: Any) -> list[Result]:
    """Train and return the results by rank."""
    return job.run(lambda: train(job, steps), **fields)


def mean_losses(results: list[Result]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(result.losses for result in results), strict=True)]


def assert_within_one_percent(got: list[Result], want: list[Result]) -> None:
    """Every loss; those of compressed training are not the same, and fall."""
    ours, theirs = mean_losses(got), mean_losses(want)
    assert ours != theirs
    assert all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert ours[-1] < 0.9 * ours[0]


def assert_same_tensors(got: Tensors, want: Tensors, what: str) -> None:
    assert got.keys() == want.keys(), what
    assert want, what
    for name in want:
        assert_same_bits(got[name], want[name], f"{what}: {name}")


def first_gradients(job: Job) -> tuple[Tensors, list[dict[str, float]]]:
    """Return the trainer's gradients with exact weights, and each rank's own largest gradient in each part of the
    model, as FSDP shards it."""
    model = job.wrap()
    with zcomm.override(all_gather="exact"):
        job.loss(model).backward()
    alone = make_model().to(job.dtype)
    inputs, targets = make_batch(dist.get_rank() // job.ranks_per_batch)
    (alone(inputs.to(job.dtype)).float() - targets).square().mean().backward()
    maxima: dict[str, float] = {}
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            maxima[part(name)] = max(maxima.get(part(name), 0), float(parameter.grad.abs().max()))
    return whole_tensors(model, gradients=True), gather_objects(maxima)


def gather_objects(one: Any) -> list[Any]:
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, one)
    return everybody


def part(name: str) -> str:
    return name.split(".")[0]


def bound_of_mean(maxima: list[float], nodes: list[int] | None) -> float:
    """Bound the error of the mean of all ranks' gradients: half a scale for each rank's contribution, as int8, and with
    several nodes for the nodes' sums, as int4. It includes own contributions, although they are exact."""
    first = sum(maxima) / 127 * HALF_STEP
    second = (sum(maxima) + first) / 7 * HALF_STEP if len(set(nodes or [0])) > 1 else 0.0
    return (first + second) / len(maxima)
