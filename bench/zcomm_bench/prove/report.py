"""The files of a report: report.json with all samples, report.md to read, and what the terminal shows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zcomm._units import rate_text, size_text, time_text
from zcomm_bench.prove import claims, figures

SCHEMA = "zcomm-prove/3"
REHEARSAL = "REHEARSAL"
WIDTH = 140  # of the table where there is no terminal to fit
Report = dict[str, Any]


def write(path: Path, content: Mapping[str, Any]) -> None:
    """To the disk, not only to the system's memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())


def judged(raw: Mapping[str, Any]) -> Report:
    """A whole report: raw samples, with all figures and verdicts that follow from them."""
    # As a reader of the file has them: tuples are lists, keys are texts.
    raw = json.loads(json.dumps(raw))
    found = figures.of(raw)
    verdicts = [vars(verdict) for verdict in claims.of(found, raw)]
    return {**raw, "figures": json.loads(json.dumps(found)), "verdicts": verdicts}


def passes(report: Mapping[str, Any]) -> bool:
    return all(row["verdict"] == claims.PASS for row in report["verdicts"])


def title(report: Mapping[str, Any]) -> str:
    facts = report["environment"]["ranks"][0]
    machine = facts.get("gpu") or f"{facts['cpu']} ({facts['isa']})"
    shape = f"{report['environment']['nodes']}x{report['environment']['ranks_per_node']} ranks on {machine}"
    return f"{REHEARSAL} ({report['rehearsal']}): {shape}" if report["rehearsal"] else shape


def verdict_text(report: Mapping[str, Any], row: Mapping[str, str]) -> str:
    return f"{row['verdict']}, {REHEARSAL}" if report["rehearsal"] else row["verdict"]


def show(report: Mapping[str, Any]) -> None:
    """The verdicts as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title(report), box=box.SIMPLE_HEAD)
    for name in ("claim", "verdict", "why"):
        table.add_column(name)
    for row in report["verdicts"]:
        table.add_row(row["claim"], verdict_text(report, row), row["why"])
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    console.print(table)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _range(interval: Mapping[str, float], form: str = "{:.2f}") -> str:
    value, low, high = (form.format(interval[name]) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _link(report: Mapping[str, Any]) -> str:
    should, predicted = report["link"]["bytes_per_second"], report["predictions"]
    text = "not known" if should is None else rate_text(should)
    return (
        f"The link should carry: {text} ({report['link']['source']}). The predictions rest on "
        f"{rate_text(predicted['link_bytes_per_second'])}, {predicted['link_is']}: {predicted['rests_on']}."
    )


def markdown(report: Mapping[str, Any]) -> str:
    """report.md."""
    found, facts = report["figures"], report["environment"]["ranks"][0]
    lines = [f"# {title(report)}", ""]
    lines += _table(
        ("claim", "verdict", "why"),
        [(row["claim"], verdict_text(report, row), row["why"]) for row in report["verdicts"]],
    )
    lines += [_link(report), ""]
    lines += [
        f"The model may be off by {claims.CALL_ERROR:.0%} in a call from 1 MiB on, by {claims.MEAN_ERROR:.0%} over "
        f"these on average, and by {claims.STEP_ERROR:.0%} in a step. Its predictions were written before that.",
        "",
        f"zcomm {facts['zcomm']}, torch {facts['torch']}, NCCL {facts['nccl']}, {facts['time']}; sources: zcomm "
        f"{facts['zcomm_sources'][:12]}, zcomm_bench {facts['zcomm_bench_sources'][:12]}.",
        "",
    ]
    for network in found["networks"]:
        lines += [f"## Calls, the network {network['name']}", "", *_cells(network)]
    lines += ["Seconds are medians of the slowest rank; intervals hold with 95 % confidence.", ""]
    if report.get("networks", {}).get("not_run"):
        lines += [f"Fewer network cards: not run: {report['networks']['not_run']}.", ""]
    return "\n".join([*lines, *_others(found)])


def _cells(network: Mapping[str, Any]) -> list[str]:
    rows = []
    for cell in network["cells"]:
        times = [time_text(cell["seconds"][way]) for way in ("exact", "compressed", "auto")]
        ratios = [_range(cell["speedup"]), f"{cell['byte_ratio']:.2f}", _range(cell["auto_over_exact"], "{:.3f}")]
        slow, error = "yes" if cell["slow_link"] else "no", f"{cell['error']['value']:+.0%}"
        rows.append([cell["collective"], size_text(cell["bytes"]), *times, *ratios, slow, error])
    header = (
        "call",
        "size",
        "exact",
        "compressed",
        "auto",
        "speed-up",
        "of bytes",
        "auto over exact",
        "slow link",
        "model",
    )
    return _table(header, rows)


def _others(found: Mapping[str, Any]) -> list[str]:
    lines = []
    if found.get("steps"):
        lines += ["## Training steps", "", *_steps(found["steps"])]
    if found.get("beside"):
        lines += ["## Beside matrix multiplications", "", *_beside(found["beside"])]
    if found.get("noise"):
        rows = [[claims.cell_text(row), _range(row["ratio"], "{:.3f}")] for row in found["noise"]]
        lines += ["## Noise: exact over exact", "", *_table(("call", "ratio"), rows)]
    return lines


def _steps(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            f"width {row['model']['width']}, {row['model']['layers']} layers",
            *(time_text(row["seconds"][way]) for way in ("exact", "compressed")),
            _range(row["over_exact"]),
            f"{row['loss']['exact']:.4f} / {row['loss']['compressed']:.4f}",
            f"{row['error']['value']:+.0%}",
        ]
        for row in found
    ]
    header = ("trained", "exact", "compressed", "over exact", "losses, exact / compressed", "model")
    return _table(header, rows)


def _beside(found: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [f"{row['collective']}, {way}", *(_range(row[way][name]) for name in ("product", "call"))]
        for row in found
        for way in ("exact", "compressed")
    ]
    header = ("call beside matrix multiplications", "these take, times as long", "the call takes, times as long")
    return _table(header, rows)
