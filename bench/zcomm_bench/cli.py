"""The commands of ``python -m zcomm_bench``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zcomm._units import parse_nodes
from zcomm._version import __version__
from zcomm_bench import report as bench_report
from zcomm_bench import report_file
from zcomm_bench.lab import command as lab_command
from zcomm_bench.lab import gpus, network
from zcomm_bench.lab.usage import checked, in_folder, picture, refusals
from zcomm_bench.planner import command as planner
from zcomm_bench.prove import command as prover
from zcomm_bench.run import measure_overhead, run_benchmark
from zcomm_bench.spec import COLLECTIVES, NO_LAB, NOT_EXCHANGES, Spec, parse_link, parse_size, sweep

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)
app.add_typer(lab_command.app, name="lab")
app.command("plan")(planner.plan)
app.command("prove")(prover.prove)
console = Console(highlight=False)


def show_version(wanted: bool) -> None:
    if wanted:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The workshop of zcomm: plans training steps, measures collectives and clusters, limits links."""


def need_torch() -> None:
    """End the program if torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("this command needs torch: pip install torch")


# The options of a benchmark, named as those of nccl-tests where it has them.
MinBytes = Annotated[
    str, typer.Option("-b", "--minbytes", callback=checked(parse_size), help='Smallest size: "8", "64K", "1M".')
]
MaxBytes = Annotated[str, typer.Option("-e", "--maxbytes", callback=checked(parse_size), help="Largest size.")]
StepFactor = Annotated[int, typer.Option("-f", "--stepfactor", help="From one size to the next.")]
StepBytes = Annotated[
    str | None, typer.Option("-i", "--stepbytes", callback=checked(parse_size), help="A step instead of a factor.")
]
Iters = Annotated[int, typer.Option("-n", "--iters", help="Samples per size and launch.")]
WarmupIters = Annotated[int, typer.Option("-w", "--warmup_iters", "--warmup-iters", help="Calls before.")]
AggIters = Annotated[
    int, typer.Option("-m", "--agg_iters", "--agg-iters", help="Calls per sample; 0: enough to time them well.")
]
DataType = Annotated[str, typer.Option("-d", "--datatype", help="float, bfloat16 or half.")]
Op = Annotated[str, typer.Option("-o", "--op", help="sum, or avg of reductions.")]
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
        callback=checked(parse_link),
        help='Limit of each node\'s link: "1gbit", "unlimited"; "none": plain loopback. '
        'By default "1gbit", on cuda "none".',
    ),
]
Nodes = Annotated[str, typer.Option(callback=checked(parse_nodes), help="Nodes x ranks per node.")]
Seconds = Annotated[float, typer.Option(help="Bound for the samples of a size; 0: none.")]
Launches = Annotated[int, typer.Option("-N", "--launches", help="Fresh starts; medians over them.")]
AllGather = Annotated[str | None, typer.Option(help='zcomm\'s format, "int8:256".')]
ReduceScatter = Annotated[str | None, typer.Option(help="Formats intra-node / inter-node: int8:128/int4:128.")]
AllReduce = Annotated[str | None, typer.Option(help="As --reduce-scatter, and by default the same.")]
Exchanges = Annotated[str | None, typer.Option(help="As --reduce-scatter; of a broadcast by default --all-gather's.")]
CompressedFrom = Annotated[int | None, typer.Option(help="zcomm compresses from this size on.")]
ChunkBytes = Annotated[int | None, typer.Option(help="zcomm's pieces, in bytes of a shard's values.")]
Json = Annotated[Path | None, typer.Option("-J", "--json", callback=in_folder, help="Write the report to this file.")]
Plot = Annotated[Path | None, typer.Option(callback=picture, help="Draw it into this file (.png, .svg, .pdf).")]


def run_bench(
    context: typer.Context,
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
    exchanges: Exchanges = None,
    min_bytes: CompressedFrom = None,
    chunk_bytes: ChunkBytes = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure a collective over several backends side by side, with the options and columns of nccl-tests."""
    link = link or (NO_LAB if device == "cuda" else "1gbit")
    backends = backends or ("nccl,zcomm" if device == "cuda" else "gloo,zcomm")
    need_torch()
    from zcomm_bench import contenders

    given = (all_gather, reduce_scatter, all_reduce, exchanges, min_bytes, chunk_bytes)
    fields = dict(zip((*NOT_EXCHANGES, "exchanges", "min_bytes", "chunk_bytes"), given, strict=True))
    step = None if stepbytes is None else parse_size(stepbytes)
    try:
        spec = Spec(
            collective=str(context.command.name),
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
        contenders.check_formats(spec)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    measure(spec, json, plot)


for _collective in COLLECTIVES:
    app.command(_collective)(run_bench)


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
    output: Annotated[Path, typer.Option("-o", "--output", callback=in_folder, help="The file that rank 0 writes.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
) -> None:
    """Measure this cluster, for `plan` and for compress="auto". Start it on every rank, by torchrun, or by srun
    with the variables that torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    need_torch()
    from zcomm_bench.measure import write

    with refusals():
        write(output, device)


@app.command()
def overhead(
    batch: Annotated[int, typer.Option(min=1, help="Calls per sample.")] = 100,
) -> None:
    """Measure what the backend adds to a call that it leaves exact, in microseconds of the caller's processor time."""
    need_torch()
    bench_report.show_overhead(measure_overhead(batch))


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Reports that --json wrote.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("-o", "--output", callback=picture, help="The picture (.png, .svg, .pdf).")],
) -> None:
    """Draw bandwidth and time against message size."""
    stems = [file.stem for file in files]
    names = [str(file) if stems.count(file.stem) > 1 else file.stem for file in files]
    with refusals():
        reports = {name: report_file.load(file) for name, file in zip(names, files, strict=True)}
    bench_report.plot(reports, output)
