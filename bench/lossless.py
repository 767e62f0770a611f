"""Lossless differences of weights: bits per weight and GB/s of values on one core, hash included.

    .venv/bin/python bench/lossless.py --isa all --values bfloat16,MXFP8,NVFP4
    .venv/bin/python bench/lossless.py --device cuda    the kernels; see bench/lossless_cuda.py

Weights of deviation 0.02 get updates of 0.3 times the learning rate, as AdamW's are. Encoding writes the base, too.
Pieces are run in turn, and the fastest pass of each counts: whoever else uses the machine can only slow one down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from codec import choices
from narrow_weights import PAYLOADS
from zcomm import _core, codec
from zcomm_bench.planner.lossless import changed_floats

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


def sent(weights: np.ndarray, name: str) -> tuple[np.ndarray, str]:
    """The values that are sent of float32 weights, as patterns of 16 bits, and their dtype in the core."""
    if name == "bfloat16":
        return torch.from_numpy(weights).bfloat16().view(torch.uint16).numpy(), name
    return PAYLOADS[name](torch.from_numpy(weights)).view(torch.uint16).numpy(), "byte_pairs"


def row(name: str, rate: float, weights: int, isa: str, repeats: int) -> list[str]:
    (base, dtype), (values, _) = (sent(floats, name) for floats in changed_floats(weights, rate))
    kept, room = base.copy(), np.zeros(_core.max_lossless_bytes(values.size), np.uint8)  # whose pages are there
    new, old = ((array.ctypes.data, array.size, dtype) for array in (values, kept))

    def restore() -> None:
        kept[:] = base

    num_bytes, _ = _core.encode_difference(new, old, room.ctypes.data, isa)
    encode = fastest(lambda: _core.encode_difference(new, old, room.ctypes.data, isa), restore, repeats)
    decode = fastest(lambda: _core.decode_difference(room.ctypes.data, num_bytes, old, isa), restore, repeats)
    speeds = [f"{values.nbytes / seconds / 1e9:.2f}" for seconds in (encode, decode)]
    return [name, f"{rate:g}", f"{8 * num_bytes / weights:.3f}", isa, *speeds]


@app.command()
def main(
    rates: Annotated[str, typer.Option(help="Learning rates.")] = "1e-3,3e-4,1e-4,3e-5,1e-5,1e-6,0",
    values: Annotated[str, typer.Option(help=f"bfloat16, {', '.join(PAYLOADS)}; comma-separated.")] = "bfloat16",
    isa: Annotated[str, typer.Option(help='Instruction sets, "all" or some of cpu_isas().')] = "all",
    kibibytes: Annotated[int, typer.Option(help="Of bfloat16 weights in a piece.")] = 1024,
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
    table = Table("values", "learning rate", "bits per weight", "isa", "encode GB/s", "decode GB/s")
    for rate in map(float, rates.split(",")):
        for each in codec.cpu_isas() if isa == "all" else isa.split(","):
            for name in values.split(","):
                table.add_row(*row(name, rate, kibibytes * 512, each, repeats or 100))
    Console().print(table)


if __name__ == "__main__":
    app()
