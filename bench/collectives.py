"""The standard measurements of the collectives: one JSON report and one picture each, in bench/results.

python bench/collectives.py                  all of them: about 25 minutes
python bench/collectives.py --quick          fewer, smaller and once: a minute or two, for a look
python bench/collectives.py --only NAME      those whose name contains NAME
"""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from zcomm import bench, bench_report, cli

RESULTS = Path(__file__).with_name("results")
GATHER = ["gloo", "zcomm", "naive"]
REDUCE = ["gloo", "zcomm", "exact_all_to_all", "naive"]
SIZES = bench.sweep(bench.parse_size("1K"), bench.parse_size("64M"), 4)
SLOW_SIZES = bench.sweep(bench.parse_size("1K"), bench.parse_size("16M"), 4)
QUICK_SIZES = bench.sweep(bench.parse_size("64K"), bench.parse_size("16M"), 16)

# All-gathers move weights as int8:256. Gradients cross nodes as int4:128, and stay int8:128 inside.
FOUR: dict[str, Any] = {"nodes": "4x1", "link": "1gbit", "sizes": SIZES}
FREE: dict[str, Any] = {"nodes": "4x1", "link": "unlimited", "sizes": SIZES}
TWO: dict[str, Any] = {"nodes": "2x2", "link": "100mbit", "sizes": SLOW_SIZES}
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
    "all_gather_bfloat16_4x1_unlimited": {"collective": "all_gather", "backends": GATHER, "dtype": "bfloat16", **FREE},
    "reduce_scatter_float_4x1_unlimited": {
        "collective": "reduce_scatter",
        "backends": REDUCE,
        "dtype": "float",
        **FREE,
    },
    "all_gather_bfloat16_2x2_100mbit": {"collective": "all_gather", "backends": GATHER, "dtype": "bfloat16", **TWO},
    "reduce_scatter_float_2x2_100mbit": {"collective": "reduce_scatter", "backends": REDUCE, "dtype": "float", **TWO},
}
QUICK = (
    "all_gather_bfloat16_4x1_1gbit",
    "reduce_scatter_float_4x1_1gbit",
    "all_gather_bfloat16_4x1_unlimited",
    "reduce_scatter_float_2x2_100mbit",
)


def main(
    quick: Annotated[bool, typer.Option(help="A small part, for a look.")] = False,
    only: Annotated[str, typer.Option(help="Part of the names to run.")] = "",
    iters: Annotated[int, typer.Option(help="Samples per size and launch.")] = 15,
    launches: Annotated[int, typer.Option(help="Fresh starts of each.")] = 3,
    out: Annotated[Path, typer.Option(help="Where reports and pictures go.")] = RESULTS,
) -> None:
    """Run the standard set."""
    cli.need("torch", "pyroute2", "matplotlib")
    out.mkdir(parents=True, exist_ok=True)
    names = [name for name in (QUICK if quick else STANDARD) if only in name]
    if not names:
        raise typer.BadParameter(f"no name contains {only!r}: {', '.join(STANDARD)}")
    for name in names:
        spec = bench.Spec(**STANDARD[name], iters=iters, warmup=3, launches=launches)
        if quick:
            spec = dataclasses.replace(spec, sizes=QUICK_SIZES, iters=5, warmup=2, launches=1)
        cli.measure(spec, out / f"{name}.json", out / f"{name}.png")
    if not only:
        overhead = bench.measure_overhead()
        bench_report.show_overhead(overhead)
        document = {"machine": bench.machine(), "results": overhead}
        (out / "overhead.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
