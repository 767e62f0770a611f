"""A training step of FSDP2 with Muon by what is compressed: its bytes between nodes and its time.

python -m zcomm_bench lab ranks --nodes 2x2 --rate 100mbit -- python bench/muon_step.py

Muon orthogonalizes the momentum of whole matrices, so the shards of each go to one rank and its updates go back: two
all-to-alls of bfloat16, by lists, for as many matrices as there are ranks (the pattern of microsoft/dion). The same
ranks train a copy of the model in each way, a step of each in turn.
"""

import math
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zcomm
from bench.convergence.muon import MOMENTUM, orthogonalize

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, sent_by_node, shard

WAYS: dict[str, dict[str, str] | None] = {
    "exact": None,
    "default": {},
    "exchanges int8": {"exchanges": "int8:128"},
    "exchanges int4": {"exchanges": "int4:128"},
}
TURNS, WARMUP_TURNS = 5, 1


class ShardedMuon:
    """Steps the matrices of a model under FSDP2, whose first dimension the ranks divide."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float = 0.02) -> None:
        self._parameters = list(parameters)
        self._learning_rate = learning_rate
        self._momentum = [torch.zeros_like(_local(parameter)) for parameter in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        by_shape: dict[torch.Size, list[int]] = {}
        for number, parameter in enumerate(self._parameters):
            by_shape.setdefault(parameter.shape, []).append(number)
        size = dist.get_world_size()
        for shape, numbers in by_shape.items():
            for first in range(0, len(numbers), size):
                owned = numbers[first : first + size]  # by rank
                updates = self._updates([self._momentum_of(number) for number in owned])
                for number, update in zip(owned, updates, strict=True):
                    scale = 0.2 * math.sqrt(max(shape))
                    _local(self._parameters[number]).sub_(update, alpha=self._learning_rate * scale)

    def _momentum_of(self, number: int) -> Tensor:
        gradient = self._parameters[number].grad
        assert isinstance(gradient, DTensor)
        momentum = self._momentum[number].lerp_(gradient.to_local(), 1 - MOMENTUM)
        return gradient.to_local().lerp(momentum, MOMENTUM).bfloat16()

    @staticmethod
    def _updates(shards: list[Tensor]) -> list[Tensor]:
        """This rank's shards of the matrices that the first ranks own, orthogonalized."""
        size = dist.get_world_size()
        sent = shards + [torch.zeros_like(shards[0])] * (size - len(shards))  # Gloo's lists have one shape
        received = [torch.empty_like(shards[0]) for _ in range(size)]
        dist.all_to_all(received, sent)
        whole = orthogonalize(torch.cat(received).float()).bfloat16()
        updates = [torch.empty_like(shard) for shard in sent]
        dist.all_to_all(updates, [part.contiguous() for part in whole.chunk(size)])
        return updates[: len(shards)]


def _local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class Copy:
    """A model and its optimizers. All copies begin with the same weights."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self._way = WAYS[way]
        self._model = GPT(256, 4, 64, torch.float32)
        shard(self._model)
        if self._way is not None:
            zcomm.fsdp.compress(self._model)
        matrices = [parameter for parameter in self._model.blocks.parameters() if parameter.dim() == 2]
        others = {id(parameter) for parameter in self._model.parameters()} - {id(matrix) for matrix in matrices}
        self._muon = ShardedMuon(matrices)
        self._adamw = torch.optim.AdamW((p for p in self._model.parameters() if id(p) in others), lr=1e-3)

    def step(self, text: Tensor) -> float:
        """Train; returns the loss."""
        with self._options():
            loss: Tensor = self._model(text)
            loss.backward()
            self._muon.step()
            self._adamw.step()
        self._model.zero_grad()
        return loss.item()

    def _options(self) -> AbstractContextManager[Any]:
        fields: dict[str, Any] = dict(self._way or {})
        return zcomm.exact() if self._way is None else zcomm.override(**fields)

    def measured_step(self, text: Tensor) -> tuple[float, float]:
        """Seconds of the slowest rank, and the bytes that left all nodes."""
        before = sent_by_node()
        dist.barrier()
        start = time.perf_counter()
        self.step(text)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        sent = torch.tensor([sent_by_node() - before], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(sent)
        return seconds.item(), sent.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("zcomm")
    copies = {way: Copy(way) for way in WAYS}
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(-WARMUP_TURNS, TURNS):
        text = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(turn + 100 * dist.get_rank() + 1))
        for way, copy in copies.items():
            figures = copy.measured_step(text)
            if turn >= 0:
                measured[way].append(figures)
    if dist.get_rank() == 0:
        exact_seconds, exact_bytes = (statistics.median(column) for column in zip(*measured["exact"], strict=True))
        print(f"{'':16} {'ms a step':>10} {'of exact':>9} {'MB between nodes':>17} {'of exact':>9}")
        for way, figures_of_way in measured.items():
            seconds, sent = (statistics.median(column) for column in zip(*figures_of_way, strict=True))
            of_exact = f"{seconds / exact_seconds:9.3f}", f"{sent / exact_bytes:9.3f}"
            print(f"{way:16} {1e3 * seconds:10.1f} {of_exact[0]} {sent / 1e6:17.3f} {of_exact[1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
