"""The meeting point of sites that come and go: it tells them who is present. ``python -m zcomm meet`` serves one.

Sites and the point tell each other by the keys of a TCPStore. N is the number of a registration, M of a membership.

==============  ========  =========================================================================================
``sites``       counter   of registrations
``site N``      a site    a :class:`Registration`, as JSON
``beat N``      a site    another text every second
``left N``      a site    it ends
``refused N``   point     why the site cannot take part
``lost N``      point     why the site is left out: it may register again
``present``     point     M, and the handles of its sites: JSON
``ready M N``   a site    it waits for another membership, as a call has failed, here or at another site
``again M``     point     a site is ready: so have all to be
``ended M K``   counter   of the sites that have ended their training after K inner steps
==============  ========  =========================================================================================
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore

_log = logging.getLogger("zcomm")

PATIENCE = 5.0  # seconds without a beat, after which a site is gone
SILENT = "it was silent"
_BUSY = "others waited for it"
_MORE = 10  # times as long as usual, for sites that only new ones wait for
_PAUSE = 0.1


@dataclass(frozen=True)
class Registration:
    """``terms``: what sites must have in common. ``joined``: the membership in which the site is, 0 for a new one.
    ``timeout``: of its calls, in seconds. ``name``: orders the handles of a membership."""

    handle: str
    terms: str
    joined: int
    timeout: float
    name: str = ""

    @property
    def shown(self) -> str:
        return f"{self.name} {self.handle}".lstrip()


@dataclass
class _Site:
    number: int
    of: Registration
    beat: bytes = b""
    seen: float = 0.0  # when it has last beaten


class MeetingPoint:
    """Tells sites who is present. ``port``: 0 takes a free one. ``least``: sites before the training begins."""

    def __init__(self, port: int, least: int = 1, patience: float = PATIENCE) -> None:
        self._store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        self.port: int = self._store.port
        self._least, self._patience = least, patience
        self._sites: list[_Site] = []  # those that are present
        self._known = 0  # registrations
        self._missing_since: float | None = None  # of a site that took a number, and did not register
        self._number = 0  # of the last membership that was told
        self._told: list[str] = []  # its handles
        self._before: list[str] = []  # handles of the membership before it
        self._over_at: float | None = None  # when one of its sites was ready for another one
        self._first_at: float | None = None  # when the first of earlier members has come back to an empty point

    def serve(self) -> NoReturn:
        """Serve for ever."""
        while True:
            self.poll()
            time.sleep(_PAUSE)

    def poll(self) -> None:
        """Read what sites have written, and tell a new membership if there is one."""
        now = time.monotonic()
        self._admit(now)
        for site in self._sites:
            beat = self._read(f"beat {site.number}")
            if beat != site.beat:
                site.beat, site.seen = beat, now
        for site in list(self._sites):
            if self._has(f"left {site.number}"):
                self._sites.remove(site)
            elif now - site.seen > self._patience:
                self._lose(site, SILENT)
        self._tell(now)

    def _admit(self, now: float) -> None:
        total = self._store.add("sites", 0)
        while self._known < total:
            number = self._known + 1
            if not self._has(f"site {number}"):  # it is about to write, or was killed before
                self._missing_since = self._missing_since or now
                if now - self._missing_since < self._patience:
                    return
                self._store.set(f"lost {number}", SILENT)
            else:
                self._add(number, self._read(f"site {number}"), now)
            self._known, self._missing_since = number, None

    def _add(self, number: int, text: bytes, now: float) -> None:
        try:
            site = _Site(number, Registration(**json.loads(text)), seen=now)
        except (TypeError, ValueError):
            self._store.set(f"refused {number}", "its zcomm has another protocol than the meeting point's")
            return
        self._sites = [other for other in self._sites if other.of.handle != site.of.handle] + [site]

    def _tell(self, now: float) -> None:
        if not self._told and any(site.of.joined for site in self._sites):
            self._first_at = self._first_at or now
            if now - self._first_at < self._patience:
                return  # all of them are about to come
        elif not self._told and len(self._sites) < (1 if self._number else self._least):
            return
        self._first_at = None
        self._refuse()
        is_over = self._is_over(now)  # first: it may lose some
        in_order = sorted((site.of for site in self._sites), key=lambda registration: registration.name)
        handles = [each.handle for each in in_order]
        if is_over or handles != self._told:
            self._before, self._told = self._told, handles
            self._over_at = None
            if self._told:
                # Of the clock, so that it is new to sites that an earlier point knew.
                earlier = max(self._number, *(site.of.joined for site in self._sites))
                self._number = max(time.time_ns(), earlier + 1)
                self._store.set("present", json.dumps({"number": self._number, "handles": self._told}))
                _log.info("%d sites are present: %s", len(in_order), ", ".join(each.shown for each in in_order))

    def _is_over(self, now: float) -> bool:
        """Tell whether all sites of the membership are ready for another one. Loses those that do not come."""
        members = [site for site in self._sites if site.of.handle in self._told]
        busy = [site for site in members if not self._has(f"ready {self._number} {site.number}")]
        if len(busy) == len(members):
            return False
        if self._over_at is None:
            self._over_at = now
            self._store.set(f"again {self._number}", "")
        if not all(site.seen > self._over_at for site in members):
            return False  # some may have been killed
        ready_handles = {site.of.handle for site in members if site not in busy}
        more = 1 if ready_handles & set(self._before) or not self._before else _MORE
        if now - self._over_at > more * max(site.of.timeout for site in members) + self._patience:
            for site in busy:
                self._lose(site, _BUSY)
            return True
        return not busy

    def _refuse(self) -> None:
        """Refuse sites with other terms than those of the members, else of those that were members once."""
        self._sites.sort(key=lambda site: (site.of.handle not in self._told, not site.of.joined))
        for site in list(self._sites):
            terms = self._sites[0].of.terms
            if site.of.terms != terms:
                reason = f"the sites that are present train with {terms}, this one with {site.of.terms}"
                self._sites.remove(site)
                self._store.set(f"refused {site.number}", reason)
                _log.info("refused %s: %s", site.of.shown, reason)

    def _lose(self, site: _Site, why: str) -> None:
        self._sites.remove(site)
        self._store.set(f"lost {site.number}", why)
        _log.info("lost %s: %s", site.of.shown, why)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._has(key) else b""


def register(store: Any, registration: Registration) -> int:
    """Register a site. Returns its number."""
    number: int = store.add("sites", 1)
    store.set(f"site {number}", json.dumps(asdict(registration)))
    return number
