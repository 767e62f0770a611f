"""The standard measurements of the collectives, which bench/results keeps.

python bench/collectives.py                  all of them: about half an hour
python bench/collectives.py --quick          fewer, smaller and once: a minute or two, for a look; keeps nothing
python bench/collectives.py --only NAME      those whose name contains NAME; also with --quick
python bench/collectives.py --device cuda    nccl and zcomm on the GPUs of this machine: five minutes or so
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

import results_file
from zcomm_bench import cli
from zcomm_bench import report as bench_report
from zcomm_bench.lab import gpus
from zcomm_bench.run import measure_overhead
from zcomm_bench.spec import DEVICES, NO_LAB, Spec, parse_size, sweep

KEPT = ("size", "backend", "format", "median_us", "speedup", "link_bytes", "codec_us")
GATHER = ["gloo", "zcomm", "naive"]
REDUCE = ["gloo", "zcomm", "exact_all_to_all", "naive"]
SIZES = sweep(parse_size("1K"), parse_size("64M"), 4)
SLOW_SIZES = sweep(parse_size("1K"), parse_size("16M"), 4)
QUICK_SIZES = sweep(parse_size("64K"), parse_size("16M"), 16)

# All-gathers move weights as int8:256. Gradients cross nodes as int4:128, and stay int8:128 inside.
FOUR: dict[str, Any] = {"nodes": "4x1", "link": "1gbit", "sizes": SIZES}
FREE: dict[str, Any] = {"nodes": "4x1", "link": "unlimited", "sizes": SIZES}
ONE: dict[str, Any] = {
    "nodes": "1x4",
    "link": NO_LAB,
    "sizes": [parse_size(size) for size in ("1K", "64K", "1M", "16M", "64M")],
    "backends": ["gloo", "zcomm"],
    "dtype": "float",
}
TWO: dict[str, Any] = {"nodes": "2x2", "link": "100mbit", "sizes": SLOW_SIZES}
TWO_FASTER: dict[str, Any] = {"nodes": "2x2", "link": "300mbit", "sizes": SIZES}
STANDARD: dict[str, dict[str, Any]] = {
    "all_gather_bfloat16_4x1_1gbit": {"collective": "all_gather", "backends": GATHER, "dtype": "bfloat16", **FOUR},
    "all_gather_float_4x1_1gbit": {"collective": "all_gather", "backends": GATHER, "dtype": "float", **FOUR},
    "reduce_scatter_float_4x1_1gbit": {"collective": "reduce_scatter", "backends": REDUCE, "dtype": "float", **FOUR},
    "reduce_scatter_bfloat16_4x1_1gbit": {
        "collective": "reduce_scatter",
        "backends": REDUCE,
        "dtype": "bfloat16",
        **FOUR,
    },
    "all_reduce_float_4x1_1gbit": {"collective": "all_reduce", "backends": REDUCE, "dtype": "float", **FOUR},
    "all_to_all_bfloat16_4x1_1gbit": {
        "collective": "all_to_all",
        "backends": ["gloo", "zcomm=int8:128", "zcomm=int4:128"],
        "dtype": "bfloat16",
        **FOUR,
    },
    "broadcast_bfloat16_4x1_1gbit": {
        "collective": "broadcast",
        "backends": ["gloo", "zcomm=int8:256"],
        "dtype": "bfloat16",
        **FOUR,
    },
    "all_gather_float_1x4": {"collective": "all_gather", **ONE},
    "reduce_scatter_float_1x4": {"collective": "reduce_scatter", **ONE},
    "all_gather_bfloat16_4x1_unlimited": {"collective": "all_gather", "backends": GATHER, "dtype": "bfloat16", **FREE},
    "reduce_scatter_float_4x1_unlimited": {
        "collective": "reduce_scatter",
        "backends": REDUCE,
        "dtype": "float",
        **FREE,
    },
    "all_gather_bfloat16_2x2_100mbit": {"collective": "all_gather", "backends": GATHER, "dtype": "bfloat16", **TWO},
    "reduce_scatter_float_2x2_100mbit": {"collective": "reduce_scatter", "backends": REDUCE, "dtype": "float", **TWO},
    "all_gather_bfloat16_2x2_300mbit": {
        "collective": "all_gather",
        "backends": GATHER,
        "dtype": "bfloat16",
        **TWO_FASTER,
    },
    "reduce_scatter_float_2x2_300mbit": {
        "collective": "reduce_scatter",
        "backends": REDUCE,
        "dtype": "float",
        **TWO_FASTER,
    },
}
QUICK = (
    "all_gather_bfloat16_4x1_1gbit",
    "reduce_scatter_float_4x1_1gbit",
    "all_gather_bfloat16_4x1_unlimited",
    "reduce_scatter_float_2x2_100mbit",
)

# On GPUs: 8 B to 1 GiB. Ranks that share a GPU take turns on it, so the largest sizes take seconds per call. Over a
# limited link, where ranks are hosts of a network lab, the link is what bounds a call.
WIDE = sweep(8, parse_size("1G"), 8)
CUDA_REDUCE = ["nccl", "zcomm", "exact_all_to_all"]
PAIR: dict[str, Any] = {"nodes": "2x1", "link": NO_LAB, "sizes": WIDE}
QUAD: dict[str, Any] = {"nodes": "2x2", "link": NO_LAB, "sizes": WIDE[:-1]}
LIMITED: dict[str, Any] = {
    "nodes": "2x1",
    "link": "1gbit",
    "sizes": sweep(parse_size("64K"), parse_size("64M"), 8),
}
CUDA: dict[str, dict[str, Any]] = {
    "all_gather_bfloat16_2x1": {"collective": "all_gather", "dtype": "bfloat16", **PAIR},
    "reduce_scatter_float_2x1": {"collective": "reduce_scatter", "backends": CUDA_REDUCE, **PAIR},
    "all_reduce_float_2x1": {"collective": "all_reduce", "backends": CUDA_REDUCE, **PAIR},
    "all_gather_bfloat16_2x2": {"collective": "all_gather", "dtype": "bfloat16", **QUAD},
    "reduce_scatter_float_2x2": {"collective": "reduce_scatter", "backends": CUDA_REDUCE, **QUAD},
    "all_gather_bfloat16_2x1_1gbit": {"collective": "all_gather", "dtype": "bfloat16", **LIMITED},
    "reduce_scatter_float_2x1_1gbit": {"collective": "reduce_scatter", "backends": CUDA_REDUCE, **LIMITED},
}


def keep(name: str, spec: Spec, report: dict[str, Any], kind: str, machine: str, out: Path) -> None:
    facts = {field: getattr(spec, field) for field in ("collective", "dtype", "nodes", "link", "launches")}
    one = results_file.measured(name, machine, KEPT, report["results"], **facts)
    results_file.keep(out / f"collectives-{kind}.jsonl", [one])


def on_gpus(names: list[str], iters: int, launches: int, seconds: float, out: Path) -> None:
    """The standard set on the GPUs of this machine."""
    try:
        gpu = gpus.facts()["gpu"]
    except gpus.NoGpu as error:
        raise SystemExit(str(error)) from None
    failed = []
    for name in names:
        fields = {"backends": ["nccl", "zcomm"], **CUDA[name]}
        spec = Spec(**fields, device="cuda", iters=iters, warmup=2, launches=launches, seconds=seconds)
        lab = [] if spec.link == NO_LAB else ["pyroute2"]
        missing = [module for module in lab if importlib.util.find_spec(module) is None]
        if missing:
            print(f"{name}: not measured, as {missing[0]} is not installed: it makes links with a limit")
            continue
        try:
            keep(name, spec, cli.measure(spec), gpus.chip(gpu), results_file.gpu_machine(gpu), out)
        except SystemExit as error:  # the others are still worth measuring
            print(f"{name}: {error}")
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main(
    quick: Annotated[bool, typer.Option(help="A small part, for a look.")] = False,
    only: Annotated[str, typer.Option(help="Part of the names to run.")] = "",
    iters: Annotated[int, typer.Option(help="Samples per size and launch.")] = 15,
    launches: Annotated[int, typer.Option(help="Fresh starts of each; 3 by default, on cuda 1.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="cuda: bound for the samples of a size.")] = 2.0,
    out: Annotated[Path, typer.Option(help="The folder that keeps them.")] = results_file.RESULTS,
) -> None:
    """Run the standard set."""
    if device not in DEVICES:
        raise typer.BadParameter(f"expected one of {', '.join(DEVICES)}, got {device!r}", param_hint="--device")
    if quick and device == "cuda":
        raise typer.BadParameter("expected --only NAME on cuda, which has no small part", param_hint="--quick")
    cli.need_torch()
    every = list(CUDA) if device == "cuda" else list(QUICK) if quick and not only else list(STANDARD)
    names = [name for name in every if only in name]
    if not names:
        raise typer.BadParameter(f"no name contains {only!r}: {', '.join(every)}")
    if device == "cuda":
        on_gpus(names, iters, launches or 1, seconds, out)
        return
    launches, isa = launches or 3, results_file.own_isa()
    machine = results_file.cpu_machine(isa)
    for name in names:
        spec = Spec(**STANDARD[name], iters=iters, warmup=3, launches=launches)
        if quick:
            spec = dataclasses.replace(spec, sizes=QUICK_SIZES, iters=5, warmup=2, launches=1)
        report = cli.measure(spec)
        if not quick:
            if report["note"]:
                raise SystemExit(f"{name}: not kept: {report['note']}")
            keep(name, spec, report, isa, machine, out)
    if not only:
        overhead = measure_overhead()
        bench_report.show_overhead(overhead)
        if not quick:
            columns = ("call", "gloo_us", "zcomm_us", "added_us")
            one = results_file.measured("overhead", machine, columns, overhead)
            results_file.keep(out / f"overhead-{isa}.jsonl", [one])


if __name__ == "__main__":
    typer.run(main)
