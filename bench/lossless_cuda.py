"""Speed of the kernels of lossless differences, compared with device-to-device copies; see bench/lossless.py.

GB/s are of bfloat16 values. A copy moves as many bytes as its pass must read and write, and the report has the ratio of
the two medians. Encoding reads values and base, and writes base and message; decoding reads base and message, and
writes base. Before each pass the base is restored and the L2 cache is flushed (a read of 256 MiB), which does not
count; the GPU's own events tell the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from codec_cuda import Clock, Copier, Row, fill, machine_facts, make_report
from zcomm import _core
from zcomm_bench import gpu_clock
from zcomm_bench.lab import gpus
from zcomm_bench.planner.lossless import HEADER_BYTES

KEPT = ("learning_rate", "bits_per_weight", "operation", "values_bytes", "values_gbps", "of_copy")
GENERATION = 1  # of the base: any but 0


@dataclass
class DifferenceRow(Row):
    """One measured pass."""

    learning_rate: float = 0.0
    bits_per_weight: float = 0.0
    values_gbps: float = 0.0  # median


class Piece:
    """Weights before and after an update, and the jobs that encode and decode their difference."""

    def __init__(self, num_elements: int, rate: float, device: str) -> None:
        self._before, self.values = gpu_clock.changed_weights(num_elements, rate, device)
        self.base = self._before.clone()
        room = HEADER_BYTES + _core.max_lossless_bytes(num_elements)
        self._message = torch.empty(room, dtype=torch.uint8, device=device)
        self._hash, self._hash_before, self._num_bytes, self._status = (
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._place = (0, torch.cuda.current_stream().cuda_stream if device == "cuda" else 0)
        self._take_hash()
        _core.synchronize(self._place[1])
        message, hash = self._message.data_ptr(), self._hash.data_ptr()
        base = self._view(self.base)
        self._encode = (self._view(self.values), base, GENERATION, message, hash, self._num_bytes.data_ptr())
        self.restore()
        self.encode()
        _core.synchronize(self._place[1])
        self.message_bytes = int(self._num_bytes.item())
        self._decode = (message, self.message_bytes, base, GENERATION, hash, self._status.data_ptr())

    def _take_hash(self) -> None:
        """Of the base: encoding it as whole values that are not sent."""
        job = (self._view(self._before), self._view(self.base), 0, 0, self._hash_before.data_ptr(), 0)
        _core.encode_lossless_on_device([job], *self._place)

    @staticmethod
    def _view(values: torch.Tensor) -> tuple[int, int, str]:
        return values.data_ptr(), values.numel(), "bfloat16"

    def restore(self) -> None:
        """What both passes overwrite. A second encoding without it would find frozen weights."""
        self.base.copy_(self._before)
        self._hash.copy_(self._hash_before)

    def encode(self) -> None:
        _core.encode_lossless_on_device([self._encode], *self._place)

    def decode(self) -> None:
        _core.decode_lossless_on_device([self._decode], *self._place)

    def check(self) -> None:
        """After decoding."""
        status = int(self._status.item())
        if status != 0 or not torch.equal(self.base.view(torch.int16), self.values.view(torch.int16)):
            raise SystemExit(f"decoding gave other values than were encoded; status {status}")


def measure(piece: Piece, rate: float, copier: Copier, repeats: int, clock: Clock) -> list[DifferenceRow]:
    num_elements, num_bytes = piece.values.numel(), piece.values.nbytes
    bits = 8 * (piece.message_bytes - HEADER_BYTES) / num_elements

    def row(operation: str, moved: int) -> DifferenceRow:
        what = (operation, "lossless", "bfloat16", num_bytes, moved)
        return DifferenceRow(*what, learning_rate=rate, bits_per_weight=bits)

    encode = row("encode", 3 * num_bytes + piece.message_bytes)
    decode = row("decode", 2 * num_bytes + piece.message_bytes)
    copies = [copier(encode.moved_bytes), copier(decode.moved_bytes)]
    passes = [*copies, piece.restore, piece.encode, piece.restore, piece.decode]
    encode_copies, decode_copies, _, encodes, _, decodes = clock(passes, repeats)
    piece.check()
    for one, times, of_copy in ((encode, encodes, encode_copies), (decode, decodes, decode_copies)):
        fill(one, times, of_copy)
        one.values_gbps = num_bytes / one.median_us / 1e3
    return [encode, decode]


def show(console: Console, title: str, rows: Sequence[DifferenceRow]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("learning rate", "bits", "operation", "us", "GB/s", "of copy"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        numbers = [f"{row.median_us:.1f}", f"{row.values_gbps:.0f}", f"{row.of_copy:.2f}"]
        table.add_row(f"{row.learning_rate:g}", f"{row.bits_per_weight:.3f}", row.operation, *numbers)
    console.print(table)


def run(
    rates: Sequence[float],
    sizes: Sequence[int],
    repeats: int,
    out: Path | None,
    *,
    device: str = "cuda",
    clock: Clock = gpu_clock.seconds_of,
    facts: Callable[[], dict[str, Any]] = gpus.facts,
) -> dict[str, Any]:
    """Measures pieces of `sizes` bytes, prints tables, returns the report. `device` and `clock` are others in tests."""
    machine = machine_facts(repeats, facts)
    console, copier, rows = Console(highlight=False), Copier(device), list[DifferenceRow]()
    for size in sizes:
        of_size = [
            row for rate in rates for row in measure(Piece(size // 2, rate, device), rate, copier, repeats, clock)
        ]
        show(console, f"{size / 2**20:g} MiB of bfloat16, {machine['gpu']}", of_size)
        rows += of_size
    return make_report("lossless", machine, rows, KEPT, out)
