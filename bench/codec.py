"""Speed of the host codec, and of copies in the same memory.

python bench/codec.py                                      float32 as int8:128 and int4:128, one thread
python bench/codec.py --dtype all --isa all --threads 1,2  everything
python bench/codec.py --format int4:128,eden2:128,int4:128:stochastic   what rotation and random bits cost
python bench/codec.py --clock thread                       on a machine that others use: not the time that they take
python bench/codec.py --offset 16                          values that begin 16 bytes past a multiple of 64
python bench/codec.py --out bench/results                  keeps the rows, a file per instruction set
python bench/codec.py --device cuda                        the kernels on a GPU; see bench/codec_cuda.py

GB/s are of the full-precision side: the bytes of the values that are encoded, or that decoding writes. In every repeat
all rows of a table take their turn, so that what else the machine does meets all of them. `read` is a maximum of the
values' bit patterns as integers (NumPy), `copy` is numpy.copyto; both use one thread.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import ml_dtypes
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import results_file
from zcomm import _core, codec
from zcomm_bench.spec import parse_size, sweep

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
NUM_WIRES = 4
KEPT = ("operation", "format", "dtype", "threads", "gbps", "of_read", "of_copy")

app = typer.Typer(help=(__doc__ or "").replace("\npython", "\n\npython"), rich_markup_mode=None, add_completion=False)


@dataclass
class Row:
    """One measured pass. `codec` is zcomm, or "memory" for the passes that bound the others."""

    codec: str
    operation: str
    format: str
    dtype: str
    isa: str
    threads: int
    values_bytes: int
    offset: int = 0  # of the values, in bytes past a multiple of 64
    gbps: float = 0.0  # median
    best_gbps: float = 0.0
    of_read: float = 0.0  # median speed over that of a read-only pass in the same run
    of_copy: float = 0.0


Pass = tuple[Row, Callable[[], object]]


CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}


def measure(passes: list[Pass], repeats: int, clock: Callable[[], float]) -> list[Row]:
    """Runs every pass once to warm buffers, then all of them in turn `repeats` times."""
    seconds: list[list[float]] = [[] for _ in passes]
    for repeat in range(repeats + 1):
        for (_, call), times in zip(passes, seconds, strict=True):
            start = clock()
            call()
            if repeat:
                times.append(clock() - start)
    rows = []
    for (row, _), times in zip(passes, seconds, strict=True):
        row.gbps = row.values_bytes / statistics.median(times) / 1e9
        row.best_gbps = row.values_bytes / min(times) / 1e9
        rows.append(row)
    speed = {row.operation: row.gbps for row in rows if row.codec == "memory"}
    for row in rows:
        row.of_read, row.of_copy = row.gbps / speed["read"], row.gbps / speed["copy"]
    return rows


def placed(values: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that begins `offset` bytes past a multiple of 64. torch's tensors and the collectives' wires begin at one,
    NumPy's arrays do not, and a slot of a larger tensor begins anywhere."""
    room = np.empty(values.nbytes + 64 + offset, np.uint8)
    first = -room.ctypes.data % 64 + offset
    copy = room[first : first + values.nbytes].view(values.dtype)
    copy[...] = values
    return copy


def memory_passes(values: np.ndarray, dtype: str) -> Iterator[Pass]:
    bits, out = values.view(f"i{values.itemsize}"), placed(values)
    yield Row("memory", "read", "", dtype, "", 1, values.nbytes), bits.max
    yield Row("memory", "copy", "", dtype, "", 1, values.nbytes), lambda: np.copyto(out, values)


def zcomm_passes(values: np.ndarray, dtype: str, format: str, isa: str, threads: int, offset: int) -> Iterator[Pass]:
    def row(operation: str) -> Row:
        return Row("zcomm", operation, format, dtype, isa, threads, values.nbytes, offset)

    wires = [placed(codec.encode(values, format)) for _ in range(NUM_WIRES)]
    out = placed(values, offset)
    target = placed(wires[0] if format != "exact" else codec.encode(values, "bf16"))
    sources = [(wire, format) for wire in wires]
    view, out_view = codec.view_of(values, "values"), codec.view_of(out, "out")
    raw = [(wire.ctypes.data, format, dtype, 1.0) for wire in wires]
    yield row("encode"), lambda: _core.encode(view, format, target.ctypes.data, isa)
    yield row("decode"), lambda: codec.decode(wires[0], format, out, isa=isa)
    yield row(f"decode_sum of {NUM_WIRES}"), lambda: codec.decode_sum(sources, out, factor=0.25, isa=isa)
    if format != "exact":
        operation = row(f"decode_sum_encode of {NUM_WIRES}")
        yield operation, lambda: _core.decode_sum_encode(raw, out_view[1], format, target.ctypes.data, isa)


def show(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("codec", "operation", "format", "isa", "threads"):
        table.add_column(column)
    for column in ("GB/s", "best", "of read", "of copy"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = [f"{row.gbps:.1f}", f"{row.best_gbps:.1f}", f"{row.of_read:.2f}", f"{row.of_copy:.2f}"]
        table.add_row(row.codec, row.operation, row.format, row.isa, str(row.threads), *numbers)
    console.print(table)


def keep(folder: Path, name: str, rows: list[Row], isas: list[str]) -> None:
    """A file for each instruction set."""
    for isa in isas:
        records = [asdict(row) for row in rows if row.isa == isa]
        one = results_file.measured(name, results_file.cpu_machine(isa), KEPT, records)
        results_file.keep(folder / f"codec-{isa}.jsonl", [one])


def choices(text: str, every: list[str], option: str) -> list[str]:
    chosen = every if text == "all" else text.split(",")
    for name in chosen:
        if name not in every:
            raise typer.BadParameter(f"expected some of {', '.join(every)}, or all, got '{name}'", param_hint=option)
    return chosen


@app.command()
def main(
    formats: Annotated[str, typer.Option("--format", help="Formats, comma-separated.")] = "int8:128,int4:128",
    dtype: Annotated[str, typer.Option(help="Types of the values, comma-separated, or all.")] = "float32",
    isa: Annotated[str, typer.Option(help="Instruction sets, comma-separated, or all; the fastest by default.")] = "",
    threads: Annotated[str, typer.Option(help="Numbers of threads, comma-separated.")] = "1",
    megabytes: Annotated[float, typer.Option(help="Size of the values.")] = 64,
    clock: Annotated[
        str, typer.Option(help="wall; or thread: CPU time of the calling thread, for one thread.")
    ] = "wall",
    offset: Annotated[
        int, typer.Option(min=0, max=60, help="Where values begin: bytes past a multiple of 64; a multiple of 4.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=0, help="15 by default, on cuda 25.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A folder that keeps the rows, such as bench/results.")] = None,
    kept_as: Annotated[str, typer.Option(help="cpu: the name of the rows that are kept.")] = "codec",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    minbytes: Annotated[str, typer.Option("-b", "--minbytes", help="cuda: smallest size of the values.")] = "1M",
    maxbytes: Annotated[str, typer.Option("-e", "--maxbytes", help="cuda: largest size.")] = "4G",
    stepfactor: Annotated[int, typer.Option("-f", "--stepfactor", help="cuda: from one size to the next.")] = 8,
    blocks: Annotated[
        str, typer.Option("--block", help="cuda: block sizes of int8 and int4, by commas, beside --format.")
    ] = "",
) -> None:
    choices(device, ["cpu", "cuda"], "--device")
    choices(clock, list(CLOCKS), "--clock")
    if clock == "thread" and threads != "1":
        raise typer.BadParameter(f"expected wall with --threads {threads}, got thread", param_hint="--clock")
    if offset % 4:
        raise typer.BadParameter(f"expected a multiple of 4, got {offset}", param_hint="--offset")
    dtypes = choices(dtype, list(DTYPES), "--dtype")
    if device == "cuda":
        from codec_cuda import run

        try:
            sizes = sweep(parse_size(minbytes), parse_size(maxbytes), stepfactor)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        of_blocks = [f"{kind}:{block}" for kind in ("int8", "int4") for block in blocks.split(",") if block]
        run(list(dict.fromkeys([*of_blocks, *formats.split(",")])), dtypes, sizes, repeats or 25, out)
        return
    repeats = repeats or 15
    every_isa = codec.cpu_isas()
    isas = choices(isa, every_isa, "--isa") if isa else every_isa[-1:]
    console = Console()
    console.width = max(console.width, 110)
    every: list[Row] = []
    for name in dtypes:
        size = int(megabytes * 1e6) // DTYPES[name].itemsize // 4096 * 4096
        values = placed(np.random.default_rng(0).standard_normal(size, np.float32).astype(DTYPES[name]), offset)
        for num_threads in map(int, threads.split(",")):
            _core.set_num_threads(num_threads)
            passes = list(memory_passes(values, name))
            for format in formats.split(","):
                for chosen in isas:
                    passes += zcomm_passes(values, name, format, chosen, num_threads, offset)
            rows = measure(passes, repeats, CLOCKS[clock])
            show(console, f"{name}, {values.nbytes / 1e6:.0f} MB, {num_threads} thread(s)", rows)
            every += rows
    if out is not None:
        keep(out, kept_as, every, isas)


if __name__ == "__main__":
    app()
