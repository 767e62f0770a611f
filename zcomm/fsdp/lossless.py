"""Exact weights, of 16 bits or as bytes of narrower ones, by lossless differences between nodes.

In each node the holder of a rank's shard is the rank of the same local rank, modulo the ranks of the node. Holders keep
the values of the last gather. The owner of a shard sends what has changed since; inside a node the values are sent
exactly: ``make_lossless_gather`` in include/zcomm/operation.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zcomm.distributed.groups import backend_of
from zcomm.fsdp.gathers import GatherCall

if TYPE_CHECKING:
    from zcomm.distributed.binding import _c10d


def plan_lossless(name: str, call: GatherCall, like: _c10d.Operation | None) -> _c10d.Operation:
    """How the gather of the module ``name`` goes by differences: ``like``, if it is like that one.

    Raises ValueError where it cannot.
    """
    try:
        parts = [(part.numel() // call.group.size(), True) for part in call.parts]
        return backend_of(call.group).plan_lossless(call.target, call.source, parts=parts, like=like)
    except ValueError as error:
        is_wide = call.shard.dtype in (torch.float32, torch.float64)
        hint = "; MixedPrecisionPolicy(param_dtype=torch.bfloat16) saves more than they would" if is_wide else ""
        raise ValueError(f"weights: {name} cannot be sent as 'lossless': {error}{hint}") from None


def prepare(
    group: dist.ProcessGroup, gathers: Sequence[tuple[_c10d.Operation, torch.Tensor, _c10d.Site]], async_op: bool
) -> None:
    """Encode these shards before their next gathers; wait for the GPU once, for all sizes."""
    backend_of(group).prepare(gathers, async_op=async_op).wait()
