"""Rendezvous and handshake of a group's ranks, through its store."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

from torch._C._distributed_c10d import PrefixStore

from zcomm._node import number_nodes
from zcomm.distributed import threshold

#: What rank 0 makes of the texts of all ranks, in rank order. It must not raise: the others would wait.
Digest: TypeAlias = Callable[[list[str]], str]

#: Number of what ranks send each other. Add one in each commit after which ranks of the commit before would misread
#: it: the bytes of wires, headers or shared memory, the order, sizes or tags of messages, or the texts of handshakes.
#: Versions do not tell commits apart.
PROTOCOL = 6

_PATIENCE = 2.0  # seconds beyond the timeout, for a store that hangs


class _Meeting:
    """One rank's side of a rendezvous, in a store that may hold keys of ranks that are gone.

    Rank 0 names an unused part of the store. Each other rank registers there, with a random number. When all have
    registered, rank 0 accepts their numbers. A rank that finds a stale name never sees its number accepted, and goes on
    to the next name. Rank 0 alone reads what the others write: read by all, it would be bytes by the square of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, text: str, digest: Digest) -> None:
        self._store, self._rank, self._size, self._text, self._digest = store, rank, size, text, digest
        self._leader = f"leader of {size}"
        self._number = uuid.uuid4().hex
        self._name = ""  # part of the store in which this rank has registered

    def poll(self) -> bool:
        """Tell whether all ranks have registered."""
        return self._run_follower() if self._rank else self._run_leader()

    def _run_leader(self) -> bool:
        if not self._name:
            self._register(uuid.uuid4().hex)
            self._store.set(self._leader, self._name)
        if not self._store.check(self._places()):
            return False
        registered = [place.decode().split(" ", 1) for place in self._store.multi_get(self._places())]
        self._store.set(f"{self._name}/digest", self._digest([text for _, text in registered]))
        self._store.multi_set([self._accepted(number) for number, _ in registered], [""] * self._size)
        return True

    def _run_follower(self) -> bool:
        named = self._store.get(self._leader).decode() if self._store.check([self._leader]) else ""
        # Reads the name before the acceptance: rank 0, having accepted all, may name the part of the next rendezvous.
        if self._name and self._store.check([self._accepted(self._number)]):
            return True
        if named != self._name:
            self._register(named)
        return False

    def _register(self, name: str) -> None:
        self._name = name
        self._store.set(self._places()[self._rank], f"{self._number} {self._text}")

    def _places(self) -> list[str]:
        return [f"{self._name}/rank {rank}" for rank in range(self._size)]

    def _accepted(self, number: str) -> str:
        return f"{self._name}/accepted {number}"

    def missing(self) -> list[int]:
        """Return the ranks that have not registered, as far as this one can tell."""
        absent = [rank for rank, place in enumerate(self._places()) if self._name and not self._store.check([place])]
        return absent or [0]

    def result(self) -> tuple[PrefixStore, str]:
        """Return the result of :func:`meet`."""
        return PrefixStore(self._name, self._store), self._store.get(f"{self._name}/digest").decode()


def meet(
    connect: Callable[[], Any], rank: int, size: int, timeout: float, purpose: str, *, text: str = "",
    digest: Digest = lambda texts: "", is_over: Callable[[], bool] = lambda: False,
) -> tuple[PrefixStore, str]:  # fmt: skip
    """Wait for all ranks. Return an unused part of the store ``connect()``, and rank 0's ``digest`` of all ``text``.

    Raises RuntimeError that names the ranks missing after ``timeout`` seconds; ends early if ``is_over()``. Calls in
    one store are sequential: a rank starts the next one after it has returned from the last one.
    """
    met: Future[tuple[PrefixStore, str]] = Future()
    left = threading.Event()
    deadline = time.monotonic() + timeout

    def wait() -> None:
        try:
            meeting = _Meeting(connect(), rank, size, text, digest)
            pause = 0.0005
            while not meeting.poll():
                if time.monotonic() > deadline:
                    late = f"ranks {meeting.missing()} did not come to the {purpose}"
                    raise RuntimeError(f"{late} within the timeout of {timeout:g} s")
                if left.wait(pause):
                    return
                pause = min(2 * pause, 0.05)
            met.set_result(meeting.result())
        except BaseException as error:
            met.set_exception(error)

    # Runs on a separate thread, because a request to a store that hangs never returns.
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.05)
            if is_over():
                raise RuntimeError(f"aborted before the {purpose}")
            if time.monotonic() > deadline + _PATIENCE:
                stopped = "the group's store does not answer: is the process that serves it stopped?"
                raise RuntimeError(f"{stopped} This rank waited for the {purpose}")
    finally:
        left.set()
    return met.result()


def compare(handshakes: list[str], options: Any) -> str:
    """Compare version and options of all ranks. Return as JSON their first ``difference``, or the ``nodes`` of all
    ranks, as numbers, and the ``threshold``: that of :func:`threshold.choose` where the link decides, else null.
    What cannot be compared is a difference, too: the other ranks wait for an answer."""
    try:
        return _compare([json.loads(text) for text in handshakes], options)
    except Exception as error:
        return _tell(f"rank 0 cannot compare what ranks told it: {type(error).__name__}: {error}")


def _compare(everyone: list[dict[str, Any]], options: Any) -> str:
    first = everyone[0]
    for other, theirs in enumerate(everyone):
        if theirs["version"] != first["version"]:
            return _difference("version", first["version"], other, theirs["version"])
        if theirs["options"] != first["options"]:
            zero, there = (_told(one["options"], other["options"]) for one, other in ((first, theirs), (theirs, first)))
            return _difference("options", zero, other, there)
    world_ranks = options.global_ranks_in_group or range(len(everyone))
    nodes = number_nodes([theirs["node"] for theirs in everyone], world_ranks, options.node_size)
    hosts = [theirs["host"] for theirs in everyone]
    return json.dumps({"nodes": nodes, "threshold": threshold.choose(hosts, len(set(nodes))) if all(hosts) else None})


def _difference(item: str, zero: str, other: int, there: str) -> str:
    return _tell(f"ranks disagree on the {item}: rank 0 has {zero}, rank {other} has {there}")


def _tell(difference: str) -> str:
    return json.dumps({"difference": difference})


def _told(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return those of a rank's options that differ from another one's. Other commits have others."""
    names = [
        name for name in {**mine, **theirs} if name not in mine or name not in theirs or mine[name] != theirs[name]
    ]
    return ", ".join(f"{name}={mine[name]!r}" if name in mine else f"no option {name}" for name in sorted(names))
