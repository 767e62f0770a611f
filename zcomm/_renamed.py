"""Attributes that have another name since a release: the old one works for one more, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)

#: Of counters that several classes have.
NODE_BYTES = {"inside_bytes": "intra_node_bytes", "between_bytes": "inter_node_bytes"}


def renamed(old_to_new: dict[str, str]) -> Callable[[_Class], _Class]:
    """A class decorator: an old name reads the attribute of the new one, with a DeprecationWarning."""

    def decorate(cls: _Class) -> _Class:
        for old, new in old_to_new.items():
            setattr(cls, old, property(_reader(cls.__name__, old, new)))
        return cls

    return decorate


def _reader(owner: str, old: str, new: str) -> Callable[[Any], Any]:
    def read(self: Any) -> Any:
        warnings.warn(f"{owner}.{old} is now {owner}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return read
