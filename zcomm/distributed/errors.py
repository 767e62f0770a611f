"""What a group raises beside torch's own errors."""

from __future__ import annotations

import torch.distributed as dist


class CorruptedWireError(dist.DistBackendError):  # type: ignore[misc]  # Any where there is no torch
    """A checksum of the option ``verify`` shows that other bytes have arrived than were sent.

    In a collective, each rank whose call fails because of it raises it. The text quotes the rank that found it.
    """

    __module__ = "zcomm"
