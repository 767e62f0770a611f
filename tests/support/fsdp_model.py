"""A small model under FSDP2 whose parameters have to be padded, and what its parameters are after a gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import zcomm
from support.expected import roundtrip

NODES = [0, 0, 1, 1]
WIDTH = 35  # no number of ranks divides it: FSDP pads


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inputs + self.down(torch.relu(self.up(self.norm(inputs))))
        return result


def sharded(first: Callable[[nn.Sequential], object] | None = None, **fields: Any) -> nn.Sequential:
    """``first``: what is done before fully_shard."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    if first is not None:
        first(model)
    for block in [*model, model]:
        fully_shard(block, **fields)
    return model


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter after an all-gather."""
    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    for name, parameter in model.named_parameters():
        assert not isinstance(parameter, DTensor)
        found[name] = parameter.detach().clone()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return found


def whole(parameter: nn.Parameter) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    with zcomm.exact():
        return parameter.full_tensor().detach().clone()


def expected_of(parameter: nn.Parameter, format: str) -> torch.Tensor:
    """Each rank's shard, padded as FSDP2 pads it, in blocks of its own."""
    value = whole(parameter)
    rows = -(-value.size(0) // dist.get_world_size())
    shards = []
    for rank in range(dist.get_world_size()):
        shard = value[rank * rows : (rank + 1) * rows]
        padded = torch.cat([shard, shard.new_zeros(rows - len(shard), *value.shape[1:])])
        shards.append(roundtrip(padded.reshape(-1), format).view(rows, *value.shape[1:])[: len(shard)])
    return torch.cat(shards)
