"""The meeting point of sites that come and go: it tells them who is there. ``python -m zcomm meet`` serves one.

Sites and the point tell each other by the keys of a TCPStore:

=====================  ========  ========================================================================
``sites``              counter   of registrations
``site N``             a site    its handle, and the terms on which it trains: JSON
``beat N``             a site    another text every second
``left N``             a site    it ends
``refused N``          point     why the site cannot take part
``present``            point     the number of this membership, and the handles of its sites: JSON
``failed NUMBER``      a site    the calls of a membership have failed: all meet anew, once each has beaten again
``ended NUMBER``       counter   of the sites of a membership that have ended their training
=====================  ========  ========================================================================
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore

_log = logging.getLogger("zcomm")

PATIENCE = 5.0  # seconds without a beat, after which a site is gone
_PAUSE = 0.1


@dataclass
class _Site:
    number: int
    handle: str
    terms: str
    beat: bytes = b""
    seen: float = 0.0  # when it has last beaten


class MeetingPoint:
    """Tells sites who is present. ``port``: 0 takes a free one. ``least``: sites before the training begins."""

    def __init__(self, port: int, least: int = 1, patience: float = PATIENCE) -> None:
        self._store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port
        self._least, self._patience = least, patience
        self._sites: list[_Site] = []  # present, the oldest first
        self._known = 0  # registrations
        self._number = 0  # of the last membership that was told
        self._told: list[str] = []  # its handles
        self._failed_at: float | None = None  # when its calls failed, as far as is known

    def serve(self) -> NoReturn:
        """Serve for ever."""
        while True:
            self.poll()
            time.sleep(_PAUSE)

    def poll(self) -> None:
        """Read what sites have written, and tell a new membership if there is one."""
        now = time.monotonic()
        for number in range(self._known + 1, self._store.add("sites", 0) + 1):
            if not self._store.check([f"site {number}"]):
                break  # it is about to write
            self._known = number
            self._admit(number, now)
        for site in self._sites:
            beat = self._store.get(f"beat {site.number}") if self._store.check([f"beat {site.number}"]) else b""
            if beat != site.beat:
                site.beat, site.seen = beat, now
        self._sites = [site for site in self._sites if not self._is_gone(site, now)]
        if self._failed_at is None and self._store.check([f"failed {self._number}"]):
            self._failed_at = now
        has_failed = self._failed_at is not None and all(site.seen > self._failed_at for site in self._sites)
        if [site.handle for site in self._sites] != self._told or has_failed:
            self._tell()

    def _admit(self, number: int, now: float) -> None:
        told = json.loads(self._store.get(f"site {number}"))
        site = _Site(number, told["handle"], told["terms"], seen=now)
        if self._sites and site.terms != self._sites[0].terms:
            reason = f"the sites that are present train with {self._sites[0].terms}, this one with {site.terms}"
            self._store.set(f"refused {number}", reason)
            _log.info("refused %s: %s", site.handle, reason)
            return
        self._sites = [other for other in self._sites if other.handle != site.handle] + [site]

    def _is_gone(self, site: _Site, now: float) -> bool:
        return now - site.seen > self._patience or self._store.check([f"left {site.number}"])

    def _tell(self) -> None:
        if len(self._sites) < (1 if self._number else self._least):
            return
        handles = [site.handle for site in self._sites]
        _log.info("%d sites are present: %s", len(handles), ", ".join(handles))
        # Of the clock, so that it is new to sites that knew an earlier meeting point at this address.
        self._number, self._told, self._failed_at = time.time_ns(), handles, None
        self._store.set("present", json.dumps({"number": self._number, "handles": handles}))


def register(store: Any, handle: str, terms: str) -> int:
    """Register a site. Returns its number."""
    number: int = store.add("sites", 1)
    store.set(f"site {number}", json.dumps({"handle": handle, "terms": terms}))
    return number
