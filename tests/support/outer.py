"""Sites that train a small model in steps of which every bit is known, and the outer step's definition."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import zcomm
from support.training import make_model

LR, MOMENTUM = 0.7, 0.9


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, nesterov=True)


def outer_step(model: nn.Module, **arguments: Any) -> zcomm.outer.OuterStep:
    return zcomm.outer.OuterStep(nesterov(model.parameters()), **arguments)


@torch.no_grad()
def inner_step(model: nn.Module, site: int, step: int) -> None:
    """Go part of the way to a place that depends on the site and the step, element by element."""
    generator = torch.Generator().manual_seed(1000 * site + step)
    for parameter in model.parameters():
        target = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            target = distribute_tensor(target, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().lerp_(target.to_local(), 0.01)
        else:
            parameter.lerp_(target, 0.01)


def train(model: nn.Module, outer: zcomm.outer.OuterStep, site: int, first: int, last: int) -> None:
    """Inner steps ``first`` to ``last``, counted from 1."""
    for step in range(first, last + 1):
        inner_step(model, site, step)
        outer.step()


def flat(model: nn.Module) -> torch.Tensor:
    """Return this rank's values of all parameters."""
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def assert_replicas_agree(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    everybody = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    with zcomm.exact():
        dist.all_gather(everybody, tensor, group=group)
    assert all(torch.equal(other.view(torch.int32), tensor.view(torch.int32)) for other in everybody)


@dataclass
class _Due:
    step: int
    mean: list[torch.Tensor]


def definition(
    sites: int, steps: int, fragments: list[list[int]], every: int, delay: int = 0, keep: float = 0.0
) -> list[torch.Tensor]:
    """The values of each site's parameters after ``steps``, computed by one process. ``fragments`` are indices of
    parameters, in the order in which they take turns."""
    models = [make_model() for _ in range(sites)]
    local = [[p.data for p in model.parameters()] for model in models]
    values, momenta = copy.deepcopy(local[0]), [torch.zeros_like(p) for p in local[0]]
    due: dict[int, _Due] = {}
    for step in range(1, steps + 1):
        for site, model in enumerate(models):
            inner_step(model, site, step)
        for number, indices in enumerate(fragments):
            since = step - (number + 1) * every // len(fragments)
            if since >= 0 and since % every == 0:
                gone = [[values[i] - mine[i] for mine in local] for i in indices]
                due[number] = _Due(step + delay, [torch.stack(each).sum(0) / sites for each in gone])
            if number in due and due[number].step == step:
                for i, mean in zip(indices, due.pop(number).mean, strict=True):
                    momenta[i].mul_(MOMENTUM).add_(mean)
                    values[i].add_(mean.add(momenta[i], alpha=MOMENTUM), alpha=-LR)
                    for mine in local:
                        mine[i].copy_(torch.lerp(values[i], mine[i], keep) if keep else values[i])
    return [flat(model) for model in models]
