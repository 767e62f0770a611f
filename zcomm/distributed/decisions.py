"""Table of decisions for ``compress="auto"``, named by the option ``decisions``: times of rehearsals that
``python -m zcomm_bench measure`` has made on this cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zcomm._network import network_cards

SCHEMA = "zcomm-measure/2"
KIND = ("ranks", "device", "collective", "dtype", "format", "again")
_SECONDS = ("exact_seconds", "compressed_seconds", "one_hop_seconds")


def load(path: Path) -> dict[str, Any]:
    """Read the file that ``python -m zcomm_bench measure`` wrote. Raises ValueError for any other file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a file of 'python -m zcomm_bench measure': {error}") from None
    found = content.get("schema") if isinstance(content, dict) else type(content).__name__
    if found != SCHEMA:
        raise ValueError(f"{path}: expected the schema {SCHEMA!r}, got {found!r}")
    return dict(content)


def machine(device: str) -> dict[str, Any]:
    """Return the rates of this host's network cards, in bits per second, and its GPU: times depend on them."""
    found: dict[str, Any] = {
        "network_cards": sorted(card["bits_per_second"] or 0 for card in network_cards()),
        "gpu": None,
    }
    if device == "cuda":
        import torch  # planning reads tables without it

        found["gpu"] = torch.cuda.get_device_name()
    return found


class Table:
    """Rows of a file: the seconds of each way, by kind of calls and size rounded down to a power of two."""

    def __init__(self, path: str) -> None:
        try:
            content = load(Path(path))
            rows, self._machine = content["decisions"], dict(content["machine"])
            self._seconds: dict[tuple[Any, ...], dict[int, tuple[float, ...]]] = {}
            for row in rows:
                times = self._seconds.setdefault(tuple(row[name] for name in KIND), {})
                times[row["least_bytes"]] = tuple(row[name] for name in _SECONDS)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"decisions: {path}: expected a machine and rows of a table of decisions, got others: {error}"
            ) from None
        except ValueError as error:
            raise ValueError(f"decisions: {error}") from None

    def differences(self, device: str) -> str:
        """Return how this machine differs from the one that the file was measured on; empty if it does not."""
        here, there = machine(device), self._machine
        return ", ".join(
            f"{name} {there.get(name)} (here {here[name]})" for name in here if there.get(name) != here[name]
        )

    def seconds_of(self, kind: tuple[Any, ...], num_bytes: int) -> tuple[float, ...] | None:
        """Return the seconds of an exact call, a compressed one, and one in one hop (0: not another way); None if the
        table lacks such calls. ``kind`` is as :data:`KIND`. The largest size stands for larger ones."""
        times = self._seconds.get(kind, {})
        least_bytes = 1 << (num_bytes.bit_length() - 1)
        largest = max(times, default=least_bytes)
        scale = max(1.0, least_bytes / largest)
        found = times.get(min(least_bytes, largest))
        return None if found is None else tuple(scale * seconds for seconds in found)
