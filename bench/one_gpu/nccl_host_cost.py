"""The host's time for NCCL groups, kernel launches and events: what planner/cluster.py assumes of a call's launches.

A communicator of one rank sends to itself. `returned_us`: until ncclGroupEnd returns; `ready_us`: until the group is on
its stream, which the transport waits for. A communicator that does not block has a thread for each group. `captured`:
the group while a graph is captured, and `replay`: the launch of that graph. Medians.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from collections.abc import Iterator
from typing import Any

from bench.one_gpu import probes, stage
from zcomm_bench.lab import gpus

MESSAGES = stage.pick((2, 16, 70, 448, 1022), (2, 16))  # sent and received
REPEATS = stage.pick(100, 3)
LAUNCHES = 200  # in a row: less than the launch queue holds
COLUMNS = ("what", "messages", "returned_us", "ready_us")


def medians(loop: ctypes.c_void_p, num_messages: int, is_captured: bool) -> tuple[float, float]:
    """In microseconds, of the two times of probe_nccl_groups."""
    seconds = (ctypes.c_double * (2 * REPEATS))()
    probes.call("nccl_groups", loop, num_messages, int(is_captured), REPEATS, seconds)
    return statistics.median(seconds[::2]) * 1e6, statistics.median(seconds[1::2]) * 1e6


def groups(what: str, is_blocking: bool) -> Iterator[dict[str, Any]]:
    loop = ctypes.c_void_p()
    probes.call("nccl_open", probes.wheel(), int(is_blocking), max(MESSAGES), ctypes.byref(loop))
    for num_messages in MESSAGES:
        returned, ready = medians(loop, num_messages, False)
        yield {"what": what, "messages": num_messages, "returned_us": returned, "ready_us": ready}
        captured, replay = medians(loop, num_messages, True)
        yield {"what": f"captured, {what}", "messages": num_messages, "returned_us": None, "ready_us": captured}
        yield {"what": f"replay, {what}", "messages": num_messages, "returned_us": None, "ready_us": replay}
    probes.call("nccl_close", loop)


def launches() -> Iterator[dict[str, Any]]:
    data, kernel, event = ctypes.c_void_p(), ctypes.c_double(), ctypes.c_double()
    probes.call("malloc", ctypes.c_size_t(4096), ctypes.byref(data))
    probes.call("launches", data, LAUNCHES, ctypes.byref(kernel), ctypes.byref(event))
    probes.call("free", data)
    for what, seconds in (("kernel", kernel), ("event", event)):
        yield {"what": what, "messages": 0, "returned_us": None, "ready_us": seconds.value * 1e6}


def rows() -> Iterator[dict[str, Any]]:
    os.environ.update(gpus.nccl_environment(0))  # of a machine that may have no network
    yield from launches()
    yield from groups("non-blocking", False)
    yield from groups("blocking", True)


if __name__ == "__main__":
    stage.keep(stage.output(__doc__), "nccl_host_cost", COLUMNS, rows())
