"""Groups whose calls torch's own backends carry, beside those of zcomm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def new_exact_group(ranks: Sequence[int] | None = None, **fields: Any) -> dist.ProcessGroup:
    """``torch.distributed.new_group(ranks, "cpu:gloo,cuda:nccl", **fields)``, or ``"gloo"`` where there is no GPU, or a
    torch without NCCL.

    In a world that was made with ``init_process_group("zcomm", device_id=...)`` torch splits new NCCL groups off the
    world's backend. It expects that to be NCCL's, so ``new_group(backend="nccl")`` raises TypeError there. Here the new
    group connects by itself. All ranks of the world call it, as they do ``new_group``. Raises as that does.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("new_exact_group: torch.distributed is not initialized")
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    device, world.bound_device_id = world.bound_device_id, None
    try:
        group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, **fields)
        return group
    finally:
        world.bound_device_id = device
