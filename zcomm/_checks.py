"""Checks of arguments' types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_types(given: Mapping[str, Any], **expected: Any) -> None:
    """Raise TypeError unless each argument of ``expected`` has its type there, or one of a union. A bool is no int."""
    for name, kind in expected.items():
        value = given[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in getattr(kind, "__args__", [kind])):
            shown = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
            raise TypeError(f"{name}: expected {kind.__name__ if isinstance(kind, type) else kind}, got {shown}")
