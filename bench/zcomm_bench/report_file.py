"""The files that hold a report of the benchmark, and the machine that it comes from."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from zcomm._network import first_match, network_cards
from zcomm._version import __version__
from zcomm_bench import files
from zcomm_bench.spec import Spec

SCHEMA = "zcomm-bench/1"
DRAWN = {"backend", "format", "size", "busbw", "median_us", "min_us", "p90_us"}


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read a report. Raises ValueError if the file is something else."""
    report = files.read(path, f"a report of {SCHEMA}")
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ValueError(f"{path}: expected a report of {SCHEMA}, got another file")
    if missing := {"config", "note", "results"} - report.keys():
        raise ValueError(f"{path}: expected a report of {SCHEMA}, got none of {', '.join(sorted(missing))}")
    try:
        Spec(**report["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a report of {SCHEMA} of this release: {error}") from None
    for record in report["results"]:
        if missing := DRAWN - record.keys():
            raise ValueError(
                f"{path}: expected a report of this release, got results without {', '.join(sorted(missing))}"
            )
    return report


def machine() -> dict[str, Any]:
    """Where a report comes from."""
    return {
        "zcomm": __version__,
        "torch": _torch_version(),
        "python": platform.python_version(),
        "cpu": first_match("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "network_cards": network_cards(),
        "tcp_congestion_control": first_match("/proc/sys/net/ipv4/tcp_congestion_control", r"(\w+)"),
        "load_average": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _torch_version() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
