"""What replays of CUDA graphs use: it must stay where it is."""

from __future__ import annotations

from typing import Any

_USED: dict[int, Any] = {}


def keep_for_replays(used: Any) -> None:
    """Keep ``used`` for good, because nothing reports the end of a graph."""
    _USED[id(used)] = used
