"""Access to DistributedDataParallel's private names: a bucket of gradients knows neither its model nor its group."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

# The model of each parameter: that whose hook was registered last.
_MODELS: MutableMapping[torch.Tensor, Callable[[], DistributedDataParallel | None]] = WeakTensorKeyDictionary()


@functools.cache
def watch_hooks() -> None:
    """Remember the model of each parameter when a later hook is registered."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def register_comm_hook(self: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        register(self, state, hook)
        model = weakref.ref(self)
        _MODELS.update((parameter, model) for parameter in self._module_parameters)

    DistributedDataParallel.register_comm_hook = register_comm_hook  # type: ignore[method-assign]


def model_of(parameter: torch.Tensor) -> DistributedDataParallel | None:
    """Return the model of a bucket's parameter; None if it has registered no hook since :func:`watch_hooks`."""
    return _MODELS.get(parameter, lambda: None)()
