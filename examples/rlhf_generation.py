"""A loop as in RLHF, on nodes joined by a slow link: an actor generates text and trains on it, a frozen reference
scores.

Three runs: over gloo, over zcomm, and over zcomm with secondary shards, in which generation moves no weight between
nodes after the first token. Shows generated tokens per second and the bytes that leave the nodes for a token, as the
network interfaces count them.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import matrix_dtype
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_gpt import GPT, load_corpus, mean_and_sum, sample, sent_by_node, shard

import zcomm
from zcomm.lab import network

PROMPT = 16  # bytes
RUNS = {"gloo": "gloo", "zcomm": "zcomm", "zcomm, secondary shards": "zcomm"}

console = Console(highlight=False)


class Policy(GPT):
    """The logits of the next byte."""

    def forward(self, text: Tensor) -> Tensor:
        return self.logits(text)


def log_probabilities(model: Policy, text: Tensor) -> Tensor:
    """Of the bytes that were generated."""
    logits = model(text[:, :-1])[:, PROMPT - 1 :]
    return -F.cross_entropy(logits.flatten(0, 1), text[:, PROMPT:].flatten(), reduction="none").view(len(text), -1)


class Meter:
    """Seconds and bytes between nodes of the parts of a loop, over all ranks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.num_bytes: dict[str, float] = {}

    def measure(self, part: str, body: Any) -> Any:
        _, before = mean_and_sum(torch.zeros(1), sent_by_node())
        start = time.perf_counter()
        result = body()
        dist.barrier()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
        _, after = mean_and_sum(torch.zeros(1), sent_by_node())
        if before is not None and after is not None:
            self.num_bytes[part] = self.num_bytes.get(part, 0.0) + after - before
        return result


def work(
    backend: str, secondary: bool, rounds: int, tokens: int, batch: int, width: int, layers: int, dtype: torch.dtype
) -> None:
    """What each rank does; matrices are multiplied as ``dtype``."""
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    actor = Policy(width, layers, PROMPT + tokens, dtype)
    reference = Policy(width, layers, PROMPT + tokens, dtype)
    reference.load_state_dict(actor.state_dict())
    reference.requires_grad_(False)
    for model in (actor, reference):
        shard(model)
        if secondary:
            zcomm.fsdp.enable_secondary_shards(model)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    corpus, _ = load_corpus()
    torch.manual_seed(rank)
    meter = Meter()

    def next_byte(text: Tensor) -> Tensor:
        chosen = torch.multinomial(torch.softmax(actor(text)[:, -1], -1), 1)
        return torch.cat([text, chosen], 1)

    def generate(text: Tensor, count: int) -> Tensor:
        with torch.no_grad():
            for _ in range(count):
                text = next_byte(text)
        return text

    def train(text: Tensor) -> None:
        with torch.no_grad():
            expected = log_probabilities(reference, text)
        chosen = log_probabilities(actor, text)
        reward = (text[:, PROMPT:] == ord("e")).float()  # a taste that is easily learned
        advantage = reward - reward.mean() - 0.1 * (chosen.detach() - expected)
        (-(advantage * chosen).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(rounds):
        prompts = sample(corpus, batch, PROMPT, seed=number * size + rank)[:, :PROMPT]
        first = meter.measure("first token", lambda prompts=prompts: generate(prompts, 1))
        text = meter.measure("further tokens", lambda first=first: generate(first, tokens - 1))
        meter.measure("step", lambda text=text: train(text))
    if rank == 0:
        counts = {"first token": rounds, "further tokens": rounds * (tokens - 1), "step": rounds}
        parts = {
            part: {"seconds": meter.seconds[part] / count, "bytes": meter.num_bytes.get(part, float("nan")) / count}
            for part, count in counts.items()
        }
        print(json.dumps({"sequences": batch * size, "parts": parts}), flush=True)
    dist.destroy_process_group()


def show(results: dict[str, dict[str, Any]]) -> None:
    table = Table()
    for title in ("", "tokens/s", "kB between nodes per token", "first token, kB", "training step, MB"):
        table.add_column(title, justify="left" if not title else "right")
    for name, result in results.items():
        parts = result["parts"]
        further = parts["further tokens"]
        sequences = result["sequences"]
        table.add_row(
            name,
            f"{sequences / further['seconds']:,.1f}",
            f"{further['bytes'] / sequences / 1e3:,.2f}",
            f"{parts['first token']['bytes'] / sequences / 1e3:,.1f}",
            f"{parts['step']['bytes'] / 1e6:,.2f}",
        )
    console.print(table)


def main(
    nodes: Annotated[str, typer.Option(help="Nodes x ranks per node.")] = "2x2",
    link: Annotated[str, typer.Option(help='Limit of each node\'s link: "100mbit", "1gbit".')] = "100mbit",
    rounds: Annotated[int, typer.Option(min=1, help="Each generates, scores and trains.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Bytes to generate.")] = 12,
    batch: Annotated[int, typer.Option(help="Sequences per rank.")] = 4,
    width: Annotated[int, typer.Option(help="Model width, a multiple of 64.")] = 256,
    layers: int = 4,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/rlhf_generation.json"),
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    multiply_as: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare generation and training over gloo, zcomm, and zcomm with secondary shards."""
    if worker is not None:
        work(RUNS[worker], worker.endswith("shards"), rounds, tokens, batch, width, layers, getattr(torch, multiply_as))
        return
    speed = matrix_dtype.measure()
    console.print(str(speed), soft_wrap=True)
    results: dict[str, dict[str, Any]] = {}
    numbers = {"--rounds": rounds, "--tokens": tokens, "--batch": batch, "--width": width, "--layers": layers}
    given = [str(word) for pair in numbers.items() for word in pair]
    for name in RUNS:
        console.print(f"[bold]{name}[/]: {nodes} ranks, {link} between nodes")

        def keep(line: str, name: str = name) -> None:
            results[name] = json.loads(line)

        argv = [sys.executable, __file__, "--worker", name, "--multiply-as", speed.faster, *given]
        try:
            launched = network.launch(argv, nodes=nodes, rate=link, on_line=keep)
        except network.RankFailed as error:
            console.print(f"{name}: {error}", markup=False, style="red")
            raise typer.Exit(1) from None
        if launched.note:
            console.print(f"warning: {launched.note}", markup=False, style="yellow")
    show(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"nodes": nodes, "link": link, **numbers, "runs": results}, indent=2) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
