"""Numbers of files that others have written, checked as they are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from zcomm.distributed.decisions import load
from zcomm_bench import files

LINK = ("bytes_per_second", "hop_seconds", "exchange_seconds")
OPTIONAL = ("codec_bytes_per_second", "lossless_bytes_per_second", "exact_reduce_factor")


def positive(name: str, value: Any, *, whole: bool = False) -> Any:
    """Return `value`. Raises ValueError where it is no number above 0, or not a whole one."""
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a {'whole ' * whole}number above 0, got {value!r}")
    return value


def calibration(path: Path) -> dict[str, Any]:
    """Read what ``python -m zcomm_bench measure`` wrote. Raises ValueError for a file that lacks a shape or a link."""
    files.read(path, "a calibration")
    found = load(path)
    for link, members in (("intra", "ranks_per_node"), ("inter", "nodes")):
        if positive(members, found.get(members), whole=True) == 1 and link not in found:
            continue
        if not isinstance(found.get(link), dict):
            raise ValueError(f"{link}: expected a measured link, got {found.get(link)!r}")
        for name in LINK:
            positive(f"{link}.{name}", found[link].get(name))
    for name in OPTIONAL:
        if name in found:
            positive(name, found[name])
    return found
