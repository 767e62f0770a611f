"""What an outer step raises where a site is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def lost_ranks_named(action: str) -> Iterator[None]:
    """Raise torch's DistBackendError in place of Gloo's bare RuntimeError, of a rank that is gone or late.

    ``action``: what the ranks did meanwhile."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # it says by itself what went wrong
            raise
        raise dist.DistBackendError(f"lost a rank while the ranks {action}: {error}") from error
