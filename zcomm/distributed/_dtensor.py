"""Access to DTensor's private names, in torch 2.11 to 2.15. No other module reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.tensor import _api, _dispatch, _redistribute

# Modules that import the function under their own name.
_CALLERS: tuple[Any, ...] = (_redistribute, _api, _dispatch)


def around_redistributions(within: Callable[[], AbstractContextManager[Any]]) -> None:
    """Wrap all later redistributions of DTensor in the context manager ``within()``. Compiled graphs bypass it: their
    tensors are fake during tracing, and when they run they call the collectives directly."""
    redistribute = _redistribute.redistribute_local_tensor

    @functools.wraps(redistribute)
    def redistribute_local_tensor(*arguments: Any, **named: Any) -> Any:
        with within():
            return redistribute(*arguments, **named)

    for caller in _CALLERS:
        caller.redistribute_local_tensor = redistribute_local_tensor
