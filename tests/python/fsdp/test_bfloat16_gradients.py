"""Gradients of bfloat16 parameters in float32 reductions: "bf16/exact" sends half of the bytes and loses nothing,
unless micro-batches are summed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expected import digest
from support.trainers import fsdp2
from support.training import loss_of
from support.worlds import options, run
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import zcomm

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gradients_of(gradients: str | None, micro_batches: int) -> tuple[list[str], int]:
    """Digests of this rank's shards of the gradients, and the bytes that reductions sent to the other node."""
    model: Any = fsdp2(mp_policy=MIXED)()
    if gradients is not None:
        zcomm.fsdp.compress(model, gradients=gradients, exempt=())
    for step in range(micro_batches):
        model.set_requires_gradient_sync(step == micro_batches - 1)
        loss_of(model, 4 * step + dist.get_rank()).backward()
    shards = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    sent = 0 if gradients is None else zcomm.stats().reduce_scatter.inter_node_bytes
    return [digest(shard) for shard in shards], sent


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bf16_in_the_first_hop_loses_nothing_in_a_plain_step(micro_batches: int) -> None:
    theirs = run(lambda: gradients_of(None, micro_batches), 2, nodes=[0, 1], backend="gloo")
    chosen = options(all_gather="exact", min_bytes=0)
    ours = run(lambda: gradients_of("bf16", micro_batches), 2, nodes=[0, 1], options=chosen)
    for (exact, _), (received, sent) in zip(theirs, ours, strict=True):
        assert (received == exact) == (micro_batches == 1)
        assert sent > 0
