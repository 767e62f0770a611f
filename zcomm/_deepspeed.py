"""Recognition of DeepSpeed's calls that carry weights or gradients, by its private names in release 0.19. Checkpoints,
gathered parameters and norms, which make the same calls elsewhere, are not among them."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import find_backend
from zcomm.distributed.overrides import forced_exact, known
from zcomm.fsdp.codes import Part, find_codes, tell_of_codes

_log = logging.getLogger("zcomm")

_PARTITIONED = "zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_ZERO2 = "zero.stage_1_and_2.DeepSpeedZeroOptimizer"


def watch_deepspeed() -> None:
    """Let the engines of ZeRO-1, 2 and 3 compress their weights and gradients, if DeepSpeed is imported by now."""
    if "deepspeed" in sys.modules:
        _watch()


@functools.cache
def _watch() -> None:
    """The weights are 16-bit copies of masters, or gathered into other memory."""
    gradients: Callable[..., Any] = lambda *_: known(_gradients="")  # noqa: E731  also of all-reduces
    for name, within in (
        ("utils.all_gather_into_tensor_dp_groups", lambda *_: known()),
        (f"{_PARTITIONED}._PartitionedParameterCoordinator__all_gather_params_", _fetch),
        ("zero.stage3.reduce_scatter_coalesced", gradients),
        (f"{_ZERO2}.allreduce_bucket", gradients),
        (f"{_ZERO2}.gradient_reduction_w_predivide", gradients),
    ):
        _around(name, within)
    try:
        padding: Any = importlib.import_module("deepspeed.runtime.comm.coalesced_collectives")
    except ImportError:
        _log.warning("DeepSpeed: expected coalesced_collectives, got none: padding may ruin the gradients beside it")
    else:
        padding.torch = _Zeros()


class _Zeros:
    """The torch of the module that pads gradients by ``torch.empty``: garbage would ruin the values in its block."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "zeros" if name == "empty" else name)


def _around(name: str, within: Callable[..., AbstractContextManager[Any]]) -> None:
    """Wrap a function below deepspeed.runtime in ``within(its arguments)``. Another release may lack it: then its calls
    stay exact, and a line tells."""
    path, _, function = name.rpartition(".")
    module, _, owner = path.rpartition(".") if path[path.rfind(".") + 1].isupper() else (path, "", "")
    try:
        found: Any = importlib.import_module(f"deepspeed.runtime.{module}")
        found = getattr(found, owner) if owner else found
        call = getattr(found, function)
    except (ImportError, AttributeError):
        _log.warning("DeepSpeed: expected deepspeed.runtime.%s, got none: its calls stay exact", name)
        return

    @functools.wraps(call)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with within(*arguments):
            return call(*arguments, **named)

    setattr(found, function, wrapped)


def _fetch(_: Any, params: Any, *__: Any) -> AbstractContextManager[Any]:
    """A gather of ZeRO-3's parameters for a forward or backward pass. Parameters of one dtype share a call, so that it
    is exact as a whole if one of them has codes."""
    params = sorted(params, key=lambda param: param.ds_id)  # DeepSpeed gives sets, in an order of this process
    for param in params:
        _zero_padding(param)
    new = [param for param in params if not hasattr(param, "_zcomm_has_codes")]
    for group in dict.fromkeys(param.ds_process_group for param in new):
        backend = find_backend(group)
        if backend is not None:
            _note_codes([param for param in new if param.ds_process_group == group], group, backend)
    has_codes = any(getattr(param, "_zcomm_has_codes", False) for param in params)
    return forced_exact(_c10d.Verdict.not_a_float) if has_codes else known()


def _zero_padding(param: Any) -> None:
    """Zero the end of a shard that is longer than its values: after each step it has what DeepSpeed allocated there."""
    shard, size = param.ds_tensor, param.partition_numel()
    num_values = max(0, param.ds_numel - dist.get_rank(param.ds_process_group) * size)
    if shard.numel() == size and num_values < size:
        shard.data[num_values:].zero_()


def _note_codes(params: Sequence[Any], group: Any, backend: _c10d.ProcessGroup) -> None:
    parts = [
        Part(f"parameter {param.ds_id}", (), param.ds_tensor, None, not param.requires_grad, param) for param in params
    ]
    flags, found = find_codes(parts, group)
    for param, flag in zip(params, flags, strict=True):
        param._zcomm_has_codes = flag
    tell_of_codes(found, "DeepSpeed", backend)
