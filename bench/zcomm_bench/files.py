"""The one reader of files that others have written: JSON and YAML of bounded size, depth and whole numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = {"JSON": 64 << 20, "YAML": 1 << 20}
MOST_DEPTH = 50
LARGEST = 2**63
_TOO_DEEP = f"depth: expected at most {MOST_DEPTH} levels, got more"


def read(path: Path, what: str, kind: str = "JSON") -> Any:
    """Return what is in the file. ``what`` was expected there, for errors.

    Raises ValueError for a file that is no ``kind``, cannot be read, or is beyond the bounds above."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES[kind] + 1)
        if len(text) > MOST_BYTES[kind]:
            raise ValueError(f"size: expected at most {MOST_BYTES[kind] >> 20} MiB, got more")
        found = yaml.safe_load(text) if kind == "YAML" else json.loads(text)
        _check(found)
    except RecursionError:
        raise ValueError(f"{path}: expected {what}: {_TOO_DEEP}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: expected {what}: {error}") from None
    return found


def _check(found: Any) -> None:
    """Raise ValueError for values that are too deep, and for whole numbers that are too large."""
    level, seen = [found], set[int]()
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict | list) and id(value) not in seen:  # aliases of YAML share values
                seen.add(id(value))
                inner += value.values() if isinstance(value, dict) else value
            elif isinstance(value, int) and abs(value) > LARGEST:
                raise ValueError("numbers: expected at most 2^63, got more")
        level = inner
    if level:
        raise ValueError(_TOO_DEEP)
