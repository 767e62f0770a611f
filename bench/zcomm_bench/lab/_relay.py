"""A long way between hosts and their switch: frames arrive late, and some are lost.

`network.py` runs this file as a script. It reads the frames of each host from a TAP device in the host's namespace and
writes them to one in the switch's: late, and not those that are lost. Frames from the switch pass at once. So a frame
between two hosts is delayed once, and may be lost once.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import sys
import time
from collections import deque

_FRAMES = 64  # of one device at a time, so that others are not kept waiting
_FRAME_BYTES = 2048


def _write(device: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # it is down, or out of memory: a network loses the frame, too
        os.write(device, frame)


def relay(hosts: list[int], ports: list[int], delay: float, loss: float) -> None:
    """Carry frames between TAP devices, those of hosts and of their ports at the switch, until killed."""
    port_of = dict(zip(hosts, ports, strict=True))
    host_of = dict(zip(ports, hosts, strict=True))
    chance = random.Random(0)
    waiting: deque[tuple[float, int, bytes]] = deque()  # when, where to, what; all are delayed alike
    poll = select.epoll()
    for device in (*hosts, *ports):
        os.set_blocking(device, False)
        poll.register(device, select.EPOLLIN)
    while True:
        ready = poll.poll(max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)
        now = time.monotonic()
        for device, _ in ready:
            for _number in range(_FRAMES):
                try:
                    frame = os.read(device, _FRAME_BYTES)
                except BlockingIOError:
                    break
                if device in host_of:
                    _write(host_of[device], frame)
                elif chance.random() >= loss:
                    waiting.append((now + delay, port_of[device], frame))
        while waiting and waiting[0][0] <= now:
            _, device, frame = waiting.popleft()
            _write(device, frame)


if __name__ == "__main__":
    seconds, share, *descriptors = sys.argv[1:]
    devices = [int(descriptor) for descriptor in descriptors]
    half = len(devices) // 2
    relay(devices[:half], devices[half:], float(seconds), float(share))
