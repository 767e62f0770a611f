"""What the ranks of a group tell each other through its store, before they exchange anything else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from zcomm.distributed import environment


def fresh_keys(store: Any, size: int) -> PrefixStore:
    """A part of ``store`` that no group of an earlier generation of ranks has used; called once by each of ``size``.

    An elastic agent's store outlives the restart of its workers, a process's store its groups: what the last ones left
    there would be taken for news.
    """
    restarted = PrefixStore(f"zcomm/restart{environment.restart_count()}", store)
    generation = (restarted.add("arrivals", 1) - 1) // size
    return PrefixStore(f"generation{generation}", restarted)


def wait_for_all(store: Any, size: int, timeout: float, purpose: str, is_over: Callable[[], bool]) -> list[str]:
    """What every rank has set in ``store``, in rank order, once all have. Raises RuntimeError that names the ranks that
    have not within ``timeout`` seconds; ends early if the group is aborted."""
    keys = [f"{rank}" for rank in range(size)]
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while not store.check(keys):
        if is_over():
            raise RuntimeError(f"aborted before the {purpose}")
        if time.monotonic() > deadline:
            missing = [rank for rank in range(size) if not store.check([f"{rank}"])]
            raise RuntimeError(f"ranks {missing} did not come to the {purpose} within the timeout of {timeout:g} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return [text.decode() for text in store.multi_get(keys)]


def compare(handshakes: list[str], rank: int, options: Any) -> list[int]:
    """Compares version and options of all ranks; returns the node of each rank, as numbers.

    Raises RuntimeError that names the first difference.
    """
    everyone = [json.loads(text) for text in handshakes]
    own = everyone[rank]
    for other, theirs in enumerate(everyone):
        for item in ("version", "options"):
            if theirs[item] != own[item]:
                raise RuntimeError(
                    f"ranks disagree on the {item}: this rank has {own[item]}, rank {other} has {theirs[item]}"
                )
    if options.node_size is not None:
        return [world_rank // options.node_size for world_rank in options.global_ranks_in_group or range(len(everyone))]
    nodes = [theirs["node"] for theirs in everyone]
    first_of = {node: number for number, node in reversed(list(enumerate(nodes)))}
    return [first_of[node] for node in nodes]
