"""Access to FSDP1's private names, in torch 2.11 to 2.15. No other module reads them.

A *handle* is a FlatParamHandle: the flat parameter of one wrapped module, and how it is gathered and reduced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import _flat_param, _optim_utils, _runtime_utils
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle

#: What surrounds a collective of a handle.
Within: TypeAlias = Callable[[Any], AbstractContextManager[Any]]

#: The module and the name of the function that broadcasts a tensor of an optimizer's full state.
STATE_BROADCAST: tuple[Any, str] = (_optim_utils, "_broadcast_state")

_Handle: Any = FlatParamHandle
_TRAINING = (HandleTrainingState.FORWARD, HandleTrainingState.BACKWARD_PRE, HandleTrainingState.BACKWARD_POST)


def around(*, gathers: Within, reductions: Within) -> None:
    """Wrap later gathers of weights for a forward or backward pass, and reductions of gradients. What else gathers
    weights, such as full state dicts, is not wrapped, and never gets what a pass has gathered."""
    gather, before, reduce = _Handle._all_gather_flat_param, _Handle.pre_unshard, _runtime_utils._reduce_grad

    @functools.wraps(gather)
    def all_gather_flat_param(self: Any, *arguments: Any) -> Any:
        self._zcomm_of_pass = self._training_state in _TRAINING
        if not self._zcomm_of_pass:
            return gather(self, *arguments)
        with gathers(self):
            return gather(self, *arguments)

    @functools.wraps(before)
    def pre_unshard(self: Any) -> Any:
        is_of_pass = getattr(self, "_zcomm_of_pass", False)
        if self._training_state == HandleTrainingState.SUMMON_FULL_PARAMS and is_of_pass and not self.needs_unshard():
            self.reshard(True)
        return before(self)

    @functools.wraps(reduce)
    def reduce_grad(state: Any, handle: Any) -> Any:
        with reductions(handle):
            return reduce(state, handle)

    _Handle._all_gather_flat_param, _Handle.pre_unshard = all_gather_flat_param, pre_unshard
    _runtime_utils._reduce_grad = reduce_grad


def pad_with_zeros() -> None:
    """Fill the gaps between later parameters with zeros. torch's 42 would set the scale of the weights beside it."""
    _flat_param._FLAT_PARAM_PADDING_VALUE = 0


def process_group_of(handle: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = handle.process_group
    return group


def values_of(handle: Any) -> tuple[torch.Tensor, object]:
    """Return this rank's values, as the next gather sends them, and a version of them while they are frozen: of the
    shard, and of the original parameters, which are views of it with counters of their own."""
    flat = handle.flat_param
    if flat.requires_grad:
        return flat.data, None
    views = [getattr(flat, "_local_shard", flat), *(getattr(flat, "_params", None) or ())]
    return flat.data, [flat._version, *(view._version for view in views)]


def places_of(handle: Any) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield for each parameter its name in the model, and its module with the name there."""
    for info in handle.flat_param._param_infos:
        name = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        yield name, (info.module, info.param_name)
