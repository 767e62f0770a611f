"""What compression costs in loss: the same small GPT, trained with exact and with compressed collectives, seed by seed.

python -m bench.convergence.run         every run that is not in the results yet, then the table
python -m bench.convergence.run --only eden2   the configurations whose names contain "eden2", and the exact ones
python -m bench.convergence.run --report              no runs: the table of the results that are there
python -m bench.convergence.run --docs docs/numerics.md     writes the table into that page as well
python -m bench.convergence.run --steps 21 --seeds 1 --results out/noise.jsonl   the signal-to-noise ratios at the start
python -m bench.convergence.run --quick --results out/quick.jsonl      two steps per run, for a look

Eight ranks train on the sources of the Python standard library, mostly in two nodes. As in FSDP2, a step gathers
weights from float32 shards, computes the gradient of each rank's sequences, scatters the mean to the shards, and steps
them with AdamW. zcomm.testing.LocalWorld runs both collectives with the real codecs and steps, and with threads for
ranks. One thread computes the gradients, one rank after another, in float32, so that a run is deterministic and a pair
of runs differs by its formats alone.

The cases of outer steps (outer.py) have two sites, which train by themselves and average what they changed.

A finished run is one line in the results; what is there is not run again.
"""

import hashlib
import math
import multiprocessing
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from train_gpt import GPT, sample

from bench import results_file
from bench.convergence import kept, outer
from bench.convergence.cases import CASES, CONFIGURATIONS, Configuration, Setting
from bench.convergence.model import corpus, learning_rate, new_model, validate
from bench.convergence.muon import Muon
from bench.convergence.report import markdown_of, summarize, write_markdown
from zcomm import _core
from zcomm.codec import ErrorFeedback
from zcomm.testing import LocalRank, LocalWorld, SecondaryShards

WORLD_SIZE = 8
SNR_EVERY = 10  # steps

app = typer.Typer(help=(__doc__ or "").replace("\npython", "\n\npython"), rich_markup_mode=None, add_completion=False)


Segments = list[tuple[int, str]]  # elements of a shard, and what they travel in


def segments(formats: str, parameters: Sequence[nn.Parameter], flat: bool) -> Segments:
    """How zcomm.fsdp.compress cuts a shard: each parameter has blocks of its own, norms travel as they are."""
    if flat or formats == "exact":
        return [(sum(parameter.numel() for parameter in parameters) // WORLD_SIZE, formats)]
    return [(p.numel() // WORLD_SIZE, formats if p.dim() > 1 else "exact") for p in parameters]


def bytes_per_step(
    weights: Segments,
    gradients: Segments,
    gathered_as: str = "float32",
    differences: Sequence[int] = (),
    exchanges: Sequence[tuple[float, float]] = (),
    nodes: int = 2,
) -> dict[str, int]:
    """What one rank sends to ranks of its node and to other nodes, one gather of the weights and one reduction of the
    gradients. A step of FSDP2 gathers twice, if nothing keeps the weights. ``differences``: what each gather by
    lossless differences has sent to other nodes, ``exchanges``: what those of each step have; the means count."""
    topology = _core.Topology([rank * nodes // WORLD_SIZE for rank in range(WORLD_SIZE)])
    lengths = [sum(elements for elements, _ in weights)] * WORLD_SIZE
    gathered = _core.GatherPlan(topology, 0, lengths, gathered_as, weights).bytes
    reduced = _core.ReducePlan(topology, 0, lengths, "float32", gradients).bytes
    across = round(statistics.fmean(differences)) if differences else gathered.inter_node
    inside, between = (round(statistics.fmean(step[link] for step in exchanges)) if exchanges else 0 for link in (0, 1))
    return {
        "intra_node_bytes": gathered.intra_node + reduced.intra_node + inside,
        "inter_node_bytes": across + reduced.inter_node + between,
    }


class Collectives:
    """The two collectives of a step, for all ranks. What a rank remembers from one step to the next belongs here."""

    def __init__(
        self,
        configuration: Configuration,
        parameters: Sequence[nn.Parameter],
        seed: int,
        gathered_as: str = "float32",
        nodes: int = 2,
    ) -> None:
        self.weight_segments = segments(configuration.weights, parameters, configuration.flat)
        self.gradient_segments = segments(configuration.gradients, parameters, configuration.flat)
        self.world = LocalWorld(f"{nodes}x{WORLD_SIZE // nodes}", seed=seed)
        self._feedback = [ErrorFeedback() if configuration.feedback else None for _ in range(WORLD_SIZE)]
        shard_elements = sum(parameter.numel() for parameter in parameters) // WORLD_SIZE
        self._gathered_as: torch.dtype = getattr(torch, gathered_as)
        # One replica per rank.
        self._received = torch.empty(WORLD_SIZE, WORLD_SIZE, shard_elements, dtype=self._gathered_as)
        self._means = torch.empty(WORLD_SIZE, shard_elements)
        self._held = [SecondaryShards() for _ in range(WORLD_SIZE)] if configuration.lossless else []
        self.lossless_bytes: list[int] = []  # that a rank has sent to the other node, gather by gather

    def all_gather(self, shards: Tensor) -> Tensor:
        """The gathered weights, (ranks, elements of a shard), of ``shards``, the same shape, as the dtype that is
        gathered. Valid until the next call."""
        shards = shards.to(self._gathered_as)

        def body(rank: LocalRank) -> None:
            own = rank.rank
            if self._held:
                rank.all_gather_lossless(shards[own], self._received[own], self._held[own])
            else:
                rank.all_gather(shards[own], self._received[own], self.weight_segments)

        self.world.run(body)
        if self._held:
            self.lossless_bytes.append(self._held[0].sent_bytes)
        return self._received[0]  # replicas agree to the bit: promise 1

    def reduce_scatter(self, gradients: Tensor) -> Tensor:
        """Every rank's shard of the mean gradient, (ranks, elements of a shard), of ``gradients``, (ranks, ranks,
        elements of a shard). Valid until the next call."""

        def body(rank: LocalRank) -> None:
            own, mean = gradients[rank.rank], self._means[rank.rank]
            feedback = self._feedback[rank.rank]
            rank.reduce_scatter(own, mean, self.gradient_segments, factor=1 / WORLD_SIZE, feedback=feedback)

        self.world.run(body)
        return self._means


def pack(tensors: Iterable[Tensor]) -> Tensor:
    """Shards of parameters or their gradients as FSDP2 lays them out, (ranks, elements of a shard): a rank has its
    part of the first dimension of every parameter, end to end."""
    return torch.cat([tensor.detach().reshape(WORLD_SIZE, -1) for tensor in tensors], dim=1)


def unpack(shards: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """The inverse: fills ``parameters``."""
    sizes = [parameter.numel() // WORLD_SIZE for parameter in parameters]
    with torch.no_grad():
        for parameter, part in zip(parameters, shards.split(sizes, dim=1), strict=True):
            parameter.copy_(part.reshape(parameter.shape))


def snr_db(exact: Tensor, received: Tensor) -> float | None:
    """Power of the values over the power of the error, in decibels; None if one of them is nothing."""
    noise = (received.double() - exact).square().sum().item()
    power = exact.double().square().sum().item()
    return round(10 * math.log10(power / noise), 2) if noise and power else None


def snr_of_parameters(exact: Tensor, received: Tensor, cut: Sequence[int]) -> list[float | None]:
    """snr_db of every parameter, from shards whose columns ``cut`` divides."""
    pairs = zip(exact.split(list(cut), dim=1), received.split(list(cut), dim=1), strict=True)
    return [snr_db(one, other) for one, other in pairs]


def muon_of(model: GPT, shards: nn.Parameter, collectives: Collectives, configuration: Configuration) -> Muon:
    """Muon for the matrices of the blocks, by their columns in the shards."""
    shapes, begin = {}, 0
    for name, parameter in model.named_parameters():
        if "blocks" in name and parameter.dim() == 2:
            shapes[begin] = (parameter.size(0), parameter.size(1))
        begin += parameter.numel() // WORLD_SIZE
    return Muon(collectives.world, shards, shapes, configuration.exchanges)


def differentiate(model: nn.Module, text: torch.Tensor, setting: Setting, step: int, gradients: torch.Tensor) -> float:
    """Fill ``gradients`` with a row for each rank's batch; return the mean loss. ``step`` counts those of all seeds."""
    mean_loss = 0.0
    for rank in range(WORLD_SIZE):
        loss = model(sample(text, setting.batch, setting.sequence, seed=step * WORLD_SIZE + rank))
        gradients[rank] = pack(torch.autograd.grad(loss, list(model.parameters())))
        mean_loss += loss.item() / WORLD_SIZE
    return mean_loss


def train(configuration: Configuration, setting: Setting, seed: int) -> dict[str, Any]:
    """One run; ``kept.measurement`` makes a line of the results of what it returns."""
    if setting.outer_every:
        return outer.train(configuration, setting, seed)
    start, cpu_start = time.perf_counter(), time.process_time()
    text, held_out = corpus()
    model = new_model(setting, seed)
    parameters = list(model.parameters())
    cut = [parameter.numel() // WORLD_SIZE for parameter in parameters]
    # AdamW treats each element alone: one optimizer over all shards makes the steps of one per rank.
    shards = nn.Parameter(pack(parameters))
    optimizer = torch.optim.AdamW([shards], betas=(0.9, setting.beta2))
    collectives = Collectives(configuration, parameters, seed, setting.gathered_as, setting.nodes)
    muon = muon_of(model, shards, collectives, configuration) if setting.muon else None
    gradients = torch.empty(WORLD_SIZE, *shards.shape)
    losses: list[float] = []
    gradient_snr: list[list[float | None]] = []
    weight_snr: list[list[float | None]] = []
    for step in range(setting.steps):
        weights = collectives.all_gather(shards.detach())
        unpack(weights, parameters)
        losses.append(differentiate(model, text, setting, seed * setting.steps + step, gradients))
        shards.grad = collectives.reduce_scatter(gradients)
        if step % SNR_EVERY == 0:
            gradient_snr.append(snr_of_parameters(gradients.double().mean(dim=0), shards.grad, cut))
            weight_snr.append(snr_of_parameters(shards.detach().to(weights.dtype), weights, cut))
        optimizer.param_groups[0]["lr"] = learning_rate(setting, step)
        before = shards.detach().clone()
        optimizer.step()
        if muon is not None:
            muon.step(before, learning_rate(setting, step))
    unpack(shards.detach(), parameters)
    loss_of_shards = validate(model, held_out, setting)
    gathered_loss = loss_of_shards
    if configuration.weights != "exact" or setting.gathered_as != "float32":
        unpack(collectives.all_gather(shards.detach()), parameters)
        gathered_loss = validate(model, held_out, setting)
    return {
        "configuration": asdict(configuration),
        "setting": asdict(setting),
        "seed": seed,
        "python": platform.python_version(),  # whose sources are the text
        "cpu": torch.backends.cpu.get_cpu_capability(),  # on another one sums have other last bits
        "parameters": {name: parameter.numel() for name, parameter in model.named_parameters()},
        **bytes_per_step(
            collectives.weight_segments,
            collectives.gradient_segments,
            setting.gathered_as,
            collectives.lossless_bytes,
            muon.bytes if muon else (),
            setting.nodes,
        ),
        "validation_loss": loss_of_shards,  # of what a checkpoint holds
        "gathered_validation_loss": gathered_loss,  # of the weights that the ranks see
        "shards_sha256": hashlib.sha256(shards.detach().numpy().tobytes()).hexdigest(),
        "losses": [round(loss, 5) for loss in losses],
        "gradient_snr_db": gradient_snr,  # per parameter, every SNR_EVERY steps; None where nothing is lost
        "weight_snr_db": weight_snr,
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu_start, 1),
    }


def use_one_thread() -> None:
    torch.set_num_threads(1)
    _core.set_num_threads(1)


def run_missing(keys: Sequence[kept.Key], path: Path, processes: int, console: Console) -> None:
    """Runs what is not in ``path`` and appends it there, as each run ends."""
    done, commit = kept.read(path, platform.python_version()), results_file.commit()
    missing = [key for key in keys if key not in done]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with (
        Progress(*columns, console=console) as progress,
        ProcessPoolExecutor(processes, spawn, initializer=use_one_thread) as pool,
    ):
        task = progress.add_task("", total=len(keys), completed=len(keys) - len(missing))
        runs = [pool.submit(train, *key) for key in missing]
        failed: Future[dict[str, Any]] | None = None
        for run in as_completed(runs):
            if run.cancelled():
                continue
            if run.exception() is not None:  # those under way end, and are kept
                failed = failed or run
                for other in runs:
                    other.cancel()
                continue
            record = run.result()
            results_file.append(path, kept.measurement(record, commit))
            names = f"{Configuration(**record['configuration'])}, seed {record['seed']}"
            text = f"{names}: {record['validation_loss']:.4f} in {record['cpu_seconds']:.0f} s of CPU time"
            progress.update(task, advance=1, description=text)
            if not console.is_terminal:
                console.print(text)
    if failed is not None:
        failed.result()


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Configurations whose names contain one of these, by commas.")] = "",
    seeds: Annotated[int, typer.Option(min=1, max=10, help="Runs of each configuration.")] = 8,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, of one thread each.")] = 2,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of each run. A few suffice for a look at the noise.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Two steps per run.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Run nothing.")] = False,
    results: Annotated[Path, typer.Option(help="A line per run.")] = kept.PATH,
    docs: Annotated[Path | None, typer.Option(help="A page whose table of the study is replaced.")] = None,
) -> None:
    console = Console(highlight=False)
    chosen = [one for one in CONFIGURATIONS if any(part in str(one) for part in only.split(","))]
    exact = [Configuration(case=case) for case in dict.fromkeys(one.case for one in chosen)]  # what they compare with
    chosen = [one for one in CONFIGURATIONS if one in chosen or one in exact]
    changed: dict[str, Any] = {"steps": steps} if steps else {}
    if quick:
        changed = {"steps": 2, "batch": 1, "validation_sequences": 16}
    settings = {case: replace(setting, **changed) for case, setting in CASES.items()}
    # Seed by seed, so that what is there at any time can be compared.
    keys = [(configuration, settings[configuration.case], seed) for seed in range(seeds) for configuration in chosen]
    if not report:
        run_missing(keys, results, processes, console)
    done = kept.read(results, platform.python_version())  # all that are there, asked for or not
    rows = summarize(kept.in_order(done, chosen, settings))
    print(markdown_of(rows))
    if docs is not None:
        write_markdown(rows, docs)
        console.print(f"wrote {docs}")


if __name__ == "__main__":
    app()
