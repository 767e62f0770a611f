"""Network namespaces held by file descriptors: `build` makes them, `enter` starts a command in one.

`network.py` runs this file as a script in an interpreter of its own, because a process with threads (any that
has imported torch) can neither create nor enter a user namespace, and is not safe to fork. Nothing gets a name in the
file system: a namespace lives as long as a descriptor or a process refers to it, so that even a killed lab leaves
nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
TBF_HANDLE = 0x10000
SWITCH_ADDRESS_PREFIX = 24
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _unshare(flags: int, what: str) -> None:
    _check(_libc.unshare(flags), f"cannot create a {what} namespace")


def _become_privileged() -> int | None:
    """Make sure that network namespaces may be created; returns the descriptor of a user namespace if it took one."""
    try:
        _unshare(CLONE_NEWNET, "network")
        return None
    except PermissionError:
        user_id, group_id = os.geteuid(), os.getegid()
        _unshare(CLONE_NEWUSER, "user")
        # The kernel lets an ordinary user map its own ids only, and its group only once setgroups is denied.
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user_id} 1"), ("gid_map", f"0 {group_id} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
        return os.open("/proc/self/ns/user", os.O_RDONLY)


def _new_network() -> tuple[int, Any]:
    """Move into a new network namespace; returns its descriptor and a netlink socket that stays in it."""
    from pyroute2 import IPRoute  # type: ignore[import-untyped]

    _unshare(CLONE_NEWNET, "network")
    return os.open("/proc/self/ns/net", os.O_RDONLY), IPRoute()


def _limit(netlink: Any, index: int, rate_bytes: int | None) -> None:
    """Limit what leaves through an interface."""
    if rate_bytes is None:
        return
    # One millisecond's worth of tokens, and never less than two of the 64 KiB packets that TCP hands to a veth.
    burst = max(128 * 1024, rate_bytes // 1000)
    netlink.tc("add", "tbf", index, TBF_HANDLE, rate=rate_bytes, burst=burst, latency="20ms")


def _up(netlink: Any, name: str) -> int:
    index: int = netlink.link_lookup(ifname=name)[0]
    netlink.link("set", index=index, state="up")
    return index


def _tap(name: str) -> int:
    """Make a TAP device in the namespace of this process; returns its descriptor, with which it lives and dies."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def build(addresses: list[str], rate_bytes: int | None, relayed: bool) -> tuple[list[int], list[int]]:
    """Make one namespace per address, joined by a bridge; returns descriptors: hosts, switch, user namespace if any.
    Then those of TAP devices, if what is `relayed` between hosts and switch: of all ports, of all hosts."""
    user = _become_privileged()
    switch, switch_netlink = _new_network()
    switch_netlink.link("add", ifname="br0", kind="bridge", br_stp_state=0, br_forward_delay=0)
    bridge = _up(switch_netlink, "br0")
    ports = [_tap(f"port{number}") for number in range(len(addresses))] if relayed else []
    hosts, taps = [], []
    for number, address in enumerate(addresses):
        port_name = f"port{number}"
        host, netlink = _new_network()
        hosts.append(host)
        if relayed:
            taps.append(_tap("eth0"))
        else:
            netlink.link("add", ifname="eth0", kind="veth", peer={"ifname": port_name, "net_ns_fd": switch})
        netlink.addr(
            "add", index=netlink.link_lookup(ifname="eth0")[0], address=address, prefixlen=SWITCH_ADDRESS_PREFIX
        )
        _up(netlink, "lo")
        _limit(netlink, _up(netlink, "eth0"), rate_bytes)
        port = switch_netlink.link_lookup(ifname=port_name)[0]
        switch_netlink.link("set", index=port, master=bridge)
        # Both ends: senders that share a destination must queue at its port, as they do in a real switch.
        _limit(switch_netlink, _up(switch_netlink, port_name), rate_bytes)
        netlink.close()
    switch_netlink.close()
    return [*hosts, switch, *([] if user is None else [user])], ports + taps


def enter(parent: int, user: int, network: int, argv: list[str]) -> None:
    """Become `argv` inside a namespace, or, if `network` is -1, in that of this process, and die with the lab."""
    if user >= 0:
        _check(_libc.setns(user, CLONE_NEWUSER), "cannot enter the user namespace")
    if network >= 0:
        _check(_libc.setns(network, CLONE_NEWNET), "cannot enter the network namespace")
    for descriptor in (user, network):
        if descriptor >= 0:
            os.close(descriptor)
    # After setns, which clears it. The parent may have died before.
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "cannot tie the process to its lab")
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]}: {error.strerror}")


def _main() -> None:
    action, *arguments = sys.argv[1:]
    if action == "enter":
        parent, user, network, *argv = arguments
        enter(int(parent), int(user), int(network), argv)
    else:
        spec = json.loads(arguments[1])
        # Started with -I -S, so that neighbours of this file cannot shadow the standard library.
        sys.path[:] = spec["path"]
        with socket.socket(fileno=int(arguments[0])) as channel:
            try:
                networks, taps = build(spec["addresses"], spec["rate_bytes"], spec["relayed"])
            except OSError as error:
                sys.exit(error.strerror or str(error))
            has_user = len(networks) > len(spec["addresses"]) + 1
            socket.send_fds(channel, [b"1" if has_user else b"0"], networks + taps)


if __name__ == "__main__":
    _main()
