"""Access to torch's private names for broadcasts of states. No other module reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import _state_dict_utils

from zcomm.distributed import _fsdp1
from zcomm.distributed.overrides import exact

# FSDP1's optimizer states, full state dicts, first weights and buffers of DDP and FSDP
_BROADCASTS: tuple[tuple[Any, str], ...] = (
    _fsdp1.STATE_BROADCAST,
    (_state_dict_utils, "_broadcast_tensors"),
    (dist, "_broadcast_coalesced"),
)


@functools.cache
def keep_states_exact() -> None:
    """Keep later broadcasts of checkpoints, first weights and buffers exact, whatever the options say of broadcasts."""
    for owner, name in _BROADCASTS:
        setattr(owner, name, _forced_exact(getattr(owner, name)))


def _forced_exact(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with exact():
            return function(*arguments, **named)

    return call
