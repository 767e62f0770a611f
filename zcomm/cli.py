"""The commands of ``python -m zcomm``: what is installed, and how fast it is here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from zcomm import _nccl
from zcomm._version import __version__
from zcomm.bench import report as bench_report
from zcomm.bench import report_file
from zcomm.bench.run import measure_overhead, run_benchmark
from zcomm.bench.spec import NO_LAB, Spec, parse_size, sweep
from zcomm.distributed import environment
from zcomm.lab import command as lab_command
from zcomm.lab import gpus, network
from zcomm.planner import command as planner

app = typer.Typer(
    name="zcomm",
    help="Compressed collectives for torch.distributed.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)
app.add_typer(lab_command.app, name="lab")
app.command("plan")(planner.plan)
console = Console(highlight=False)
Value = TypeVar("Value")


class Collective(str, Enum):
    """What can be measured."""

    all_gather = "all_gather"
    reduce_scatter = "reduce_scatter"
    all_reduce = "all_reduce"


def checked(parse: Callable[[str], Value], text: str) -> Value:
    """The value of an option; a wrong one ends the program with the reason."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def need(*modules: str) -> None:
    """End the program if an optional module is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise SystemExit(
                f"this command needs {module}: pip install zcomm[{'torch' if module == 'torch' else 'bench'}]"
            )


@app.command()
def info() -> None:
    """Show versions, codecs, and the options that the environment sets."""
    facts = Table(box=None, show_header=False)
    facts.add_column(style="bold")
    facts.add_row("zcomm", __version__)
    facts.add_row("Python", platform.python_version())
    facts.add_row("torch", _torch_version())
    facts.add_row("CPU codecs", _codecs())
    for name, fact in _gpu_facts():
        facts.add_row(name, fact)
    console.print(facts)

    try:
        from zcomm.distributed.options import OPTION_FIELDS, Options, variable_of

        options = Options()
        in_force = {field.name: (variable_of(field.name), str(getattr(options, field.name))) for field in OPTION_FIELDS}
    except ImportError:
        in_force = {}  # without the binding no option does anything
    except (TypeError, ValueError) as error:
        raise SystemExit(f"the environment holds a wrong option: {error}") from None
    variables = Table(box=box.SIMPLE_HEAD)
    for title in ("variable", "set to", "option", "in force"):
        variables.add_column(title)
    for option, (variable, value) in in_force.items():
        variables.add_row(variable, os.environ.get(variable, "-"), option, value)
    for variable, meaning in environment.OTHERS.items():
        variables.add_row(variable, os.environ.get(variable, "-"), f"({meaning})", "")
    console.print(variables)


def _torch_version() -> str:
    try:
        running = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    try:
        from zcomm.distributed.binding import bindings
    except ImportError as error:
        return f"{running}; the torch.distributed backend is not usable: {error}"
    return f"{running} (zcomm was built for {', '.join(bindings())})"


def _codecs() -> str:
    try:
        from zcomm import _core
    except ImportError as error:
        return f"the module zcomm._core is not usable: {error}"
    isas = list(_core.cpu_isas())
    chosen = os.environ.get("ZCOMM_ISA") or isas[-1]
    if chosen not in isas:
        return f"{', '.join(isas)}; ZCOMM_ISA asks for {chosen!r}, which is not among them"
    return f"{', '.join(isas)}; {chosen} in use"


def _gpu_facts() -> list[tuple[str, str]]:
    try:
        from zcomm import _core
    except ImportError:
        return []
    build, count = _core.cuda_build(), _core.cuda_device_count()
    if not build.toolkit:
        return [("CUDA", "not built (no nvcc)")]
    try:
        path, version = _nccl.load()
        found = f"{version}, {path}"
    except RuntimeError as error:
        found = f"not found: {error}"
    return [
        ("CUDA", f"built with {build.toolkit}"),
        ("CUDA codec", f"kernels for {', '.join(build.targets.split(';'))}"),
        ("GPUs", str(count) if count else "none"),
        ("NCCL", found),
    ]


# The options of `bench`, named as those of nccl-tests where it has them.
MinBytes = Annotated[str, typer.Option("-b", "--minbytes", help='Smallest size: "8", "64K", "1M".')]
MaxBytes = Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")]
StepFactor = Annotated[int, typer.Option("-f", "--stepfactor", help="From one size to the next.")]
StepBytes = Annotated[str | None, typer.Option("-i", "--stepbytes", help="A step instead of a factor.")]
Iters = Annotated[int, typer.Option("-n", "--iters", help="Samples per size and launch.")]
WarmupIters = Annotated[int, typer.Option("-w", "--warmup_iters", "--warmup-iters", help="Calls before.")]
AggIters = Annotated[
    int, typer.Option("-m", "--agg_iters", "--agg-iters", help="Calls per sample; 0: enough to time them well.")
]
DataType = Annotated[str, typer.Option("-d", "--datatype", help="float, bfloat16 or half.")]
Op = Annotated[str, typer.Option("-o", "--op", help="sum or avg.")]
Check = Annotated[bool, typer.Option(help="Compare with the result in float64.")]
Device = Annotated[str, typer.Option(help="cpu, or cuda: ranks share the GPUs if there are fewer.")]
Backends = Annotated[
    str | None,
    typer.Option(
        help="gloo, zcomm, exact_all_to_all, naive; zcomm=FORMAT and naive=FORMAT, too; by commas. "
        "gloo,zcomm by default. On cuda: nccl, zcomm, exact_all_to_all; nccl,zcomm by default."
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        help='Limit of each node\'s link: "1gbit", "unlimited"; "none": plain loopback. '
        'By default "1gbit", on cuda "none".'
    ),
]
Nodes = Annotated[str, typer.Option(help="Nodes x ranks per node.")]
Seconds = Annotated[float, typer.Option(help="Bound for the samples of a size; 0: none.")]
Launches = Annotated[int, typer.Option("-N", "--launches", help="Fresh starts; medians over them.")]
AllGather = Annotated[str | None, typer.Option(help='zcomm\'s format, "int8:256".')]
ReduceScatter = Annotated[str | None, typer.Option(help="Formats intra-node / inter-node: int8:128/int4:128.")]
AllReduce = Annotated[str | None, typer.Option(help="As --reduce-scatter, and by default the same.")]
CompressedFrom = Annotated[int | None, typer.Option(help="zcomm compresses from this size on.")]
ChunkBytes = Annotated[int | None, typer.Option(help="zcomm's pieces, in bytes of a shard's values.")]
Json = Annotated[Path | None, typer.Option("-J", "--json", help="Write the report to this file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it into this file (.png, .svg, .pdf).")]


@app.command("bench")
def run_bench(
    collective: Annotated[Collective, typer.Argument(help="What to measure.")],
    minbytes: MinBytes = "64K",
    maxbytes: MaxBytes = "16M",
    stepfactor: StepFactor = 4,
    stepbytes: StepBytes = None,
    iters: Iters = 20,
    warmup_iters: WarmupIters = 5,
    agg_iters: AggIters = 0,
    datatype: DataType = "float",
    op: Op = "sum",
    check: Check = True,
    device: Device = "cpu",
    backends: Backends = None,
    link: Link = None,
    nodes: Nodes = "4x1",
    seconds: Seconds = 0,
    launches: Launches = 1,
    all_gather: AllGather = None,
    reduce_scatter: ReduceScatter = None,
    all_reduce: AllReduce = None,
    min_bytes: CompressedFrom = None,
    chunk_bytes: ChunkBytes = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure a collective over several backends side by side, with the options and columns of nccl-tests."""
    if link is None:
        link = NO_LAB if device == "cuda" else "1gbit"
    if backends is None:
        backends = "nccl,zcomm" if device == "cuda" else "gloo,zcomm"
    lab = [] if device == "cuda" and link == NO_LAB else ["pyroute2"]
    need("torch", *lab, *(["matplotlib"] if plot else []))
    given = (all_gather, reduce_scatter, all_reduce, min_bytes, chunk_bytes)
    fields = dict(zip(("all_gather", "reduce_scatter", "all_reduce", "min_bytes", "chunk_bytes"), given, strict=True))
    step = None if stepbytes is None else checked(parse_size, stepbytes)
    try:
        spec = Spec(
            collective=collective.value,
            sizes=sweep(parse_size(minbytes), parse_size(maxbytes), stepfactor, step),
            backends=backends.split(","),
            dtype=datatype,
            op=op,
            iters=iters,
            warmup=warmup_iters,
            calls=agg_iters,
            check=check,
            link=link,
            nodes=nodes,
            launches=launches,
            options={name: value for name, value in fields.items() if value is not None},
            device=device,
            seconds=seconds,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    measure(spec, json, plot)


def measure(spec: Spec, json: Path | None = None, plot: Path | None = None) -> dict[str, Any]:
    """Run a spec with a table that grows, and keep what comes out."""
    with bench_report.LiveTable(spec.title) as live:
        try:
            report = run_benchmark(spec, live.update)
        except (network.RankFailed, gpus.NoGpu) as error:
            raise SystemExit(str(error)) from None
        live.finish(report)
    if json is not None:
        report_file.save(report, json)
    if plot is not None:
        bench_report.plot({"": report}, plot)
    return report


@app.command("measure")
def measure_cluster(
    output: Annotated[Path, typer.Option("-o", "--output", help="The calibration file that rank 0 writes.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
) -> None:
    """Measure this cluster for the planner; start it on every rank, by torchrun -m zcomm measure or srun."""
    need("torch")
    from zcomm.bench import measure as calibration

    try:
        calibration.write(output, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def overhead(
    batch: Annotated[int, typer.Option(min=1, help="Calls per sample.")] = 100,
) -> None:
    """Measure what the backend adds to a call that it leaves exact, in microseconds of the caller's processor time."""
    need("torch", "pyroute2")
    bench_report.show_overhead(measure_overhead(batch))


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Reports that bench --json wrote.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture (.png, .svg, .pdf).")],
) -> None:
    """Draw bandwidth and time against message size."""
    need("matplotlib")
    try:
        reports = {file.stem: report_file.load(file) for file in files}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    bench_report.plot(reports, output)
