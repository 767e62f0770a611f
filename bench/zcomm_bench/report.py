"""How the benchmark's reports look: tables while it runs, and plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zcomm._units import parse_nodes, size_text
from zcomm_bench.spec import Spec

WIDTH = 176  # columns of the table where there is no terminal to fit

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table: where its value is in a record, and how that reads."""

    title: str
    name: str
    form: str
    unit: float | None = None

    def text(self, record: Record) -> str:
        value = record[self.name]
        if value is None:
            return "-"
        return self.form.format(value if self.unit is None else value / self.unit)


# Those of nccl-tests, then what compression adds. GB are 1e9 bytes.
COLUMNS = (
    Column("size(B)", "size", "{:d}"),
    Column("count", "count", "{:d}"),
    Column("type", "type", "{}"),
    Column("redop", "redop", "{}"),
    Column("backend", "backend", "{}"),
    Column("time(us)", "median_us", "{:.1f}"),
    Column("min", "min_us", "{:.1f}"),
    Column("p90", "p90_us", "{:.1f}"),
    Column("algbw", "algbw", "{:.4f}"),
    Column("busbw(GB/s)", "busbw", "{:.4f}"),
    Column("speed-up", "speedup", "{:.2f}x"),
    Column("wire(B)", "wire_bytes", "{:.0f}"),
    Column("ratio", "ratio", "{:.2f}"),
    Column("codec(us)", "codec_us", "{:.0f}"),
    Column("busy", "link_busy", "{:.0f}%", 0.01),
    Column("max err", "max_error", "{:.1e}"),
    Column("mean err", "mean_error", "{:.1e}"),
)
LEGEND = (
    "time: median of the samples, per call. speed-up: over the first backend, turn by turn. wire: payload sent by "
    "a rank on average; ratio: what an exact collective must send, over that. busy: share of the link's rate that its "
    "interface counted; a burst can exceed it. errors: from the float64 result, relative to its root mean square."
)


def table(records: Sequence[Record], title: str) -> Table:
    """All records, one row each, sizes apart."""
    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        left = column.form == "{}"
        made.add_column(column.title, justify="left" if left else "right", no_wrap=True)
    for index, record in enumerate(records):
        last = index + 1 == len(records) or records[index + 1]["size"] != record["size"]
        cells = [column.text(record) for column in COLUMNS]
        made.add_row(*cells, end_section=last, style="dim" if record["exact_reason"] else None)
    return made


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader of the table should know: formats, and what was not compressed and why."""
    formats = {record["backend"]: record["format"] for record in records if record["format"] != "exact"}
    lines = [f"{backend}: {format}" for backend, format in formats.items()]
    kept: dict[tuple[str, str], list[int]] = {}
    for record in records:
        if record["exact_reason"]:
            kept.setdefault((record["backend"], record["exact_reason"]), []).append(record["size"])
    lines += [
        f"{backend}: exact up to {max(sizes)} bytes (reason: {reason})" for (backend, reason), sizes in kept.items()
    ]
    return lines


class LiveTable:
    """A table that grows as sizes complete; without a terminal, lines of progress and the table at the end."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=WIDTH)
        self._progress = Console(highlight=False, stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, records: Sequence[Record], progress: str) -> None:
        if self._console.is_terminal:
            self._live.update(Group(table(records, self._title), Text(progress)), refresh=True)
        else:
            self._progress.print(f"{self._title}: {progress}")

    def finish(self, report: Record) -> None:
        """Show the whole report."""
        whole = Group(
            table(report["results"], self._title),
            *(Text(line) for line in notes(report["results"])),
            *([Text(f"warning: {report['note']}", style="bold yellow")] if report["note"] else []),
            Text(LEGEND, style="dim"),
        )
        if self._console.is_terminal:
            self._live.update(whole, refresh=True)
        else:
            self._console.print(whole)


def show_overhead(results: Sequence[Record]) -> None:
    """The figures of zcomm_bench.run.measure_overhead."""
    made = Table(
        title="processor time of a caller, exact calls of one element in a group of one rank", box=box.SIMPLE_HEAD
    )
    for title in ("call", "gloo(us)", "zcomm(us)", "added(us)"):
        made.add_column(title, justify="left" if title == "call" else "right")
    for result in results:
        made.add_row(result["call"], *(f"{result[name]:.2f}" for name in ("gloo_us", "zcomm_us", "added_us")))
    Console(highlight=False).print(made)


def plot(reports: Mapping[str, Record], path: Path) -> None:
    """Bandwidth and time against message size, one line per backend; `reports` by the name that a legend shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bandwidth, latency) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    sizes: set[int] = set()
    for number, (name, report) in enumerate(reports.items()):
        for backend in dict.fromkeys(record["backend"] for record in report["results"]):
            rows = sorted(
                (record for record in report["results"] if record["backend"] == backend), key=lambda row: row["size"]
            )
            x = [row["size"] for row in rows]
            sizes.update(x)
            style: dict[str, Any] = {"marker": "osD^v"[number % 5], "linestyle": ("-", "--", ":")[number % 3]}
            style |= {"markersize": 4, "label": _label(backend, rows, name if len(reports) > 1 else "")}
            bandwidth.plot(x, [row["busbw"] for row in rows], **style)
            (line,) = latency.plot(x, [row["median_us"] for row in rows], **style)
            low, high = [row["min_us"] for row in rows], [row["p90_us"] for row in rows]
            latency.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    limits = {_limit(report) for report in reports.values()}
    if len(limits) == 1 and (limit := limits.pop()) is not None:
        bandwidth.axhline(limit, color="gray", linewidth=1, linestyle=(0, (1, 2)), label="the link, uncompressed")
    bandwidth.set(ylabel="bus bandwidth (GB/s of uncompressed values)")
    latency.set(ylabel="time per call (us): median, and minimum to p90")
    for axes in (bandwidth, latency):
        axes.set(xscale="log", yscale="log", xlabel="message size")
        axes.set_xticks(ticks := _ticks(sorted(sizes)), [size_text(size) for size in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("\n".join(dict.fromkeys(_spec(report).title for report in reports.values())), fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _label(backend: str, rows: Sequence[Record], name: str) -> str:
    format = rows[-1]["format"]
    compressed = "" if format == "exact" or "=" in backend else f" {format}"
    return f"{name}: {backend}{compressed}" if name else f"{backend}{compressed}"


def _spec(report: Record) -> Spec:
    return Spec(**report["config"])


def _limit(report: Record) -> float | None:
    """GB/s of a link, which bounds the bus bandwidth of exact collectives where every rank has one of its own."""
    spec = _spec(report)
    if spec.link_rate is None or report["note"] or parse_nodes(spec.nodes)[1] > 1:
        return None
    return spec.link_rate / 1e9


def _ticks(sizes: list[int]) -> list[int]:
    step = max(1, -(-len(sizes) // 9))
    return sizes[::-1][::step][::-1]
