"""Models with secondary shards, and their training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from support.training import make_batch, make_model
from zcomm.fsdp import Compression, compress


def sharded(secondary: bool, **fields: Any) -> tuple[nn.Module, Compression]:
    model = make_model()
    for block in [*model, model]:
        fully_shard(block, **fields)
    return model, compress(model, keep_in_node=secondary, exempt=())


def memory_bytes(compression: Compression) -> int:
    return sum(stats.memory_bytes for stats in compression.stats().values())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_batches: int = 1, stop: Any = None
) -> list[float]:
    """Return the losses of all micro-batches. ``stop`` is called with the number of each step that has ended."""
    losses = []
    for step in range(steps):
        for _ in range(micro_batches):
            inputs, targets = make_batch(dist.get_rank())
            loss = (model(inputs).float() - targets).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        if stop is not None:
            stop(step)
    return losses
