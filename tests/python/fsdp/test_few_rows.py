"""Parameters with fewer rows than ranks, or rows that ranks do not share evenly, train like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp_model import whole
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zcomm.fsdp import compress

ROWS, WIDTH = 5, 64
LOSSLESS = {"weights": "lossless", "gradients": "exact"}
EXACT = {"weights": "exact", "gradients": "exact"}


class Tied(nn.Module):
    """A tiny model of language: the embedding is the output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, ROWS, bias=False)
        self.output.weight = self.embedding.weight

    def loss(self) -> torch.Tensor:
        tokens = torch.arange(ROWS).add(dist.get_rank()) % ROWS
        scores = self.output(torch.tanh(self.middle(self.embedding(tokens))))
        return nn.functional.cross_entropy(scores, (tokens + 1) % ROWS)


class Scaled(nn.Module):
    """The scale, one element, is a separate FSDP unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.scale, self.after = nn.Linear(WIDTH, WIDTH), Scale(), nn.Linear(WIDTH, ROWS)

    def loss(self) -> torch.Tensor:
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        result: torch.Tensor = self.after(self.scale(self.before(inputs))).float().square().mean()
        return result


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.5]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.factor


def tied() -> Any:
    return units(Tied(), lambda model: [[model.embedding, model.output], model.middle])


def scaled() -> Any:
    return units(Scaled(), lambda model: [model.before, model.scale, model.after])


def units(model: Any, of: Callable[[Any], list[Any]]) -> Any:
    model.forward = model.loss  # which FSDP's hooks surround
    for unit in [*of(model), model]:
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model


def trained(make: Callable[[], Any], settings: dict[str, str]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters at the start, and after some steps."""
    torch.manual_seed(0)
    model = make()
    compress(model, **settings)
    start = [whole(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(4):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return start, [whole(parameter) for parameter in model.parameters()]


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    **{f"tied, {size} ranks": (tied, size) for size in (2, 3)},
    **{f"scaled, {size} ranks": (scaled, size) for size in (1, 2, 4)},
}


@pytest.mark.parametrize(("make", "size"), CASES.values(), ids=CASES)
def test_every_row_trains(make: Callable[[], Any], size: int) -> None:
    def body() -> None:
        start, exact = trained(make, EXACT)
        _, lossless = trained(make, LOSSLESS)
        _, lossy = trained(make, {})
        for before, one, same, near in zip(start, exact, lossless, lossy, strict=True):
            assert torch.equal(one, same)
            assert (near - one).norm() < 0.05 * one.norm()
            moved = (near - before).reshape(len(near), -1).norm(dim=1)
            assert (moved > 0).all(), moved

    run(body, size, options=options(min_bytes=1, node_size=2))
