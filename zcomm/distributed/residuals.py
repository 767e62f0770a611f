"""Residuals of error feedback for calls of the torch backend."""

from __future__ import annotations

import torch

from zcomm.distributed.binding import _c10d
from zcomm.distributed.cuda_graphs import keep_for_replays
from zcomm.feedback import ErrorFeedback


def residual_of(
    feedback: ErrorFeedback, key: str, layout: str, num_bytes: int, device: torch.device
) -> tuple[torch.Tensor, float, bool]:
    """Return the residual of the next reduction of this layout, for one call of it, its decay, and whether it is
    empty: see :meth:`ErrorFeedback.use`."""
    is_captured = _c10d.capture_of(device) != 0
    data, empty = feedback.use(
        key, layout, num_bytes, lambda size: torch.empty(size, dtype=torch.uint8, device=device), is_captured
    )
    if is_captured:
        keep_for_replays(data)
    return data, feedback.decay, empty
