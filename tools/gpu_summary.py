"""What ``make gpu`` prints at its end: the figures of all reports, and how the stages ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def codec_lines(measurement: Any) -> list[str]:
    """The largest size of every dtype and operation: the slowest and the fastest block, as parts of a copy."""
    rows = measurement.records
    lines = [f"{'dtype':9} {'operation':24} {'format':5} {'MiB':>6} {'GB/s':>12} {'of a copy':>12}"]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        largest = max(row["values_bytes"] for row in rows if row["dtype"] == dtype)
        here = [row for row in rows if row["dtype"] == dtype and row["values_bytes"] == largest]
        for operation in dict.fromkeys(row["operation"] for row in here):
            for kind in dict.fromkeys(row["format"].partition(":")[0] for row in here):
                these = [row for row in here if row["operation"] == operation and row["format"].startswith(kind)]
                speeds, parts = [row["gbps"] for row in these], [row["of_copy"] for row in these]
                of = f"{min(parts):.2f} to {max(parts):.2f}"
                gbps = f"{min(speeds):.0f} to {max(speeds):.0f}"
                lines.append(f"{dtype:9} {operation:24} {kind:5} {largest >> 20:6d} {gbps:>12} {of:>12}")
    return lines


def lossless_lines(measurement: Any) -> list[str]:
    """The largest piece at every learning rate."""
    rows = measurement.records
    largest = max(row["values_bytes"] for row in rows)
    lines = [f"{'learning rate':13} {'bits':>6} {'operation':9} {'MiB':>6} {'GB/s':>6} {'of a copy':>9}"]
    return lines + [
        f"{row['learning_rate']:<13g} {row['bits_per_weight']:>6.3f} {row['operation']:9} {largest >> 20:6d} "
        f"{row['values_gbps']:>6.0f} {row['of_copy']:>9.2f}"
        for row in rows
        if row["values_bytes"] == largest
    ]


def collective_lines(measurement: Any) -> list[str]:
    """The largest sizes, with the speed-up over the first backend."""
    lines = [measurement.name]
    sizes = sorted({row["size"] for row in measurement.records})[-3:]
    for row in measurement.records:
        if row["size"] in sizes:
            lines.append(
                f"  {row['size']:>12} B {row['backend']:17} {row['median_us']:>12.0f} us {row['speedup']:>6.2f}x"
            )
    return lines


def training_lines(measurement: Any) -> list[str]:
    """Steps by how weights are sent, with the speed-up over the first way."""
    text = "training step, {nodes} ranks, links of {rate}, {parameters} parameters"
    seconds = {row["way"]: row["seconds"] for row in measurement.records}
    first = next(iter(seconds.values()))
    rows = [f"  {way:14} {own:8.4f} s {first / own:6.2f}x" for way, own in seconds.items()]
    return [text.format(**measurement.facts), *rows]


def plain_lines(measurement: Any) -> list[str]:
    """Every row, as it is kept."""
    return [measurement.name, "  " + ", ".join(measurement.columns), *(f"  {row}" for row in measurement.rows)]


LINES = {
    "codec": codec_lines,
    "lossless": lossless_lines,
    "training_step": training_lines,
    "collectives": collective_lines,
}


def text_of(
    endings: Sequence[Any], facts: Mapping[str, Any], reports: Sequence[Path], read: Callable[[Path], Any]
) -> str:
    """``endings`` of the stages; ``read``: that of bench/results_file.py."""
    lines = [f"{facts['gpu']}, torch {facts['torch']}", ""]
    for path in reports:
        try:
            for measurement in read(path):
                lines += [*LINES.get(path.stem.partition("-")[0], plain_lines)(measurement), ""]
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines += [f"{path.name}: not readable: {type(error).__name__}: {error}", ""]
    lines += [f"{'stage':14} {'seconds':>8} {'expected':>8}  ending"]
    for ending in endings:
        expected = "" if ending.expected is None else f"{ending.expected:.0f}"
        lines += [f"{ending.name:14} {ending.seconds:8.0f} {expected:>8}  {ending.how}"]
    return "\n".join(lines) + "\n"
