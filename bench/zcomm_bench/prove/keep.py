"""Adds a verified report to bench/results of a checkout, in a reduced form: medians, intervals and verdicts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from zcomm_bench.lab import gpus
from zcomm_bench.prove import report, verify

CLAIMS = ("claim", "verdict", "why")
CELLS = (
    "network",
    "collective",
    "bytes",
    "exact_us",
    "compressed_us",
    "auto_us",
    "speedup",
    "low",
    "high",
    "model_error",
)


def add(found: report.Report, by: str) -> Path:
    """Keep it; returns the file. Raises NotTrue as `verify.check`, and ValueError outside of a checkout with the
    sources that made the report."""
    verify.check(found)
    if any("other sources" in note for note in verify.sources(found)):
        raise ValueError("add: expected a checkout of the commit that made the report, got other sources")
    files = results_file()
    first = found["environment"]["ranks"][0]
    kind = gpus.chip(first["gpu"]) if "gpu" in first else first["isa"]
    machine = f"{first['gpu'].removeprefix('NVIDIA ')} ({first['cores']} cores)" if "gpu" in first else None
    machine = machine or f"{files.CPUS.get(kind, kind)} ({first['cores']} cores)"
    environment, link = found["environment"], found["link"]["bytes_per_second"]
    shape = f"{environment['nodes']}x{environment['ranks_per_node']}"
    facts = {
        "ranks": shape,
        "link_gbit": None if link is None else link * 8 / 1e9,
        "rehearsal": bool(found["rehearsal"]),
        "by": by,
        "date": first["time"][:10],
    }
    name = f"{shape}_{'unknown' if link is None else f'{link * 8 / 1e9:g}gbit'}"
    kept = [
        files.measured(f"claims_{name}", machine, CLAIMS, found["verdicts"], **facts),
        files.measured(f"calls_{name}", machine, CELLS, cells(found), **facts),
    ]
    path: Path = files.RESULTS / f"prove-{kind}.jsonl"
    files.keep(path, kept)
    return path


def cells(found: report.Report) -> list[dict[str, Any]]:
    rows = []
    for network in found["figures"]["networks"]:
        for cell in network["cells"]:
            times = {f"{way}_us": seconds * 1e6 for way, seconds in cell["seconds"].items()}
            ratio = {
                "speedup": cell["speedup"]["value"],
                "low": cell["speedup"]["low"],
                "high": cell["speedup"]["high"],
            }
            row = {"network": network["name"], "collective": cell["collective"], "bytes": cell["bytes"]}
            rows.append({**row, **times, **ratio, "model_error": cell["error"]["value"]})
    return rows


def results_file() -> Any:
    """The module of the checkout that this package lies in."""
    root = Path(__file__).parents[3]
    if not (root / "bench" / "results_file.py").exists():
        raise ValueError(f"add: expected zcomm_bench in a checkout (pip install -e ./bench), got it in {root}")
    sys.path.insert(0, str(root))
    return importlib.import_module("bench.results_file")
