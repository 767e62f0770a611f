"""Network cards of this host, as Linux lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SYSTEM = Path("/sys/class")

_MOST_MBIT = 10**7  # Some drivers say 2^32 - 1 for "unknown".


def network_cards() -> list[dict[str, Any]]:
    """The network cards that are up: their names, and bits per second, or None where a card does not tell. Those of
    InfiniBand by port; virtual interfaces do not count."""
    return [*_ethernet(SYSTEM / "net"), *_infiniband(SYSTEM / "infiniband")]


def network_rate() -> float | None:
    """Bytes per second of this host's cards together, one direction; None if no card tells."""
    # Takes the larger sum, because Ethernet cards with RDMA are in both folders.
    kinds = _ethernet(SYSTEM / "net"), _infiniband(SYSTEM / "infiniband")
    return max(sum(card["bits_per_second"] or 0 for card in cards) for cards in kinds) / 8 or None


def first_match(path: str | Path, pattern: str) -> str | None:
    """Return the first group of ``pattern`` in a file; None if there is neither."""
    try:
        match = re.search(pattern, Path(path).read_text())
    except (OSError, ValueError):  # or no text
        return None
    return match[1].strip() if match else None


def _ethernet(folder: Path) -> Iterator[dict[str, Any]]:
    for card in sorted(folder.glob("*")):
        # Type 1 is Ethernet: InfiniBand's cards have an interface for IP as well.
        if not os.path.exists(card / "device") or first_match(card / "type", r"(.*)") != "1":
            continue
        if first_match(card / "operstate", r"(\w+)") != "up":
            continue
        speed = int(first_match(card / "speed", r"^(\d{1,10})$") or 0)
        yield {"name": card.name, "bits_per_second": speed * 10**6 if 0 < speed < _MOST_MBIT else None}


def _infiniband(folder: Path) -> Iterator[dict[str, Any]]:
    for port in sorted(folder.glob("*/ports/*")):
        if "ACTIVE" not in (first_match(port / "state", r"(.*)") or ""):
            continue
        rate = first_match(port / "rate", r"^(\d{1,5}(?:\.\d+)?) Gb/sec")
        name = f"{port.parents[1].name}:{port.name}"
        yield {"name": name, "bits_per_second": int(float(rate) * 1e9) or None if rate else None}
