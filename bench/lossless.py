"""Lossless differences of bfloat16 weights: bits per weight and GB/s of values on one core, hash included.

    .venv/bin/python bench/lossless.py --isa all
    .venv/bin/python bench/lossless.py --device cuda    the kernels; see bench/lossless_cuda.py

Weights of deviation 0.02 get updates of 0.3 times the learning rate, as AdamW's are. Encoding writes the base, too.
Pieces are run in turn, and the fastest pass of each counts: whoever else uses the machine can only slow one down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from codec import choices
from zcomm import _core, codec
from zcomm_bench.planner.lossless import changed_weights

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def fastest(run: Callable[[], object], prepare: Callable[[], object], repeats: int) -> float:
    """Seconds of ``run``, each time after ``prepare``."""
    best = float("inf")
    for _ in range(repeats):
        prepare()
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


@app.command()
def main(
    rates: Annotated[str, typer.Option(help="Learning rates.")] = "1e-3,3e-4,1e-4,3e-5,1e-5,1e-6,0",
    isa: Annotated[str, typer.Option(help='Instruction sets, "all" or some of cpu_isas().')] = "all",
    kibibytes: Annotated[int, typer.Option(help="Of values in a piece.")] = 1024,
    repeats: Annotated[int | None, typer.Option(min=1, help="100 by default, on cuda 25.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    mebibytes: Annotated[str, typer.Option(help="cuda: of values in a piece, comma-separated.")] = "1,16,256",
    out: Annotated[Path | None, typer.Option(help="cuda: a folder that keeps the rows, such as bench/results.")] = None,
) -> None:
    """Encode and decode a piece at each rate with each instruction set, or on a GPU pieces of each size."""
    choices(device, ["cpu", "cuda"], "--device")
    if device == "cuda":
        from lossless_cuda import run

        sizes = [int(size) << 20 for size in mebibytes.split(",")]
        run([float(rate) for rate in rates.split(",")], sizes, repeats or 25, out)
        return
    repeats = repeats or 100
    table = Table("learning rate", "bits", "isa", "encode GB/s", "decode GB/s")
    for rate in map(float, rates.split(",")):
        base, values = (bits.view(ml_dtypes.bfloat16) for bits in changed_weights(kibibytes * 512, rate))
        kept = base.copy()
        body, _ = codec.encode_difference(values, kept)
        room = np.empty(_core.max_lossless_bytes(values.size), np.uint8)  # whose pages are there
        new, old, target = codec.view_of(values, "values"), codec.view_of(kept, "kept"), room.ctypes.data
        for name in codec.cpu_isas() if isa == "all" else isa.split(","):

            def restore(kept: np.ndarray = kept, base: np.ndarray = base) -> None:
                kept[:] = base

            encode = fastest(lambda: _core.encode_difference(new, old, target, name), restore, repeats)  # noqa: B023
            decode = fastest(lambda: codec.decode_difference(body, kept, isa=name), restore, repeats)  # noqa: B023
            speeds = [f"{values.nbytes / seconds / 1e9:.2f}" for seconds in (encode, decode)]
            table.add_row(f"{rate:g}", f"{8 * body.size / values.size:.3f}", name, *speeds)
    Console().print(table)


if __name__ == "__main__":
    app()
