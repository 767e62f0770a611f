"""Sites that come and go: the group of those that are present."""

from __future__ import annotations

import contextlib
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

from zcomm._checks import check_types
from zcomm._meeting import SILENT, Registration, register
from zcomm.distributed.backend import make_member

_log = logging.getLogger("zcomm")

_BEAT = 1.0  # seconds
_PAUSE = 0.05
_LONGEST_NAME = 64
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


class Sites:
    """Sites that come and go during a training, for :class:`OuterStep`.

    A meeting point, ``python -m zcomm meet --port 29511``, tells them who is present. It sends no values. If it ends,
    the present sites go on, and a new one at its address takes over. A site is one process, with parameters on a CPU.
    Sites connect to each other at the interface that GLOO_SOCKET_IFNAME names.

    Args:
        meeting: ``"host:port"`` of the meeting point.
        name: orders the ranks of sites. Sites with equal names are in the order of their arrival. A site that returns
            with its name has its old place. The meeting point shows it.
        timeout: seconds after which a call fails that a site does not answer. A site that is alive, but does not come
            when others meet anew, is left out after as many seconds more.

    Raises ValueError if ``meeting`` is no address or ``name`` is not printable, and RuntimeError if nobody answers.
    """

    def __init__(self, meeting: str, *, name: str = "", timeout: float = 60.0) -> None:
        check_types(locals(), meeting=str, name=str, timeout=int | float)
        host, _, port = meeting.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"meeting: expected 'host:port', got {meeting!r}")
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"name: expected at most {_LONGEST_NAME} printable characters, got {name!r}")
        if timeout <= 0:
            raise ValueError(f"timeout: expected more than 0 seconds, got {timeout}")
        self._address, self._name, self._timeout = (host, int(port)), name, datetime.timedelta(seconds=timeout)
        self._store = self._connect()
        self._member = make_member(self._timeout, "sites")
        self._terms = ""
        self._backend: Any = None
        self._joined = 0  # the membership that the group is of
        self._lock = threading.Lock()  # guards what the thread that talks to the meeting point shares
        self._present: dict[str, Any] = {"number": 0, "handles": []}  # the newest membership
        self._number: int | None = None  # registration; None: to be made
        self._refused = ""
        self._is_lost = False
        self._ready = 0  # the membership that is over for this site
        self._is_over = False  # that of the group, for another site
        self._ended = ""  # key of the counter of sites that have ended, and its value
        self._num_ended = 0
        self._counted = ""  # the last of these keys that was told
        self._is_left = False
        self._wake = threading.Event()  # something is to be told at once
        self._thread = threading.Thread(target=self._talk, daemon=True)

    @property
    def has_changed(self) -> bool:
        """Tell whether others are present now than in the group."""
        with self._lock:
            is_other = self._present["number"] != self._joined
            return is_other or self._is_over or self._is_lost or bool(self._refused)

    def join(self, terms: str) -> None:
        """Register at the meeting point. Sites with other ``terms`` than those that are present are refused. Raises
        RuntimeError for a second call."""
        if self._terms:
            raise RuntimeError("sites: expected one OuterStep of this object, got a second one")
        self._terms = f"{self._member.terms}, {terms}"
        self._thread.start()

    def follow(self) -> dist.ProcessGroup:
        """Return a group of the sites that are present, once this is one of them. Raises RuntimeError if this site is
        refused."""
        self._leave()  # so that none of the others waits for this one
        while True:
            present = self._wait_for_others()
            with self._lock:
                self._joined, self._is_over = present["number"], False
            asked = SimpleNamespace(uuid=self._joined, handles=present["handles"], timeout=self._timeout)
            try:
                self._backend = self._member.make(asked, self._leave, is_over=lambda: self.has_changed)
            except RuntimeError as error:
                self.report(error)
            else:
                return self._group_of(self._backend)

    def report(self, error: object) -> None:
        """Leave the group, as its calls have failed: all sites meet anew, which follow() waits for."""
        _log.warning("sites: %s; this one waits for those that are left", error)
        self._leave()

    def have_all_ended(self, inner_steps: int) -> bool:
        """Tell that this site has ended, and wait for the others: until then it keeps what they may have to take over.
        False once others are present than in the group."""
        with self._lock:
            self._ended, self._num_ended = f"ended {self._joined} {inner_steps}", 0
        self._wake.set()
        told_at = time.monotonic()
        while not self.has_changed:
            with self._lock:
                if self._num_ended >= self._backend.size():
                    return True
            told_at = self._tell_of_waiting(told_at)
        return False

    def close(self) -> None:
        """Leave: the others go on at once."""
        with self._lock:
            self._is_left = True
        self._wake.set()
        if self._terms:
            self._thread.join(2 * _BEAT)
        self._leave()

    def _leave(self) -> None:
        if self._backend is not None:
            self._backend.abort()
            self._backend = None

    def _wait_for_others(self) -> dict[str, Any]:
        told_at = time.monotonic()
        while True:
            with self._lock:
                self._ready = self._joined
                if self._refused:
                    raise RuntimeError(f"sites: this one is refused: {self._refused}")
                if self._is_lost:  # it is back
                    self._is_lost, self._number = False, None
                present = self._present
            if present["number"] != self._joined and self._member.handle in present["handles"]:
                return present
            told_at = self._tell_of_waiting(told_at)

    def _tell_of_waiting(self, told_at: float) -> float:
        self._wake.set()
        time.sleep(_PAUSE)
        if time.monotonic() < told_at + 10:
            return told_at
        _log.warning("sites: waiting for the others, of which the meeting point at %s:%d tells", *self._address)
        return time.monotonic()

    def _connect(self) -> Any:
        try:
            return TCPStore(*self._address, is_master=False, timeout=self._timeout)
        except RuntimeError as error:
            address = "{}:{}".format(*self._address)
            raise RuntimeError(f"meeting: expected a meeting point at {address}, got no answer: {error}") from None

    def _talk(self) -> None:
        """Tell the meeting point that this site is there, and what others have to know. Read who is present. Connects
        and registers again if the meeting point is lost. It alone uses the store, whose requests may hang."""
        beats = 0
        while not self._is_left and threading.main_thread().is_alive():
            self._wake.clear()
            beats += 1
            try:
                self._exchange(beats)
            except Exception as error:
                _log.warning("sites: the meeting point is lost: %s", error)
                with contextlib.suppress(RuntimeError):
                    self._store = self._connect()
                    with self._lock:
                        self._number, self._counted = None, ""
            self._wake.wait(_BEAT)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left {self._number}", "")

    def _exchange(self, beats: int) -> None:
        store = self._store
        with self._lock:
            number, ready, joined, ended = self._number, self._ready, self._joined, self._ended
        if number is None:
            seconds = self._timeout.total_seconds()
            number = register(store, Registration(self._member.handle, self._terms, joined, seconds, self._name))
            with self._lock:
                self._number = number
        store.set(f"beat {number}", str(beats))
        if ready:
            store.set(f"ready {ready} {number}", "")
        num_ended = store.add(ended, 0 if ended == self._counted else 1) if ended else 0
        self._counted = ended
        present = json.loads(store.get("present")) if store.check(["present"]) else None
        is_over = store.check([f"again {joined}"])
        lost, refused = (
            store.get(f"{key} {number}").decode() if store.check([f"{key} {number}"]) else ""
            for key in ("lost", "refused")
        )
        with self._lock:
            self._present = present or self._present
            if lost == SILENT:
                self._number = None  # it is not
            elif self._number == number:
                self._is_lost, self._refused = bool(lost), refused
            if self._joined == joined:
                self._is_over = is_over
            if self._ended == ended:
                self._num_ended = num_ended

    @staticmethod
    def _group_of(backend: Any) -> dist.ProcessGroup:
        """Return a group of torch around a backend, which no other group knows of."""
        group = dist.ProcessGroup(HashStore(), backend.rank(), backend.size())
        group._set_default_backend(_CUSTOM)
        group._register_backend(torch.device("cpu"), _CUSTOM, backend)
        group._set_group_name("sites")  # type: ignore[arg-type]  # a str, by a name of its own
        return group
