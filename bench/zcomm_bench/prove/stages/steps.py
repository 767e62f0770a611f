"""Training steps under FSDP2: the same model over the real exact backend and over zcomm, in alternating blocks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm_bench.planner.units import units_of
from zcomm_bench.prove.scale import Model
from zcomm_bench.prove.stages.ranks import Ranks

HEAD = 64
LEARNING_RATE = 1e-3
ALONE_STEPS = 6  # the first of which warm up
WARMUP_STEPS = 2


class Decoder(nn.Module):  # type: ignore[misc]
    """From tokens to the loss of predicting the next one."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                model.width, model.width // HEAD, 4 * model.width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(model.layers)
        )
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), text[:, 1:].flatten())


class Copy:
    """A model that is trained over `group`. All copies begin with the same weights."""

    def __init__(self, model: Model, group: Any, device: torch.device) -> None:
        torch.manual_seed(0)
        self.module = Decoder(model).to(device)
        self.units = units_of(self.module)
        mesh = DeviceMesh.from_group(group, device.type)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in self.module.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE)

    def layer_parameters(self) -> list[nn.Parameter]:
        return list(self.module.layers.parameters())

    def compute(self, text: Tensor) -> Tensor:
        loss: Tensor = self.module(text)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def text_of(model: Model, rank: int, number: int, device: torch.device) -> Tensor:
    """What `rank` reads in a step: each token follows from the one before it, but for a tenth that are random."""
    generator = torch.Generator().manual_seed(1_000_003 * number + rank)
    shape = (model.batch, model.sequence + 1)
    tokens = torch.randint(model.vocabulary, shape, generator=generator)
    random = torch.rand(shape, generator=generator) < 0.1
    for place in range(1, shape[1]):
        follows = (5 * tokens[:, place - 1] + 17) % model.vocabulary
        tokens[:, place] = torch.where(random[:, place], tokens[:, place], follows)
    return tokens.to(device)


def alone(ranks: Ranks, model: Model) -> dict[str, Any]:
    """Seconds of computing and of the optimizer without a network: each rank is a world of its own, all at once. Its
    optimizer has the weights of all ranks."""
    own = dist.new_subgroups_by_enumeration([[rank] for rank in range(ranks.size)])[0]  # type: ignore[no-untyped-call]
    copy = Copy(model, own, ranks.device)
    seconds: list[list[float]] = [[], []]
    for number in range(ALONE_STEPS):
        text = text_of(model, ranks.rank, number, ranks.device)
        seconds[0].append(ranks.timed(lambda text=text: copy.compute(text)))
        seconds[1].append(ranks.timed(copy.update))
    compute, update = ranks.slowest(seconds)
    return {"compute": compute[WARMUP_STEPS:], "update": update[WARMUP_STEPS:], "units": copy.units}


def step(ranks: Ranks, copy: Copy, model: Model, number: int) -> tuple[float, float]:
    """Seconds on this rank, and its loss."""
    text, losses = text_of(model, ranks.rank, number, ranks.device), list[Tensor]()

    def body() -> None:
        losses.append(copy.compute(text))
        copy.update()

    return ranks.timed(body), losses[0].item()


def exact_steps(ranks: Ranks, model: Model, count: int) -> list[float]:
    """Steps over the real exact backend alone, the slowest rank's seconds."""
    copy = Copy(model, ranks.exact.group, ranks.device)
    seconds = [step(ranks, copy, model, number)[0] for number in range(WARMUP_STEPS + count)]
    return ranks.slowest([seconds])[0][WARMUP_STEPS:]


def blocks(ranks: Ranks, model: Model) -> dict[str, Any]:
    """Blocks of steps, exact, compressed, compressed, exact and so on. Both copies read the same text."""
    ways = {"exact": ranks.exact.group, "compressed": ranks.compressed.group}
    copies = {name: Copy(model, group, ranks.device) for name, group in ways.items()}
    taken = dict.fromkeys(ways, 0)
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    before = zcomm.stats(ranks.compressed.group)

    def run(name: str) -> None:
        rows[name].append(step(ranks, copies[name], model, taken[name]))
        taken[name] += 1

    for name in ways:
        for _ in range(WARMUP_STEPS):
            run(name)
    for number in range(ranks.scale.blocks):
        ranks.say(f"steps: block {2 * number + 1} and {2 * number + 2} of {2 * ranks.scale.blocks}")
        for name in ways if number % 2 == 0 else reversed(ways):
            for _ in range(ranks.scale.block_steps):
                run(name)
    after = zcomm.stats(ranks.compressed.group)
    return {
        "model": vars(model),
        "warmup": WARMUP_STEPS,
        "block": ranks.scale.block_steps,
        "samples": {name: ranks.slowest([[seconds for seconds, _ in rows[name]]])[0] for name in ways},
        "losses": {name: mean_over_ranks([loss for _, loss in rows[name]]) for name in ways},
        "compressed_calls": {
            name: getattr(after, name).calls - getattr(before, name).calls for name in ("all_gather", "reduce_scatter")
        },
    }


def mean_over_ranks(values: list[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def run(ranks: Ranks) -> dict[str, Any]:
    """Every model of the scale."""
    runs = []
    for model in ranks.scale.models:
        runs.append(blocks(ranks, model))
        ranks.release()
    return {"runs": runs}
