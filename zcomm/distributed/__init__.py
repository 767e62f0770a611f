"""Interface to `torch.distributed`: the backend, its options, and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def new_exact_group(ranks: Sequence[int] | None = None, **fields: Any) -> ProcessGroup:
    """Call ``torch.distributed.new_group(ranks, "cpu:gloo,cuda:nccl", **fields)``; without a GPU or NCCL, ``"gloo"``.

    Use it in a world made with ``init_process_group("zcomm", device_id=...)``. There torch splits new NCCL groups off
    the world's backend and expects that to be NCCL's, so ``new_group(backend="nccl")`` raises TypeError. This group
    connects by itself instead. All ranks of the world call it, as for ``new_group``. Raises as ``new_group``.
    """
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    if world is None:
        raise ValueError("new_exact_group: torch.distributed is not initialized")
    backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"
    device, world.bound_device_id = world.bound_device_id, None
    try:
        made: Any = dist.new_group(ranks, backend=backend, **fields)  # torch 2.14: or a number, for other ranks
        group: ProcessGroup = made
        return group
    finally:
        world.bound_device_id = device
