"""Residuals of error feedback for calls of the torch backend."""

from __future__ import annotations

import torch

from zcomm.distributed.binding import _c10d
from zcomm.feedback import ErrorFeedback


def residual_of(feedback: ErrorFeedback, key: str, layout: str, num_bytes: int, device: torch.device) -> _c10d.Residual:
    """Return the residual of the next reduction of this layout, for one call of it: see :meth:`ErrorFeedback.use`."""
    data, empty = feedback.use(
        key,
        layout,
        num_bytes,
        lambda size: torch.empty(size, dtype=torch.uint8, device=device),
        is_captured=_c10d.capture_of(device) != 0,
    )
    return _c10d.Residual(data, decay=feedback.decay, empty=empty)
