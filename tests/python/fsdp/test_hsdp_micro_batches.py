"""HSDP whose replicas reduce in the last micro-batch only, after set_requires_all_reduce."""

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

NODES = [0, 0, 1, 1]  # shards inside a node, replicas in both
STEPS, MICRO_BATCHES, MODULES = 2, 3, 3


def train(model: Any) -> list[float]:
    """The first micro-batch reduces nothing, the last one also between replicas."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro_batch > 0)
            model.set_requires_all_reduce(micro_batch == MICRO_BATCHES - 1)
            loss = loss_of(model, 4 * micro_batch + dist.get_rank())
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def job(compressed: dict[str, Any] | None = None, **fields: Any) -> tuple[list[float], list[str], int]:
    """Losses, weights of this rank, and reductions between replicas."""
    model: Any = fsdp2((2, 2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))()
    parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    replicas = parameters[0].device_mesh.get_group("replicate")
    if compressed is not None:
        zcomm.fsdp.compress(model, **compressed)
    with zcomm.override(**fields):
        losses = train(model)
    weights = [digest(p.to_local().detach()) for p in parameters]
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, weights, group=replicas)
    assert everybody[0] == everybody[1], "replicas differ"
    if dist.get_backend() == "gloo":
        return losses, weights, STEPS * MODULES
    counted = zcomm.stats(replicas).all_reduce
    return losses, weights, counted.calls + sum(kind.calls for kind in counted.exact.values())


@pytest.mark.promise(7)
def test_hsdp_whose_replicas_reduce_in_the_last_micro_batch() -> None:
    """Exact formats have Gloo's bits. With others replicas agree to the last bit, and losses are within 1 %."""

    def body() -> Any:
        exact = job({"weights": "lossless", "gradients": "exact"})
        for compressed, fields in (
            ({}, {"all_reduce": "int8:128"}),
            ({"fused": False}, {"all_reduce": "int8:128"}),
            ({"error_feedback": zcomm.codec.ErrorFeedback()}, {}),
            ({"exempt": ()}, {"compress": "auto"}),
        ):
            losses, weights, reductions = job(compressed, **fields)
            assert losses == pytest.approx(exact[0], rel=0.01)
            # "auto" may measure that exact calls are faster, and samples both forms.
            assert fields.get("compress") == "auto" or (weights != exact[1] and reductions == STEPS * MODULES)
        return exact

    theirs = run(job, 4, nodes=NODES, backend="gloo")
    assert run(body, 4, nodes=NODES, options=options()) == theirs
