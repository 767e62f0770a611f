"""torch's pipelines, with one stage per rank, looped, and in the shape of a V: messages compressed and exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expected import assert_same_bits
from support.worlds import run
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import zcomm

WIDTH, BATCHES = 128, 4

# The stages of each rank, and the messages that a rank sends per micro-batch.
ONE: tuple[list[list[int]], int] = ([[0], [1]], 1)
LOOPED: tuple[list[list[int]], int] = ([[0, 2], [1, 3]], 3)
OF_A_V: tuple[list[list[int]], int] = ([[0, 3], [1, 2]], 2)  # stages 1 and 2 share a rank
SCHEDULES = {
    "GPipe": ONE,
    "1F1B": ONE,
    "LoopedBFS": LOOPED,
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": OF_A_V,
    "DualPipeV": OF_A_V,
}


class Scale(nn.Module):
    """Multiplies by a power of two: exactly representable values stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def step_of(name: str, values: torch.Tensor, override: Any) -> Sequence[torch.Tensor]:
    """The gradients of this rank's factors, and of the last stage the output of a step."""
    places = SCHEDULES[name][0]
    mine, num_stages = places[dist.get_rank()], sum(map(len, places))
    modules = [Scale() for _ in mine]
    schedule = getattr(schedules, f"Schedule{name}")
    with override:
        stages = [
            PipelineStage(module, place, num_stages, torch.device("cpu"))
            for module, place in zip(modules, mine, strict=True)
        ]
        loss: Any = lambda output, target: (output * target).sum() / 1024  # noqa: E731
        pipe = schedule(stages if len(stages) > 1 else stages[0], BATCHES, loss_fn=loss)
        given = [values] if 0 in mine else []
        output = pipe.step(*given, **({"target": values.flip(0)} if num_stages - 1 in mine else {}))
    gradients = [module.factor.grad for module in modules]
    return [*(gradient for gradient in gradients if gradient is not None), *([] if output is None else [output])]


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_pipelines(name: str) -> None:
    def body() -> None:
        rows = BATCHES * 256
        # Codes of int8 with a scale of 2 ** -6: every block holds 127, and so its scale is exact.
        codes = torch.randint(-127, 128, (rows, WIDTH), generator=torch.Generator().manual_seed(0))
        codes[:, 0] = 127
        values = codes * 2.0**-6
        compressed = step_of(name, values, zcomm.override(exchanges="int8:128"))
        exact = step_of(name, values, zcomm.override(exchanges="exact"))
        places, messages = SCHEDULES[name]
        assert len(exact) >= len(places[dist.get_rank()])
        for got, want in zip(compressed, exact, strict=True):
            assert_same_bits(got.detach(), want.detach())
        assert zcomm.stats().send_recv.calls == messages * BATCHES

    run(body)
