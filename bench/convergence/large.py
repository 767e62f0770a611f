"""What compression costs in loss at 100 M parameters: a GPT under FSDP2, two ranks in two nodes that share a GPU.

python -m bench.convergence.large --seconds 110 --out bench/results

Copies of the model make a step each in turn, on the same text, until the time is up: so all have made as many steps
when they are compared, however few these are. They differ in what is sent. A gap is that of the loss on held-out text
to the exact copy of the same seed; its interval is over batches of that text, that of the mean over seeds. Weights are
gathered as bfloat16, gradients reduced as float32. A run that is stopped keeps the losses that it has.
"""

import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from train_gpt import GPT, load_corpus, sample, shard

from bench import results_file
from bench.convergence.cases import DEFAULT_GRADIENTS, DEFAULT_WEIGHTS
from bench.convergence.report import T95
from zcomm_bench.lab import gpus, network

IS_REHEARSAL = os.environ.get("TESTS_GPU_DEVICE") == "stand-in"  # on the CPU, tiny
NODES = "2x1"
CONFIGURATIONS = {
    "exact": ("exact", "exact"),
    "default": (DEFAULT_WEIGHTS, DEFAULT_GRADIENTS),
    "int4:2048": (DEFAULT_WEIGHTS, "int4:2048"),
    "lossless": ("lossless", DEFAULT_GRADIENTS),
}
SEEDS = 2
WIDTH, LAYERS, SEQUENCE, BATCH = (64, 1, 32, 2) if IS_REHEARSAL else (768, 15, 256, 8)
LEARNING_RATE, WARMUP_STEPS = 3e-4, 20
HELD_OUT_BATCHES = 8  # of each rank
TAIL = 10  # steps, whose mean is the training loss
COLUMNS = ("configuration", "seed", "steps", "training_loss", "validation_loss", "gap_percent", "low", "high")


@dataclass
class Result:
    """Of one copy: losses by step, and by batch of held-out text once it is done."""

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)


class Copy:
    """A model, and how it is trained."""

    def __init__(self, configuration: str, seed: int, device: torch.device) -> None:
        import zcomm

        torch.manual_seed(seed)
        with device:
            model = GPT(WIDTH, LAYERS, SEQUENCE, torch.bfloat16 if device.type == "cuda" else None)
        self.model = model
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        shard(model)
        weights, gradients = CONFIGURATIONS[configuration]
        self._compression = zcomm.fsdp.compress(model, weights=weights, gradients=gradients)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0)
        )

    def step(self, text: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(text)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return loss.detach()


def own_device() -> torch.device:
    if IS_REHEARSAL:
        return torch.device("cpu")
    return torch.device("cuda", gpus.place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


def report(**values: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().double().cpu()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def is_time_left(end: float) -> bool:
    """By the clock of rank 0."""
    left = torch.tensor(float(time.monotonic() < end))
    dist.broadcast(left, 0)
    return bool(left)


def train(seconds: float) -> None:
    """What a rank does."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for some calls
    device = own_device()
    dist.init_process_group("zcomm")
    text, held_out = load_corpus()
    keys = [(configuration, seed) for seed in range(SEEDS) for configuration in CONFIGURATIONS]
    copies = {key: Copy(*key, device) for key in keys}
    rank, size = dist.get_rank(), dist.get_world_size()
    report(parameters=copies[keys[0]].num_parameters)
    end, turn = time.monotonic() + seconds, 0
    while turn == 0 or is_time_left(end):
        for (configuration, seed), copy in copies.items():
            batch = sample(text, BATCH, SEQUENCE, seed=(seed << 32) + turn * size + rank).to(device)
            report(configuration=configuration, seed=seed, loss=mean(copy.step(batch)))
        turn += 1
    for (configuration, seed), copy in copies.items():
        for number in range(HELD_OUT_BATCHES):
            batch = sample(held_out, BATCH, SEQUENCE, seed=number * size + rank).to(device)
            with torch.no_grad():
                report(configuration=configuration, seed=seed, held_out=mean(copy.model(batch)))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as examples/train_gpt.py does, and why


def row_of(configuration: str, seed: int, own: Result, exact: Result) -> dict[str, Any]:
    """The interval is of 95 %, over pairs of batches. Without held-out losses there is no gap."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"configuration": configuration, "seed": seed, "steps": len(own.losses)}
    row["training_loss"] = statistics.fmean(own.losses[-TAIL:]) if own.losses else None
    if len(own.held_out) == len(exact.held_out) == HELD_OUT_BATCHES:
        row["validation_loss"] = statistics.fmean(own.held_out)
        gaps = [100 * (a / b - 1) for a, b in zip(own.held_out, exact.held_out, strict=True)]
        half = T95[HELD_OUT_BATCHES - 1] * statistics.stdev(gaps) / HELD_OUT_BATCHES**0.5
        row["gap_percent"] = statistics.fmean(gaps)
        row["low"], row["high"] = row["gap_percent"] - half, row["gap_percent"] + half
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """The rows, and the mean gaps with their interval over seeds."""
    for row in rows:
        print(
            ", ".join(
                f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )
    for configuration in CONFIGURATIONS:
        gaps = [row["gap_percent"] for row in rows if row["configuration"] == configuration]
        if configuration != "exact" and None not in gaps and len(gaps) > 1:
            half = T95[len(gaps) - 1] * statistics.stdev(gaps) / len(gaps) ** 0.5
            print(f"{configuration}: {statistics.fmean(gaps):+.3f} % +- {half:.3f} over {len(gaps)} seeds")


def main(
    seconds: Annotated[float, typer.Option(min=1.0, help="Of the training; start and end come on top.")],
    out: Annotated[Path, typer.Option(help="A folder that keeps the rows, such as bench/results.")],
) -> None:
    if "RANK" in os.environ:
        train(seconds)
        return
    results = {(name, seed): Result() for seed in range(SEEDS) for name in CONFIGURATIONS}
    facts: dict[str, Any] = {"nodes": NODES, "date": time.strftime("%Y-%m-%d")}

    def take(line: str) -> None:
        record = json.loads(line)
        if "parameters" in record:
            facts.update(record)
            return
        one = results[record["configuration"], record["seed"]]
        if "loss" in record:
            one.losses.append(record["loss"])
        else:
            one.held_out.append(record["held_out"])

    argv = [sys.executable, "-m", "bench.convergence.large", "--seconds", str(seconds), "--out", str(out)]
    try:
        network.launch(argv, nodes=NODES, env={"ZCOMM_MIN_BYTES": "1024"}, on_line=take, isolate=False)
    finally:  # also of a run that was stopped
        rows = [row_of(*key, one, results["exact", key[1]]) for key, one in results.items()]
        gpu = "stand-in" if IS_REHEARSAL else gpus.facts()["gpu"]
        made = results_file.measured("study_100m", results_file.gpu_machine(gpu), COLUMNS, rows, **facts)
        results_file.keep(out / f"study_100m-{gpus.chip(gpu)}.jsonl", [made])
        show(rows)


if __name__ == "__main__":
    typer.run(main)
