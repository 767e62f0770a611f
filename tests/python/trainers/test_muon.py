"""Muon under FSDP2: the optimizer's own exchanges, exact and compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.worlds import run
from torch.distributed.tensor import DTensor
from train_gpt import GPT, shard

import zcomm
from bench.muon_step import ShardedMuon

NODES = [0, 0, 1, 1]
INT8 = {"exchanges": "int8:128"}
STEPS = 2
LONG: dict[str, Any] = {"group_seconds": 200.0, "seconds": 250.0}  # the released one is compiled first


def matrices(model: GPT) -> list[Any]:
    return [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]


def trained(make_optimizer: Any) -> list[torch.Tensor]:
    """This rank's shards after a few steps, of the same data in each run."""
    torch.manual_seed(0)
    model = GPT(64, 4, 32, torch.float32)
    shard(model)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        text = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(text).backward()
        optimizer.step()
        model.zero_grad()
    shards = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        shards.append(parameter.to_local().detach().clone())
    return shards


def sharded_muon(model: GPT) -> Any:
    return ShardedMuon(matrices(model))


def released_muon(model: GPT) -> Any:
    from muon_fsdp2 import Muon

    return Muon([{"params": matrices(model), "lr": 0.02, "use_muon": True}])


def largest_change(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def check(make_optimizer: Any, collectives: tuple[str, ...]) -> None:
    """Exact exchanges give gloo's bits. Those in int8 are counted, repeatable, and never a step away."""

    def body() -> list[torch.Tensor]:
        return trained(make_optimizer)

    def counted() -> list[torch.Tensor]:
        shards = trained(make_optimizer)
        for name in collectives:
            of_one = getattr(zcomm.stats(), name)
            assert of_one.calls > 0 and not of_one.exact
            # Rank 0 has matrices of its own to receive and to send.
            assert dist.get_rank() > 0 or of_one.wire_bytes > 0
        return shards

    def exact() -> list[torch.Tensor]:
        with zcomm.exact():
            return trained(make_optimizer)

    gloo = run(body, 4, backend="gloo", **LONG)
    assert [largest_change(*pair) for pair in zip(gloo, run(exact, 4, nodes=NODES, **LONG), strict=True)] == [0.0] * 4
    options = zcomm.Options(all_gather="exact", reduce_scatter="exact", min_bytes=1, **INT8)
    first, second = (run(counted, 4, nodes=NODES, options=options, **LONG) for _ in range(2))
    for rank in range(4):
        assert largest_change(first[rank], second[rank]) == 0.0
        # No element exceeds the largest singular value, 1.25 after the iterations, times 0.2 * sqrt(256) and the rate.
        assert 0.0 < largest_change(first[rank], gloo[rank]) < 2 * STEPS * 1.25 * 3.2 * 0.02


def test_matrices_in_turn_by_all_to_alls() -> None:
    check(sharded_muon, ("all_to_all",))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_released_muon_that_gathers_and_scatters() -> None:
    tiny_llama.require("muon_fsdp2")
    check(released_muon, ("gather", "scatter"))
