"""Members of a group that changes them: ``init_process_group("zcomm", enable_reconfigure=True)`` of torch 2.14."""

from __future__ import annotations

import copy
import fcntl
import socket
import struct
import uuid
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from zcomm.distributed import environment
from zcomm.distributed.binding import _c10d

#: Makes the group of one rank: of what connects to its store, the rank, the number of ranks, options, and what ends it
#: early.
MakeGroup = Callable[[Callable[[], Any], int, int, Any, Callable[[], bool]], "_c10d.ProcessGroup"]

_ADDRESS_OF = 0x8915  # SIOCGIFADDR


class Member:
    """This process, as a member. It serves a store of its own, so that a group outlives any of its members.

    ``handle`` is ``address:port/number``: where its store is, and a random number. ``terms``: what all members must
    have in common.
    """

    def __init__(self, address: str, options: Any, terms: str, make_group: MakeGroup) -> None:
        self._options, self.terms, self._make_group = options, terms, make_group
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=options._timeout)
        self.handle = f"{address}:{self._store.port}/{uuid.uuid4().hex}"
        self._used: set[int] = set()

    def make(
        self, asked: Any, leave: Callable[[], None], is_over: Callable[[], bool] = lambda: False
    ) -> _c10d.ProcessGroup:
        """Make the group of the members that ``asked`` names, a ReconfigureOptions of torch. They meet in the store of
        rank 0. ``leave`` ends the group of the earlier members. Raises ValueError for a used uuid or wrong handles,
        before that; and RuntimeError if a member does not come, or once ``is_over()``."""
        handles = sorted(asked.handles) if isinstance(asked.handles, set) else list(asked.handles)
        self._check(asked.uuid, handles)
        self._used.add(asked.uuid)
        leave()
        rank, options = handles.index(self.handle), copy.copy(self._options)
        if asked.timeout is not None:
            options._timeout = asked.timeout
        name = f"reconfigure {asked.uuid}"

        def connect() -> PrefixStore:
            return PrefixStore(name, self._store if rank == 0 else self._join(handles[0], options._timeout))

        return self._make_group(connect, rank, len(handles), options, is_over)

    def _check(self, number: int, handles: list[str]) -> None:
        if number in self._used:
            raise ValueError(f"uuid: expected one that this group has not used, got {number} again")
        if len(set(handles)) != len(handles):
            raise ValueError(f"handles: expected each member once, got {handles}")
        if self.handle not in handles:
            raise ValueError(f"handles: expected this member's, {self.handle!r}, among them, got {handles}")
        for handle in handles:
            address, _, number_of_member = handle.rpartition("/")
            if not (number_of_member and address.rpartition(":")[2].isdecimal()):
                raise ValueError(f"handles: expected those of members of zcomm groups, got {handle!r}")

    def _join(self, handle: str, timeout: Any) -> Any:
        address, _, port = handle.rpartition("/")[0].rpartition(":")
        try:
            # Its store is older than its handle: one that refuses is gone, and TCPStore would try again.
            socket.create_connection((address, int(port)), timeout.total_seconds()).close()
            return TCPStore(address, int(port), is_master=False, timeout=timeout)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"rank 0 of the new members, {handle}, does not answer: {error}") from None


def address_of_interface() -> str | None:
    """Return the IPv4 address of the first interface that ``GLOO_SOCKET_IFNAME`` names; None if it names none.
    Raises ValueError if the interface has none."""
    names = environment.gloo_interfaces()
    if not names:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", names[0].encode()[:15]))
        except OSError as error:
            raise ValueError(
                f"GLOO_SOCKET_IFNAME: expected an interface with an IPv4 address, got {names[0]!r}: {error.strerror}"
            ) from None
    return socket.inet_ntoa(answer[20:24])
