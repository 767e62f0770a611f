"""SimpleFSDP, in the form that torchtitan gives it: FSDP as properties of modules, for compilers to see."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor

from support.training import WIDTH, Block

HIDDEN = 64


class Whole(nn.Module):
    """A weight as the computation has it: gathered in the forward pass, reduced and scattered in the backward pass."""

    def forward(self, weight: DTensor) -> torch.Tensor:
        whole = weight.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply SimpleFSDP as torchtitan does: each weight is a DTensor, and a property of its module that redistributes
    it."""
    whole = Whole()
    for module in list(model.modules()):
        weights = dict(module.named_parameters(recurse=False))
        for name, weight in weights.items():
            module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
        properties = {name: property(lambda self, name=name: whole(self._parameters[name])) for name in weights}
        module.__class__ = type(f"SimpleFSDP{type(module).__name__}", (type(module),), properties)
    return model


def make_simple(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return simple_fsdp(Block(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 3, bias=False)), mesh)
