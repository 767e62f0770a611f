"""Warnings about one parameter group of FSDP2, each of which is logged once."""

from __future__ import annotations

import logging

from zcomm.distributed.binding import _c10d

_log = logging.getLogger("zcomm")


class Notices:
    """``name``: of the parameter group, with which warnings and errors begin."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._told: set[str] = set()  # what warnings were about

    def has_told(self, about: str) -> bool:
        return about in self._told

    def tell(self, about: str, what: str) -> None:
        """Log that the group does ``what``, unless it is told already."""
        if about not in self._told:
            self._told.add(about)
            _log.warning("%s %s", self.name, what)

    def tell_exact(self, about: str, what: str, backend: _c10d.ProcessGroup) -> None:
        """Tell why calls of this kind stay exact; raise RuntimeError where that is forbidden."""
        if backend.is_strict:
            raise RuntimeError(f"strict=True, but a call would be sent uncompressed: {self.name} {what}")
        self.tell(about, f"{what}: left exact")
