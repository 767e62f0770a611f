"""The files that hold a report of the benchmark, and the machine that it comes from."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zcomm._version import __version__

SCHEMA = "zcomm-bench/1"


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read a report. Raises ValueError if the file is something else."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a report of this benchmark ({SCHEMA})")
    return report


def machine() -> dict[str, Any]:
    """Where a report comes from."""
    return {
        "zcomm": __version__,
        "torch": _torch_version(),
        "python": platform.python_version(),
        "cpu": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "network_cards": network_cards(),
        "tcp_congestion_control": _first_match("/proc/sys/net/ipv4/tcp_congestion_control", r"(\w+)"),
        "load_average": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def network_cards(system: Path = Path("/sys/class")) -> list[dict[str, Any]]:
    """The network cards of this host that are up: their names, and bits per second, or None where a card does not tell.
    Those of InfiniBand by port; virtual interfaces do not count."""
    return [*_ethernet(system / "net"), *_infiniband(system / "infiniband")]


def _ethernet(folder: Path) -> Iterator[dict[str, Any]]:
    for card in sorted(folder.glob("*")):
        # Type 1 is Ethernet: InfiniBand's cards have an interface for IP as well.
        if not (card / "device").exists() or _first_match(card / "type", r"(.*)") != "1":
            continue
        if _first_match(card / "operstate", r"(\w+)") != "up":
            continue
        speed = _first_match(card / "speed", r"^(\d+)")
        yield {"name": card.name, "bits_per_second": int(speed) * 10**6 if speed else None}


def _infiniband(folder: Path) -> Iterator[dict[str, Any]]:
    for port in sorted(folder.glob("*/ports/*")):
        if "ACTIVE" not in (_first_match(port / "state", r"(.*)") or ""):
            continue
        rate = _first_match(port / "rate", r"([\d.]+) Gb/sec")
        name = f"{port.parents[1].name}:{port.name}"
        yield {"name": name, "bits_per_second": int(float(rate) * 1e9) if rate else None}


def _torch_version() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_match(path: str | Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return match[1].strip() if match else None
