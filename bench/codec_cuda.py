"""Speed of the codec's kernels, each beside a device-to-device copy that moves as many bytes; see bench/codec.py.

GB/s count the bytes that a pass must read and write. A pass and its copy take turns, the L2 cache is flushed before
each (a write of 256 MiB), and the GPU's own events tell the time. `of copy` is the median of the copy over that of the
pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import results_file
from zcomm import _core, codec
from zcomm_bench import gpu_clock, report_file
from zcomm_bench.lab import gpus

KEPT = ("operation", "format", "dtype", "values_bytes", "gbps", "of_copy")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NUM_WIRES = 4
LEAST_REPEATS = 20
GRANULE = 4096 * 3  # elements; the sizes are whole blocks of most sizes


@dataclass
class Row:
    """One measured pass."""

    operation: str
    format: str
    dtype: str
    values_bytes: int
    moved_bytes: int  # read and written
    median_us: float = 0.0
    gbps: float = 0.0  # of moved bytes, median
    copy_gbps: float = 0.0  # of a copy that moves as many, turn by turn in the same run
    of_copy: float = 0.0


Pass = tuple[Row, Callable[[], object]]
Times = list[float]
Clock = Callable[[Sequence[Callable[[], Any]], int], list[Times]]


def fill(row: Row, times: Times, copies: Times) -> Row:
    """The figures of a row, from its seconds and those of its copy."""
    median, copy = statistics.median(times), statistics.median(copies)
    row.median_us = median * 1e6
    row.gbps, row.copy_gbps = row.moved_bytes / median / 1e9, row.moved_bytes / copy / 1e9
    row.of_copy = copy / median
    return row


class Copier:
    """Copies that move a given number of bytes, half read and half written."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._source = self._target = torch.empty(0, dtype=torch.uint8, device=device)

    def __call__(self, moved_bytes: int) -> Callable[[], object]:
        half = moved_bytes // 2
        if half > self._source.numel():
            self._source = self._target = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._source = torch.ones(half, dtype=torch.uint8, device=self._device)
            self._target = torch.ones(half, dtype=torch.uint8, device=self._device)
        source, target = self._source[:half], self._target[:half]
        return lambda: target.copy_(source)


def measure(passes: Iterator[Pass], copier: Copier, repeats: int, clock: Clock) -> Iterator[Row]:
    for row, call in passes:
        times, copies = clock([call, copier(row.moved_bytes)], repeats)
        yield fill(row, times, copies)


def machine_facts(repeats: int, facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a report says of this machine, if it has a GPU and the repeats are enough for one."""
    if repeats < LEAST_REPEATS:
        raise typer.BadParameter(f"expected at least {LEAST_REPEATS} on a GPU, got {repeats}", param_hint="--repeats")
    try:
        return {**report_file.machine(), **facts()}
    except gpus.NoGpu as error:
        raise SystemExit(str(error)) from None


def make_report(
    subject: str,
    machine: dict[str, Any],
    rows: Sequence[Row],
    columns: Sequence[str],
    out: Path | None,
    least_bytes: int = 0,
) -> dict[str, Any]:
    """The report of a run. A folder, if one is given, keeps its columns of rows with as many bytes of values."""
    records = [asdict(row) for row in rows]
    if out is not None:
        kept = [record for record in records if record["values_bytes"] >= least_bytes]
        one = results_file.measured(subject, results_file.gpu_machine(machine["gpu"]), columns, kept)
        results_file.keep(out / f"{subject}-{gpus.chip(machine['gpu'])}.jsonl", [one])
    return {"machine": machine, "results": records}


def zcomm_passes(values: torch.Tensor, dtype: str, format: str) -> Iterator[Pass]:
    """The four operations, by the calls of the core: what Python adds to a call is not the kernel's."""
    num, num_bytes = values.numel(), values.nbytes
    device, stream = (-1, 0) if values.device.type == "cpu" else (0, torch.cuda.current_stream().cuda_stream)
    place = ("", device, stream)
    wire_bytes = codec.wire_bytes(format, dtype, num)
    wires = [torch.empty(wire_bytes, dtype=torch.uint8, device=values.device) for _ in range(NUM_WIRES)]
    for wire in wires:
        codec.encode(values, format, out=wire)
    out, target = torch.empty_like(values), torch.empty_like(wires[0])
    view, out_view = (values.data_ptr(), num, dtype), (out.data_ptr(), num, dtype)
    raw = [(wire.data_ptr(), format, dtype, 1.0) for wire in wires]

    def row(operation: str, moved: int) -> Row:
        return Row(operation, format, dtype, num_bytes, moved)

    keep = (wires, out, target)  # until the last pass is measured
    yield row("encode", num_bytes + wire_bytes), lambda: _core.encode(view, format, target.data_ptr(), *place)
    yield row("decode", num_bytes + wire_bytes), lambda: _core.decode(raw[0][:3], out_view, *place)
    moved = NUM_WIRES * wire_bytes + num_bytes
    yield row(f"decode_sum of {NUM_WIRES}", moved), lambda: _core.decode_sum(raw, 0.25, out_view, *place)
    moved = (NUM_WIRES + 1) * wire_bytes
    yield (
        row(f"decode_sum_encode of {NUM_WIRES}", moved),
        lambda: _core.decode_sum_encode(raw, num, format, target.data_ptr(), *place),
    )
    del keep


def show(console: Console, title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("operation", "format", "dtype"):
        table.add_column(column)
    for column in ("MiB", "us", "GB/s", "copy GB/s", "of copy"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = [f"{row.values_bytes / 2**20:.1f}", f"{row.median_us:.1f}", f"{row.gbps:.0f}", f"{row.copy_gbps:.0f}"]
        table.add_row(row.operation, row.format, row.dtype, *numbers, f"{row.of_copy:.2f}")
    console.print(table)


def run(
    formats: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sequence[int],
    repeats: int,
    out: Path | None,
    *,
    device: str = "cuda",
    clock: Clock = gpu_clock.seconds_of,
    facts: Callable[[], dict[str, Any]] = gpus.facts,
) -> dict[str, Any]:
    """Measures, prints tables and returns the report. `device` and `clock` are others in tests."""
    machine = machine_facts(repeats, facts)
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    copier, rows = Copier(device), list[Row]()
    for dtype in dtypes:
        for size in sizes:
            values = torch.empty(max(1, size // DTYPES[dtype].itemsize // GRANULE) * GRANULE, dtype=DTYPES[dtype])
            values = values.to(device).normal_()
            for format in formats:
                rows += measure(zcomm_passes(values, dtype, format), copier, repeats, clock)
            of_this = [row for row in rows if row.dtype == dtype and row.values_bytes == values.nbytes]
            show(console, f"{dtype}, {values.nbytes / 2**20:.0f} MiB, {machine['gpu']}", of_this)
            del values
    largest = max(sizes) - GRANULE * 4  # less what is cut off for whole granules
    return make_report("codec", machine, rows, KEPT, out, largest)
