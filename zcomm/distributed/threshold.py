"""The ``min_bytes`` of ``compress="auto"``, by the slowest link between nodes, where the user gives none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from zcomm._network import network_rate
from zcomm._units import rate_text, size_text
from zcomm.distributed.binding import _c10d

DEFAULT = _c10d.Options().min_bytes

# Cost of a compressed call on a GPU besides its bytes: a call of 256 KiB takes so much longer than an exact one, plus
# what its bytes save at the rate of calls of 1 GiB (bench/results/collectives-h*.jsonl, ranks 2x1). All-gathers,
# reduce-scatters and halves of all-reduces give 183, 149 and 94 µs on an H100, 46, 114 and 95 µs on an H200.
COST_SECONDS = 100e-6
SAVED_SHARE = 0.5  # of the bytes, in the widest of the default formats: bfloat16 in int8
LEAST = 4 * 1024  # smaller calls send a packet or two to each peer, compressed or not
MOST_ON_GPUS = 1024 * 1024  # over many nodes larger calls gain by the planner's model, however fast the link


def this_host() -> dict[str, Any]:
    """What a rank tells the others: bytes per second of its network, None if unknown, and whether it has GPUs."""
    return {"rate": network_rate(), "gpus": torch.cuda.device_count() > 0}


def choose(hosts: Sequence[dict[str, Any]], num_nodes: int) -> tuple[int, str]:
    """Return the size for a group whose ranks are on ``hosts``, as :func:`this_host` has them, and why."""
    most = MOST_ON_GPUS if all(host["gpus"] for host in hosts) else DEFAULT
    unknown = [rank for rank, host in enumerate(hosts) if not host["rate"]]
    if num_nodes == 1:
        num_bytes, reason = most, "all ranks are in one node"
    elif unknown:
        num_bytes, reason = DEFAULT, f"no network card of rank {unknown[0]}'s host tells its speed"
    else:
        rate = min(host["rate"] for host in hosts)
        even = 2 ** round(math.log2(rate * COST_SECONDS / SAVED_SHARE))
        num_bytes, reason = min(max(even, LEAST), most), f"the slowest link between nodes has {rate_text(rate)}"
    return num_bytes, f"calls below {size_text(num_bytes)} stay exact, as {reason}"
