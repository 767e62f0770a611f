"""The command ``python -m zcomm_bench plan``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zcomm_bench import files
from zcomm_bench.lab.usage import checked, picture, refusals, source_of
from zcomm_bench.planner import cluster as hardware
from zcomm_bench.planner import inputs, lossless, measured, report, scale, step, workload
from zcomm_bench.planner.cluster import Cluster, Figure

console = Console(highlight=False)


def read_cluster(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of other options from a YAML file; an option on the command line has the last word.

    Raises typer.BadParameter if the file is no mapping, or names what is no option."""
    if path is None:
        return None
    try:
        given = files.read(path, "a YAML file", "YAML")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    parameters = {option.lstrip("-"): each.name for each in context.command.params for option in each.opts}
    del parameters["cluster"]
    if not isinstance(given, dict):
        raise typer.BadParameter(f"{path}: expected a mapping of options to values, got {type(given).__name__}")
    options = {str(name).replace("_", "-"): value for name, value in given.items()}
    if unknown := sorted(options.keys() - parameters.keys()):
        raise typer.BadParameter(f"{path}: expected some of {', '.join(sorted(parameters))}, got {', '.join(unknown)}")
    context.default_map = {parameters[name]: value for name, value in options.items()}
    return path


def refuse_replaced(context: typer.Context, found: Mapping[str, Any]) -> None:
    """Raise ValueError for options that another one, or the calibration `found`, would replace, or none reads."""
    for name in ("inter", "intra"):
        if name in found and source_of(context, name) == "given":
            raise ValueError(f"{name}: expected --{name} or a --calibration that has this link, got both")
    if not str(context.params["model"]).endswith(".json") and source_of(context, "sequence") == "given":
        raise ValueError(
            "sequence: expected it with a config.json alone, got MODULE:FUNCTION, whose tokens count alike"
        )
    if context.params["share_of_peak"] is not None and context.params["step_seconds"] is not None:
        raise ValueError("share_of_peak: expected it or --step-seconds, got both")


def shape_of(nodes: int | None, gpus_per_node: int | None, found: Mapping[str, Any]) -> tuple[int, int]:
    """Nodes and ranks per node: as given, or those of the calibration `found`, about which a line warns if it has
    others."""
    own = found.get("nodes", 2), found.get("ranks_per_node", 8)
    shape = nodes or own[0], gpus_per_node or own[1]
    if found and shape != own:
        text = "warning: the calibration is of {} x {} ranks, the plan of {} x {}"
        typer.echo(text.format(*own, *shape), err=True)
    return shape


Model = Annotated[
    str | None, typer.Option(help='A Hugging Face config.json, or "MODULE:FUNCTION" that builds the module.')
]
Inter = Annotated[
    str,
    typer.Option(callback=checked(hardware.inter_link), help='A node\'s link to the others, "100gbit" or "12.5GB/s".'),
]
Intra = Annotated[
    str,
    typer.Option(
        callback=checked(hardware.intra_link),
        help=f"{', '.join(hardware.INTRA)}, or a rate of one rank inside its node.",
    ),
]
Gpu = Annotated[str, typer.Option(callback=checked(hardware.processor), help=", ".join(hardware.PROCESSORS))]
LearningRate = Annotated[
    float | None, typer.Option(help="By which weights move: it tells the bits of lossless differences.")
]
BitsPerWeight = Annotated[
    float | None, typer.Option(min=0.0, max=16.0, help="Of lossless differences, in place of a learning rate.")
]
Overlap = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Of compute and network: 0 is none, 1 is full.")]


def plan(
    context: typer.Context,
    model: Model = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option("--cluster", callback=read_cluster, is_eager=True, help="A YAML file of the options below."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes: those of the calibration, or 2.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks per node: as --nodes, or 8.")] = None,
    inter: Inter = "100gbit",
    intra: Intra = "nvlink4",
    gpu: Gpu = "h100",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per rank and micro-batch.")] = 4096,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    accumulate: Annotated[bool, typer.Option(help="Gradients are summed whole, and reduced once a step.")] = False,
    recompute: Annotated[bool, typer.Option(help="Activations are computed again in the backward pass.")] = False,
    reduce_dtype: Annotated[str, typer.Option(help="Of gradients: float32 or bfloat16.")] = "float32",
    learning_rate: LearningRate = None,
    bits_per_weight: BitsPerWeight = None,
    share_of_peak: Annotated[float | None, typer.Option(min=0.01, max=1.0, help="Of the GPU's peak.")] = None,
    overlap: Overlap = None,
    step_seconds: Annotated[float | None, typer.Option(help="Seconds of a measured exact step.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="What python -m zcomm_bench measure wrote.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(callback=picture, help="Draw the step over bandwidth into this file.")
    ] = None,
    grow: Annotated[bool, typer.Option("--scale", help="Print how the cost grows with the nodes.")] = False,
) -> None:
    """Predict a training step with and without compression, and say what to use."""
    if model is None:
        raise typer.BadParameter('expected --model with a config.json or "MODULE:FUNCTION"')
    with refusals():
        found = {} if calibration is None else inputs.calibration(calibration)
        refuse_replaced(context, found)
        units, flops = workload.load_model(model, sequence)
        work = workload.Workload(
            units, flops, tokens, micro_batches, recompute, reduce_dtype=reduce_dtype, accumulate=accumulate
        )
        if (bits := lossless.figure(learning_rate, bits_per_weight)) is not None:
            work = replace(work, bits_per_weight=bits)
        links = hardware.intra_link(intra), hardware.inter_link(inter, source_of(context, "inter"))
        cluster = Cluster(*shape_of(nodes, gpus_per_node, found), *links, hardware.processor(gpu, share_of_peak))
        cluster = hardware.calibrated(measured.applied(cluster, gpu), found)
        hidden = step.OVERLAP if overlap is None else Figure(overlap, "given")
        if step_seconds is not None:
            cluster = step.calibrate_step(work, cluster, step_seconds, hidden)
    made = report.make(work, cluster, step.options_of(cluster), hidden)
    if plot is not None:
        report.plot(made, plot)
    if as_json:
        console.print_json(json.dumps(report.to_json(made) | ({"scale": scale.to_json(made)} if grow else {})))
        return
    report.show(made, console)
    if grow:
        scale.show(made, console)
