"""Sizes, rates, times and shapes of clusters as text: reads them and prints them."""

from __future__ import annotations

import re

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATES = {"bit": 1 / 8, "B/s": 1.0}


def parse_rate(text: str) -> float:
    """Bytes per second of "400gbit", "100mbit" or "25GB/s". Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)(bit|B/s)", text)
    if match is None:
        raise ValueError(f'expected a rate such as "100mbit" or "25GB/s", got {text!r}')
    rate = float(match[1]) * _PREFIXES[match[2].lower()] * _RATES[match[3]]
    if rate <= 0:
        raise ValueError(f"expected a rate above 0, got {text!r}")
    return rate


def parse_nodes(text: str) -> tuple[int, int]:
    """Nodes and ranks per node of "2x4". Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ValueError(f"nodes: expected NODESxRANKS such as '2x4', got {text!r}")
    return int(match[1]), int(match[2])


def size_text(num_bytes: float) -> str:
    """12 -> "12 B", 65536 -> "64 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def rate_text(rate: float) -> str:
    """3.125e9 -> "25 Gbit/s"."""
    return f"{rate * 8 / 1e9:.4g} Gbit/s"


def time_text(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{float(f'{seconds * factor:.3g}'):g} {unit}"
