"""Megatron-core and Megatron-FSDP: their data parallelism sends compressed weights and gradients, all else is exact.

    zcomm.megatron.install(weights="lossless")
    pretrain(...)

Megatron's modules for data parallelism send weights and gradients inside of torch's ``_coalescing_manager``.
:func:`install` replaces that manager there by one that knows what its calls carry.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from zcomm._formats import Format
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import known
from zcomm.fsdp.compression import check_formats

_CORE = "megatron.core.distributed.param_and_grad_buffer"
_FSDP = (
    "megatron_fsdp.param_and_grad_buffer",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer",
)
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"

# Whether no optimizer steps the slots that are gathered in place on this thread now.
_are_copies: ContextVar[bool] = ContextVar("zcomm.megatron", default=False)


def install(
    *,
    weights: Literal["lossless"] | Format | None = None,
    gradients: Format | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Compress what Megatron-core's DistributedDataParallel and Megatron-FSDP gather and reduce, from now on.

    If there is no process group yet, makes the default one by :func:`torch.distributed.init_process_group`, from the
    launcher's variables, on the GPU of ``LOCAL_RANK``. Megatron keeps a group that exists. Call it once, on all ranks.

    Weights are copies that no optimizer steps: bfloat16 and float16 parameters of the distributed optimizer, and all
    that Megatron-FSDP gathers into other memory. Parameters of float32, and bfloat16 ones whose remainders the
    precision-aware optimizer stores, are themselves stepped: they stay exact. FP8 parameters are bytes, and exact.

    Args:
        weights: a format such as ``"int8:256"``; None: that of the process group. ``"exact"``: as torch sends them.
            ``"lossless"``: exact, bit for bit, as lossless differences to what the ranks of a node keep from the last
            gather, also of FP8 parameters and of stepped ones in 16 bits. A rank of L in its node keeps an L-th of the
            weights. On a GPU the host waits for the GPU once per gather.
        gradients: formats intra-node, then inter-node, or one for both; None: those of the process group's
            ``reduce_scatter``. They apply to all-reduces of gradients, too.
        timeout: of the default process group, if this makes it; None: torch's default.

    Raises:
        ValueError: a format is unknown; the default group has another backend; at a gather, parameters of float32 with
            ``"lossless"``.
        ImportError: neither Megatron-core nor Megatron-FSDP is installed, or this release calls collectives elsewhere.
        RuntimeError: it was called before with other settings.
    """
    check_formats(weights, gradients)
    settings = _Settings(weights, gradients)
    if _installed and _installed[0] != settings:
        raise RuntimeError(f"zcomm.megatron: expected {_installed[0]} as before, got {settings}")
    if not _installed:
        _take_over(settings)
        _installed.append(settings)
    if not dist.is_initialized():
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("zcomm", timeout=timeout)
    backend_of()  # raises for a default group with another backend, which Megatron would keep


@dataclass(frozen=True)
class _Settings:
    weights: str | None
    gradients: str | None
    # By the memory of the shard: its storage and the place there.
    _gathers: dict[tuple[int, int], _LosslessGather] = field(default_factory=dict, compare=False, repr=False)

    def known(self) -> AbstractContextManager[Any]:
        weights = "exact" if self.weights == "lossless" else self.weights  # what is not sent as differences
        of_weights = {} if weights is None else {"_weights": weights}
        return known(copies=_are_copies.get(), _gradients=self.gradients or "", **of_weights)

    def gather_of(self, shard: torch.Tensor) -> _LosslessGather:
        key = int(shard.untyped_storage()._cdata), int(shard.storage_offset())
        if (found := self._gathers.get(key)) is not None and not found.is_gone():
            return found
        for other, gather in list(self._gathers.items()):
            if gather.is_gone():  # so is what was kept of it
                del self._gathers[other]
        self._gathers[key] = made = _LosslessGather(shard)
        return made


_installed: list[_Settings] = []


def _take_over(settings: _Settings) -> None:
    found = [module for name in (_CORE, *_FSDP) if (module := _find(name)) is not None]
    if not found:
        raise ImportError("zcomm.megatron: expected megatron-core or megatron-fsdp to be installed, got neither")
    for module in found:
        if not hasattr(module, "_coalescing_manager"):
            raise ImportError(f"zcomm.megatron: expected {module.__name__} to import _coalescing_manager, got none")
        module._coalescing_manager = functools.partial(_coalescing, settings, module._coalescing_manager)
        if module.__name__ == _CORE:
            _around(module._ParamAndGradBucketGroup, "start_param_sync", _has_copies)
            _mark_stepped(importlib.import_module(_OPTIMIZER).DistributedOptimizer)
        else:
            _around(module.AllGatherPipeline, "all_gather_params", lambda pipeline: _has_masters(pipeline.buffer))
            # Without overlap Megatron-FSDP makes these calls one by one.
            gather = module.AllGatherPipeline, "async_bucket_gather", lambda pipeline: _has_masters(pipeline.buffer)
            _around(*gather, settings)
            for name in ("reduce_scatter_gradients", "all_reduce_gradients"):
                _around(module.ParamAndGradBuffer, name, _has_masters, settings)
            _keep_padding_zero(module.DataParallelBuffer)


def _find(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _around(owner: Any, name: str, are_copies: Callable[[Any], bool], settings: _Settings | None = None) -> None:
    """Wrap a method: gathers in it are of copies if ``are_copies(self)``. With ``settings`` all its collectives carry
    weights or gradients."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        token = _are_copies.set(are_copies(self))
        try:
            with settings.known() if settings is not None else contextlib.nullcontext():
                return method(self, *arguments, **named)
        finally:
            _are_copies.reset(token)

    setattr(owner, name, call)


def _has_copies(bucket_group: Any) -> bool:
    """Tell whether Megatron-core's optimizer steps other values than a bucket group's parameters."""
    buckets = [bucket for bucket in bucket_group.buckets if bucket.param_data is not None]
    return all(bucket.param_data.itemsize == 2 and not hasattr(bucket, "_zcomm_stepped") for bucket in buckets)


def _mark_stepped(optimizer: Any) -> None:
    """Mark the buckets of later optimizers whose 16-bit parameters are the upper halves of the masters."""
    initialize = optimizer.__init__

    @functools.wraps(initialize)
    def init(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        config = self.config
        if getattr(config, "use_precision_aware_optimizer", False) and getattr(config, "store_param_remainders", True):
            for bucket in (bucket for buffer in self.buffers for bucket in buffer.buckets):
                bucket._zcomm_stepped = True

    optimizer.__init__ = init


def _has_masters(buffer: Any) -> bool:
    """Tell whether Megatron-FSDP's optimizer steps other values than the model's weights."""
    return all(group.main_weight_buffer is not None for group in buffer.parameter_groups if group.requires_grad)


def _keep_padding_zero(owner: Any) -> None:
    """Zero what Megatron-FSDP leaves as it was between the values of a buffer, which shares blocks with values."""
    init_data, fetch_bucket = owner.init_data, owner.fetch_bucket

    @functools.wraps(init_data)
    def init(self: Any, data: torch.Tensor) -> None:
        init_data(self, data.zero_())  # its values come later

    @functools.wraps(fetch_bucket)
    def fetch(self: Any, *arguments: Any, **named: Any) -> Any:
        bucket = fetch_bucket(self, *arguments, **named)
        for begin, end in _gaps_of(self):
            bucket.data[begin:end].zero_()
        return bucket

    owner.init_data, owner.fetch_bucket = init, fetch


def _gaps_of(buffer: Any) -> list[tuple[int, int]]:
    """Return where a bucket of Megatron-FSDP has no values."""
    found: list[tuple[int, int]] | None = getattr(buffer, "_zcomm_gaps", None)
    if found is None:
        places = [(item.global_data_index, item.size) for item in buffer.item_index_map.values()]
        end, found = buffer.bucket_index.global_data_index, []
        for begin, size in [*sorted(places), (end + buffer.bucket_index.size, 0)]:
            if begin > end:
                found.append((end, begin))
            end = max(end, begin + size)
        buffer._zcomm_gaps = found
    return found


@contextlib.contextmanager
def _coalescing(
    settings: _Settings,
    manager: Callable[..., AbstractContextManager[Any]],
    group: dist.ProcessGroup | None = None,
    device: Any = None,
    async_ops: bool = False,
) -> Iterator[Any]:
    """Do as torch's ``_coalescing_manager``, with calls that are known to carry weights or gradients."""
    with settings.known(), manager(group, device, async_ops) as works:
        yield works
        if settings.weights == "lossless":
            started = _gather_lossless(settings, group or dist.group.WORLD)
            for work in started:
                works.append(work) if async_ops else work.wait()


def _gather_lossless(settings: _Settings, group: Any) -> list[dist.Work]:
    """Start the gathers that torch's manager has noted and that can be sent as differences, and take them out."""
    noted: list[Any] = dist.distributed_c10d._world.pg_coalesce_state.get(group, [])
    backend, started = backend_of(group), []
    for call in list(noted):
        if call.op.__name__.startswith("all_gather"):
            work = settings.gather_of(call.tensor).start(backend, call.dst_tensor, call.tensor)
            if work is not None:
                noted.remove(call)
                started.append(work)
    return started


class _LosslessGather:
    """The gathers of one shard, each as differences to what the ranks of a node have kept of the one before."""

    def __init__(self, shard: torch.Tensor) -> None:
        self._memory: Any = StorageWeakRef(shard.untyped_storage())  # type: ignore[no-untyped-call]
        self._plan: _c10d.Operation | None = None
        self._bound: _c10d.Operation | None = None
        self._site = _c10d.Site("megatron", [])

    def is_gone(self) -> bool:
        """Tell whether the shard's memory was freed: other values may have its address."""
        return bool(self._memory.expired())

    def start(self, backend: _c10d.ProcessGroup, output: torch.Tensor, shard: torch.Tensor) -> dist.Work | None:
        """Return None if the options would not compress the call, or for an odd number of bytes. Raises ValueError for
        values of 32 bits."""
        if output.itemsize == 1:
            if shard.numel() % 2:
                return None
            output, shard = output.view(torch.uint16), shard.view(torch.uint16)
        with known(_weights="int8:256"):  # whatever the group has
            if isinstance(backend.plan(output, shard), _c10d.Verdict):
                return None
        if output.itemsize > 2:
            raise ValueError(
                f"weights: expected parameters of 16 bits, or bytes, with 'lossless', got {output.dtype}: use bfloat16 "
                "parameters, or weights='exact'"
            )
        plan = backend.plan_lossless(output, shard, like=self._plan)
        if self._bound is None or plan is not self._plan:
            memory = torch.empty(plan.secondary_bytes, dtype=torch.uint8, device=output.device)
            self._plan, self._bound = plan, plan.bound_to(memory)
        if not output.is_cpu:
            backend.prepare([(self._bound, shard, self._site)]).wait()
        return self._bound.run(output, shard, site=self._site, async_op=True)
