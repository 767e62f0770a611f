"""Sites that come and go: the group of those that are present."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from zcomm._meeting import register
from zcomm.distributed.backend import make_member

_log = logging.getLogger("zcomm")

_BEAT = 1.0  # seconds
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


class Sites:
    """The sites of a training, of which some may be lost and others come: an argument of :class:`OuterStep`.

    A meeting point, ``python -m zcomm meet --port 29511``, tells them who is present. It sends no values. If it ends,
    the present sites go on, and a new one at its address takes over. A site is one process, with parameters on a CPU.
    Its addresses must be reachable from the others: GLOO_SOCKET_IFNAME chooses the interface.

    Args:
        meeting: ``"host:port"`` of the meeting point.
        timeout: seconds after which a site that does not answer is lost.

    Raises ValueError if ``meeting`` is no address, and RuntimeError if nobody answers there.
    """

    def __init__(self, meeting: str, *, timeout: float = 60.0) -> None:
        host, _, port = meeting.rpartition(":")
        if not (host and port.isdecimal()):
            raise ValueError(f"meeting: expected 'host:port', got {meeting!r}")
        self._address, self._timeout = (host, int(port)), datetime.timedelta(seconds=timeout)
        self._member = make_member(self._timeout, "sites")
        self._store = self._connect()
        self._terms = ""
        self._number = 0  # at the meeting point
        self._lock = threading.Lock()  # guards the next two
        self._present: dict[str, Any] = {"number": 0, "handles": []}  # the newest that this site knows
        self._refused = ""
        self._joined = 0  # number of the membership that the group has
        self._backend: Any = None
        self._ended = threading.Event()

    @property
    def has_changed(self) -> bool:
        """Tell whether others are present now than in the group."""
        with self._lock:
            return bool(self._refused) or self._present["number"] != self._joined

    def join(self, terms: str) -> None:
        """Register at the meeting point. Sites with other ``terms`` than those that are present are refused."""
        self._terms = terms
        self._number = register(self._store, self._member.handle, terms)
        threading.Thread(target=self._beat, daemon=True).start()

    def follow(self) -> dist.ProcessGroup:
        """Return a group of the sites that are present, once this is one of them. Raises RuntimeError if this site is
        refused."""
        while True:
            present = self._wait_for_others()
            self._joined = present["number"]
            asked = SimpleNamespace(uuid=self._joined, handles=present["handles"], timeout=self._timeout)
            try:
                self._backend = self._member.make(asked, self._leave)
            except RuntimeError as error:
                self.report(error)
            else:
                return self._group_of(self._backend)

    def report(self, error: object) -> None:
        """Tell the meeting point that calls of the group have failed: then all sites that are there meet anew."""
        _log.warning("sites: %s; this one waits for those that are left", error)
        with contextlib.suppress(RuntimeError):
            self._store.clone().set(f"failed {self._joined}", "")

    def have_all_ended(self) -> bool:
        """Tell that this site has ended, and wait for the others: until then it keeps what they may have to take over.
        False once others are present than in the group."""
        store, key = self._store.clone(), f"ended {self._joined}"
        store.add(key, 1)
        while store.add(key, 0) < self._backend.size():
            if self.has_changed:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Leave: the others go on at once."""
        self._ended.set()
        with contextlib.suppress(RuntimeError):
            self._store.clone().set(f"left {self._number}", "")
        self._leave()

    def _leave(self) -> None:
        if self._backend is not None:
            self._backend.abort()
            self._backend = None

    def _wait_for_others(self) -> dict[str, Any]:
        told_at = time.monotonic()
        while True:
            with self._lock:
                present, refused = copy.copy(self._present), self._refused
            if refused:
                raise RuntimeError(f"sites: this one is refused: {refused}")
            if present["number"] != self._joined and self._member.handle in present["handles"]:
                return present
            if time.monotonic() > told_at + 10:
                _log.warning("sites: waiting for the meeting point at %s:%d", *self._address)
                told_at = time.monotonic()
            time.sleep(0.02)

    def _connect(self) -> Any:
        try:
            return TCPStore(*self._address, is_master=False, timeout=self._timeout)
        except RuntimeError as error:
            address = "{}:{}".format(*self._address)
            raise RuntimeError(f"meeting: expected a meeting point at {address}, got no answer: {error}") from None

    def _beat(self) -> None:
        """Beat, and read who is present. Connects again if the meeting point is lost."""
        store, beats = self._store.clone(), 0
        while not self._ended.wait(_BEAT if beats else 0.0):
            try:
                beats += 1
                store.set(f"beat {self._number}", str(beats))
                self._read(store)
            except RuntimeError:
                beats = 0
                with contextlib.suppress(RuntimeError):
                    self._store = self._connect()
                    store = self._store.clone()
                    self._number = register(store, self._member.handle, self._terms)

    def _read(self, store: Any) -> None:
        present = json.loads(store.get("present")) if store.check(["present"]) else self._present
        refused = store.get(f"refused {self._number}").decode() if store.check([f"refused {self._number}"]) else ""
        is_out = present["number"] != self._present["number"] and self._member.handle not in present["handles"]
        with self._lock:
            self._present, self._refused = present, refused
        if is_out and self._joined:  # this site was taken for lost
            self._number = register(store, self._member.handle, self._terms)

    @staticmethod
    def _group_of(backend: Any) -> dist.ProcessGroup:
        """Return a group of torch around a backend, which no other group knows of."""
        group = dist.ProcessGroup(HashStore(), backend.rank(), backend.size())
        group._set_default_backend(_CUSTOM)
        group._register_backend(torch.device("cpu"), _CUSTOM, backend)
        group._set_group_name("sites")  # type: ignore[arg-type]  # a str, by a name of its own
        return group
