"""The command ``python -m zcomm plan``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from zcomm.planner import cluster as hardware
from zcomm.planner import differences, lab, lab_steps, published, report, scale, step, workload
from zcomm.planner.cluster import Cluster, Figure

console = Console(highlight=False)


def read_cluster(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of other options from a YAML file; an option on the command line has the last word.

    Raises typer.BadParameter if the file is no mapping, or names what is no option."""
    if path is None:
        return None
    try:
        given = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"expected a YAML file: {error}") from None
    names = {parameter.name for parameter in context.command.params if parameter.name} - {"cluster_file"}
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path}: expected a mapping of options to values, got {type(given).__name__}")
    options = {str(name).replace("-", "_"): value for name, value in given.items()}
    if unknown := sorted(options.keys() - names):
        raise typer.BadParameter(f"{path}: expected some of {', '.join(sorted(names))}, got {', '.join(unknown)}")
    context.default_map = options
    return path


Model = Annotated[
    str | None, typer.Option(help='A Hugging Face config.json, or "MODULE:FUNCTION" that builds the module.')
]
LearningRate = Annotated[
    float | None, typer.Option(help="By which weights move: it tells the bits of lossless differences.")
]
BitsPerWeight = Annotated[
    float | None, typer.Option(min=0.0, max=16.0, help="Of lossless differences, in place of a learning rate.")
]
Overlap = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of compute and network: 0 is none, 1 is full.")]


def plan(
    model: Model = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option("--cluster", callback=read_cluster, is_eager=True, help="A YAML file of the options below."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 2,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 8,
    inter: Annotated[str, typer.Option(help='A node\'s link to the others, "100gbit" or "12.5GB/s".')] = "100gbit",
    intra: Annotated[
        str, typer.Option(help=f"{', '.join(hardware.INTRA)}, or a rate of one rank inside its node.")
    ] = "nvlink4",
    gpu: Annotated[str, typer.Option(help=", ".join(hardware.PROCESSORS))] = "h100",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and micro-batch.")] = 4096,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    recompute: Annotated[bool, typer.Option(help="Activations are computed again in the backward pass.")] = False,
    reduce_dtype: Annotated[str, typer.Option(help="Of gradients: float32 or bfloat16.")] = "float32",
    learning_rate: LearningRate = None,
    bits_per_weight: BitsPerWeight = None,
    share_of_peak: Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Of the GPU's peak.")] = None,
    overlap: Overlap = None,
    step_seconds: Annotated[float | None, typer.Option(help="Seconds of a measured exact step.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="What python -m zcomm measure wrote.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the step over bandwidth into this file.")] = None,
    grow: Annotated[bool, typer.Option("--scale", help="Print how the cost grows with the nodes.")] = False,
    validate: Annotated[bool, typer.Option(help="Print the planner's own errors.")] = False,
    results: Annotated[list[Path] | None, typer.Option(help="Reports of zcomm bench for --validate.")] = None,
) -> None:
    """Predict a training step with and without compression, and say what to use."""
    if validate:
        show_validation(results or [])
        return
    if model is None:
        raise typer.BadParameter('expected --model with a config.json or "MODULE:FUNCTION"')
    try:
        units, flops = workload.load_model(model, sequence)
        work = workload.Workload(units, flops, tokens, micro_batches, recompute, reduce_dtype=reduce_dtype)
        if (bits := differences.figure(learning_rate, bits_per_weight)) is not None:
            work = replace(work, bits_per_weight=bits)
        compute = hardware.processor(gpu, share_of_peak)
        cluster = Cluster(nodes, gpus_per_node, hardware.intra_link(intra), hardware.inter_link(inter), compute)
        if calibration is not None:
            cluster = hardware.calibrated(cluster, hardware.load_calibration(calibration))
        hidden = step.OVERLAP if overlap is None else Figure(overlap, "given")
        if step_seconds is not None:
            cluster = step.calibrate_step(work, cluster, step_seconds, hidden)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    made = report.make(work, cluster, step.OPTIONS, hidden)
    if plot is not None:
        report.plot(made, plot)
    if as_json:
        console.print_json(json.dumps(report.to_json(made)))
        return
    report.show(made, console)
    if grow:
        scale.show(made, console)


def show_validation(results: list[Path]) -> None:
    """The errors against published training steps, against measured ones, and against reports of the benchmark."""
    rows = published.load()
    errors, parameters = published.errors(rows)
    table = Table(title=f"{len(rows)} published steps of ZeRO-3 and ZeRO++", box=box.SIMPLE_HEAD)
    for title in ("", "exact steps", "ZeRO++ steps", "speed-ups", "worst speed-up", "speed-ups within 10 %"):
        table.add_column(title, justify="right" if title else "left")
    named = {
        "this model; each exact step held out": errors,
        "bytes at line rate, half of peak": published.errors_of_line_rate(rows),
        "fitted to 138B, on 18B": published.errors_without_model(rows, "18B"),
        "fitted to 18B, on 138B": published.errors_without_model(rows, "138B"),
    }
    for name, each in named.items():
        table.add_row(name, *(f"{value:.1%}" for value in each.summary().values()))
    console.print(table)
    console.print(f"Six parameters, fitted to the exact steps: {parameters}")
    steps = lab_steps.load()
    _show_steps("Training steps behind limited links", lab_steps.predict(steps))
    _show_steps("The same by how weights are sent", lab_steps.predict_weights(steps))
    if results:
        _show_lab({path.stem: json.loads(path.read_text()) for path in results})


def _show_steps(title: str, steps: list[lab_steps.Step]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for title in ("link", "option", "measured", "predicted", "error", "error of bytes"):
        table.add_column(title, justify="left" if title in ("link", "option") else "right")
    for each in steps:
        if each.predicted is None or each.error is None:
            times = ("calibrates", "")
        else:
            times = (report.time_text(each.predicted), f"{each.error:+.1%}")
        measured = report.time_text(each.seconds)
        table.add_row(each.link, each.option, measured, *times, f"{each.bytes_error:+.1%}")
    console.print(table)
    errors = [abs(each.error) for each in steps if each.error is not None]
    console.print(f"Mean error {sum(errors) / len(errors):.1%}; worst {max(errors):.1%}.")


def _show_lab(reports: dict[str, Any]) -> None:
    calls = lab.predict(reports)
    table = Table(title="Compressed collectives behind a limited link", box=box.SIMPLE_HEAD)
    for title in ("report", "bytes", "measured", "predicted", "error", "error of bytes", "of a hop's bytes"):
        table.add_column(title, justify="left" if title == "report" else "right")
    for call in calls:
        times = (report.time_text(call.seconds), report.time_text(call.predicted))
        of_hops = "" if call.hops_error is None else f"{call.hops_error:.1%}"
        table.add_row(call.report, str(call.size), *times, f"{call.error:+.1%}", f"{call.bytes_error:+.1%}", of_hops)
    console.print(table)
    mean = sum(abs(call.error) for call in calls) / len(calls)
    large = [abs(call.error) for call in calls if call.size >= 16 << 20]
    console.print(f"Mean error {mean:.1%}; worst from 16 MiB on {max(large, default=0.0):.1%}.")
