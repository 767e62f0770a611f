"""The same training job twice, over gloo and over zcomm, on nodes joined by a slow link.

Nodes are network namespaces; nothing differs between the runs but the backend's name. Shows both runs as they go, then
a table, and writes loss.png and summary.json (one object per backend) to the output folder.
"""

import importlib.metadata
import json
import os
import shutil
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import matrix_dtype
import numpy as np
import typer
from demo_plan import Job, Plan, inter_node_bytes, plan
from rich.console import Console
from rich.table import Table

import zcomm
from zcomm._units import parse_nodes
from zcomm_bench.lab import network

EXACT = "gloo"
WARMUP_STEPS = 2  # not counted: allocations and connections are made there
START_SECONDS = 10  # about, for the ranks of a run to import torch and connect
WORKER = Path(__file__).with_name("train_gpt.py")

console = Console(highlight=False)


@dataclass
class Run:
    """Reports of one backend's job."""

    backend: str
    num_steps: int
    start: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def take(self, line: str) -> None:
        """Keep a line of rank 0's output and show progress."""
        try:
            record = json.loads(line)
        except ValueError:
            console.print(line, markup=False)
            return
        kind = record.pop("event")
        if kind == "step":
            self.steps.append(record)
            self._show_step()
        else:
            setattr(self, kind, record)

    def _show_step(self) -> None:
        latest = self.steps[-1]
        seconds = latest["seconds"] - (self.steps[-2]["seconds"] if len(self.steps) > 1 else 0.0)
        sent = latest["inter_node_bytes"]
        console.print(
            f"[bold]{self.backend:>6}[/]  step {latest['step']:>3}/{self.num_steps}   loss {latest['loss']:.3f}   "
            f"{1 / seconds:5.2f} steps/s   {latest['seconds']:6.1f} s   "
            + ("" if sent is None else f"{sent / 1e6:8.1f} MB between nodes"),
            soft_wrap=True,
        )

    def summary(self) -> dict[str, Any]:
        """Summarize the steps after the warm-up."""
        first, last = self.steps[WARMUP_STEPS - 1], self.steps[-1]
        num_steps = last["step"] - first["step"]
        seconds = np.diff([step["seconds"] for step in self.steps[WARMUP_STEPS - 1 :]])
        counted = last["inter_node_bytes"] is not None
        rate = num_steps / (last["seconds"] - first["seconds"])
        return {
            "backend": self.backend,
            "steps": last["step"],
            "steps_per_second": rate,
            "median_step_seconds": statistics.median(seconds.tolist()),
            "tokens_per_second": rate * self.start["tokens_per_step"],
            "inter_node_bytes_per_step": (
                (last["inter_node_bytes"] - first["inter_node_bytes"]) / num_steps if counted else None
            ),
            "first_loss": self.steps[0]["loss"],
            # Skips the first gather, which sends whole weights.
            "bits_per_weight": [step["bits_per_weight"] for step in self.steps[1:] if step["bits_per_weight"]],
            "final_loss": last["loss"],
            "validation_loss": self.end["validation_loss"],
            "parameters": self.start["parameters"],
            "world_size": self.start["world_size"],
        }


def relative_error(folder: Path, exact: Path) -> float | None:
    """Return the relative L2 distance between two saved gradients; None without an exact one."""
    if not exact.is_dir():
        return None
    difference = norm = 0.0
    for path in sorted(exact.glob("*.npy")):
        truth = np.load(path).astype(np.float64)
        difference += float(np.square(np.load(folder / path.name) - truth).sum())
        norm += float(np.square(truth).sum())
    return float(np.sqrt(difference / norm))


def show_table(summaries: dict[str, dict[str, Any]]) -> None:
    """Print one column per backend, with the factor by which it beats the exact run."""
    rows = [
        ("steps per second", "steps_per_second", "{:.3f}", 1.0),
        ("tokens per second", "tokens_per_second", "{:,.0f}", 1.0),
        ("MB between nodes per step", "inter_node_bytes_per_step", "{:.2f}", 1e6),
        ("final loss", "final_loss", "{:.4f}", 1.0),
        ("validation loss", "validation_loss", "{:.4f}", 1.0),
        ("gradient error, first step", "gradient_error", "{:.4f}", 1.0),
    ]
    table = Table()
    table.add_column("")
    for backend in summaries:
        table.add_column(backend, justify="right")
    for label, key, form, unit in rows:
        values = [summary[key] for summary in summaries.values()]
        table.add_row(label, *("not known" if value is None else form.format(value / unit) for value in values))
    if any(bits := [summary["bits_per_weight"] for summary in summaries.values()]):
        cells = (f"{max(steps):.2f}, {steps[-1]:.2f}" if steps else "" for steps in bits)
        table.add_row("bits per weight: most, last step", *cells)
    if EXACT in summaries:
        exact = summaries[EXACT]
        rates = [summary["steps_per_second"] / exact["steps_per_second"] for summary in summaries.values()]
        table.add_row(f"speed-up over {EXACT}", *(f"{rate:.2f}x" for rate in rates))
        if exact["inter_node_bytes_per_step"] is not None:
            sent = [summary["inter_node_bytes_per_step"] for summary in summaries.values()]
            table.add_row(
                f"fewer bytes than {EXACT}", *(f"{exact['inter_node_bytes_per_step'] / count:.2f}x" for count in sent)
            )
    console.print(table)


def plot(runs: list[Run], title: str, path: Path) -> None:
    """Plot the losses against steps, where the curves should agree, and against seconds, where they should not."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for i, run in enumerate(runs):
        losses = [step["loss"] for step in run.steps]
        # Draws the first curve broad, so that an equal one stays visible on it.
        style: dict[str, Any] = {"label": run.backend, "linewidth": 5 if i == 0 else 1.5, "alpha": 0.5 if i == 0 else 1}
        by_step.plot([step["step"] for step in run.steps], losses, **style)
        by_time.plot([step["seconds"] for step in run.steps], losses, **style)
    by_step.set(xlabel="step", ylabel="training loss")
    by_time.set(xlabel="seconds")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def checked_backends(text: str) -> list[str]:
    """Parse "gloo,zcomm" and check that these backends are installed."""
    backends = text.split(",")
    for backend in backends:
        if backend not in (EXACT, "zcomm"):
            raise typer.BadParameter(f'expected "gloo", "zcomm" or both joined by a comma, got {text!r}')
        if backend == "zcomm" and not importlib.metadata.entry_points(group="torch.backends", name="zcomm"):
            raise typer.BadParameter('the "zcomm" backend is not installed: pip install .')
    return backends


def checked_options(formats: dict[str, Any], backends: list[str]) -> zcomm.Options:
    """Find a wrong format now rather than after the first run."""
    if formats and "zcomm" not in backends:
        raise typer.BadParameter("formats are zcomm's, which is not among the backends")
    try:
        return zcomm.Options(**formats)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def run_half(name: str, job: Job, of_half: Plan, arguments: list[str]) -> tuple[Run, network.LaunchResult]:
    """Train over one backend, and show it."""
    console.print(
        f"[bold]{name}[/]: {job.nodes} ranks, {job.link} between nodes, {job.steps} steps of about "
        f"{of_half.step_seconds:.1f} s",
        soft_wrap=True,
    )
    run = Run(name, job.steps)
    model = {"batch": job.batch, "sequence": job.sequence, "width": job.width, "layers": job.layers}
    named = {"backend": name, "steps": job.steps, **model, "micro-batches": job.micro_batches}
    named |= {"multiply-as": job.multiply_as, "step-limit": of_half.step_limit}
    argv = [sys.executable, str(WORKER), *(f"--{key}={value}" for key, value in named.items()), *arguments]
    try:
        result = network.launch(argv, nodes=job.nodes, rate=job.link, on_line=run.take)
    except network.RankFailed as error:
        console.print(f"{name}: {error}", markup=False, style="red")
        cores = len(os.sched_getaffinity(0))
        console.print(
            f"planned were {of_half.step_seconds:.1f} s per step; this machine has {cores} cores and a load of "
            f"{os.getloadavg()[0]:.1f}",
            soft_wrap=True,
        )
        raise typer.Exit(1) from None
    if result.note:
        console.print(f"warning: {result.note}", markup=False, style="yellow")
    return run, result


def main(
    backends: Annotated[str, typer.Option(help="Which to run, in this order.")] = "gloo,zcomm",
    nodes: Annotated[str, typer.Option(help="Nodes x ranks per node.")] = "2x2",
    link: Annotated[str, typer.Option(help='Limit of each node\'s link: "100mbit", "1gbit", "unlimited".')] = "100mbit",
    steps: Annotated[int, typer.Option(min=WARMUP_STEPS + 1)] = 40,
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 2,
    sequence: Annotated[int, typer.Option(help="Bytes per sequence.")] = 128,
    width: Annotated[int, typer.Option(help="Model width, a multiple of 64.")] = 256,
    layers: int = 4,
    all_gather: Annotated[str | None, typer.Option(help='zcomm\'s format for weights, "int8:256".')] = None,
    reduce_scatter: Annotated[str | None, typer.Option(help='For gradients, "int8:128/int4:128".')] = None,
    all_reduce: Annotated[str | None, typer.Option(help='For all-reduce, "exact".')] = None,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="At its peak.")] = 1e-3,
    micro_batches: Annotated[int, typer.Option(min=1, help="That a step accumulates gradients over.")] = 1,
    secondary_shards: Annotated[bool, typer.Option(help="With zcomm, weights cross nodes once in a step.")] = False,
    lossless: Annotated[bool, typer.Option(help="With secondary shards, weights are exact.")] = False,
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("out/demo"),
) -> None:
    """Train a small GPT over each backend and compare."""
    names = checked_backends(backends)
    try:
        parse_nodes(nodes)
        network.parse_limit(link)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    named = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    formats = {name: text for name, text in named.items() if text is not None}
    options = checked_options(formats, names)
    own = {EXACT: [], "zcomm": [f"--{name.replace('_', '-')}={text}" for name, text in formats.items()]}
    if lossless and not secondary_shards:
        raise typer.BadParameter("--lossless: expected it with --secondary-shards, got it alone")
    if secondary_shards:
        own["zcomm"] += ["--secondary-shards", *(["--lossless"] if lossless else [])]

    speed = matrix_dtype.measure()
    console.print(str(speed), soft_wrap=True)
    job = Job(nodes, link, steps, batch, sequence, width, layers, micro_batches, speed.faster)
    compute_seconds = job.compute_seconds()
    sent = {EXACT: inter_node_bytes(job), "zcomm": inter_node_bytes(job, options, secondary_shards, lossless)}
    plans = {name: plan(job, compute_seconds, sent[name]) for name in names}
    minutes = sum(plans[name].seconds + START_SECONDS for name in names) / 60
    console.print(f"this takes about {minutes:.1f} minutes")

    gradients = out / "gradients"
    shutil.rmtree(gradients, ignore_errors=True)
    runs = []
    for name in names:
        folder = gradients / name
        folder.mkdir(parents=True)
        arguments = [*own[name], f"--gradients={folder}", f"--learning-rate={learning_rate}"]
        run, result = run_half(name, job, plans[name], arguments)
        runs.append(run)
    conditions = {"nodes": nodes, "link": link if result.isolated else None, "multiply_as": job.multiply_as}
    errors = {name: relative_error(gradients / name, gradients / EXACT) for name in names}
    summaries = {
        run.backend: {
            **run.summary(),
            "gradient_error": errors[run.backend],
            "planned_step_seconds": plans[run.backend].step_seconds,
            "planned_inter_node_bytes": sent[run.backend],
            **conditions,
        }
        for run in runs
    }
    shutil.rmtree(gradients)

    show_table(summaries)
    plot(runs, f"{runs[0].start['parameters'] / 1e6:.1f} M parameters, {nodes} ranks, {link}", out / "loss.png")
    (out / "summary.json").write_text(json.dumps(summaries, indent=2) + "\n")
    console.print(f"wrote {out / 'summary.json'} and {out / 'loss.png'}")


if __name__ == "__main__":
    typer.run(main)
