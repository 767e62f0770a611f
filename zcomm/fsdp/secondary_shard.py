"""Secondary shards: what a node keeps of the weights, so that they cross nodes once, however often they are gathered.

The idea is hpZ of ZeRO++ (https://arxiv.org/abs/2306.10209): the ranks of a node keep the gathered weights among them,
so that the next gather stays inside the node. Each of L ranks of a node keeps an L-th: compressed bytes as they came
over the wire, or, of weights that are sent as lossless differences, values.

These are exact weights of 16 bits, or bytes of narrower ones. The owner of a shard sends what has changed since the
values that the holders keep; inside a node the values are sent exactly: ``make_lossless_gather`` in
include/zcomm/operation.hpp.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from zcomm.distributed import _fsdp2
from zcomm.distributed.binding import _c10d
from zcomm.distributed.cuda_graphs import keep_for_replays
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import overridden
from zcomm.distributed.single import all_gather_single
from zcomm.fsdp.fused import Deferred, in_memory
from zcomm.fsdp.gather_call import GatherCall, finished
from zcomm.fsdp.notices import Notices
from zcomm.fsdp.rule import ModuleStats

_log = logging.getLogger("zcomm")

#: Version of the weights in a secondary shard: of each param, and hashes of this rank's shard in host memory. Equal
#: ones are of the same weights.
WeightsVersion: TypeAlias = tuple[list[tuple[int, ...]], list[int]]

#: The gather of a shard, the shard, and the site that sends it.
Prepared: TypeAlias = "tuple[_c10d.Operation, torch.Tensor, _c10d.Site]"

#: Encodes the differences of a shard that gathers weights of a version, and of others.
Prepare: TypeAlias = "Callable[[LosslessSecondaryShard, GatherCall, WeightsVersion], None]"


# Of a GPU's memory. GPUs of a kind report totals that differ a little, and all ranks must decide alike: of a total
# whole units count.
DEFAULT_PERCENT = 5
_UNIT = 2 << 30


class MemoryBudget:
    """What ``max_bytes`` leaves for a model's secondary shards. None: 5 % of a GPU's memory if ``is_bounded``, as much
    as they need on CPUs."""

    def __init__(self, max_bytes: int | None, is_bounded: bool = True) -> None:
        self._max_bytes, self._is_bounded = max_bytes, is_bounded
        self._used_bytes = 0  # the largest of all ranks, so that all decide alike

    def limit(self, device: torch.device) -> int | None:
        if self._max_bytes is not None or not self._is_bounded or device.type != "cuda":
            return self._max_bytes
        if not torch.cuda.is_available():
            return None
        total = int(torch.cuda.get_device_properties(device).total_memory)
        return total // _UNIT * _UNIT * DEFAULT_PERCENT // 100

    def reserve(self, name: str, num_bytes: int, device: torch.device) -> bool:
        """Take that many bytes, and return True, if there are as many."""
        limit = self.limit(device)
        if limit is None or self._used_bytes + num_bytes <= limit:
            self._used_bytes += num_bytes
            return True
        if self._max_bytes is not None:  # else one line tells of all modules
            _log.warning(
                "%s goes without a secondary shard: its %d bytes would exceed max_bytes=%d, of which %d are in use",
                name, num_bytes, limit, self._used_bytes,
            )  # fmt: skip
        return False

    def give_back(self, num_bytes: int) -> None:
        self._used_bytes -= num_bytes


class Agreement:
    """Whether any rank has changed a module's weights. A write that all ranks run may reach the rows of some only."""

    def __init__(self, name: str) -> None:
        self._name, self._site = name, _c10d.Site(name, [])

    def any(self, changed: bool, group: dist.ProcessGroup) -> bool:
        """Return True on all ranks of the group if it is on one. They wait for each other.

        Raises RuntimeError if they ask about different modules."""
        module = zlib.crc32(self._name.encode()) & 0x7FFF
        answers = torch.empty(group.size(), dtype=torch.uint16)
        own = torch.tensor([module << 1 | changed], dtype=torch.uint16)
        backend_of(group).gather_numbers(answers, own, site=self._site).wait()
        given: list[int] = answers.tolist()
        others = [rank for rank, answer in enumerate(given) if answer >> 1 != module]
        if others:
            raise RuntimeError(
                f"ranks called different things: this rank gathers the weights of {self._name}, but ranks {others} of "
                "its group gather another module: run the same modules in the same order on all ranks"
            )
        return any(answer & 1 for answer in given)


class SecondaryShard:
    """Secondary shard of one parameter group, which gathers from it if possible. It keeps the wires of weights in a
    format: what is gathered from them has the same bits as the first gather.

    ``params``: those of FSDP2. ``site``: of gathers across nodes. ``counted``: counts gathers."""

    def __init__(
        self,
        params: Sequence[Any],
        notices: Notices,
        site: _c10d.Site,
        counted: ModuleStats,
        budget: MemoryBudget,
        checks: bool,
    ) -> None:
        self._params, self._notices, self._site, self._counted = params, notices, site, counted
        self._budget, self._checks = budget, checks
        self.intra_node = _c10d.Site(notices.name, [])
        self._agreement = Agreement(notices.name)
        self._bound: _c10d.Operation | None = None  # the gather, bound to what it keeps
        self._plan: _c10d.Operation | None = None  # the same gather, which keeps nothing
        self._gathered_version: WeightsVersion | None = None  # of the weights that are kept
        self._mark: _c10d.ShardMark | None = None  # of the weights that are kept, on a GPU
        self._capture = 0  # the CUDA graph that the last gather was recorded in
        self._reserved: int | None = None  # of max_bytes: 0 if it does not fit, None if it is not decided

    def keeps_wires(self) -> bool:
        """Tell whether later gathers of the same weights use the wires that this one keeps."""
        return self._reserved != 0

    def _is_worth_it(self, plan: _c10d.Operation) -> bool:
        """Inside one node no gather crosses nodes: what is kept would spare an encoding alone."""
        return not plan.ranks.startswith("1x")

    def _plan_of(self, call: GatherCall, plan: _c10d.Operation) -> _c10d.Operation:
        """The gather that keeps, where ``plan`` is the one in a format."""
        return plan

    def _gather_across(self, call: GatherCall, bound: _c10d.Operation, version: WeightsVersion) -> Any:
        """From the shards of all ranks."""
        self._note(call.shard)
        return call.run(bound, self._site)

    def _gather_without(self, call: GatherCall) -> Any:
        """Where weights cannot be watched, or max_bytes is used up."""
        return call.run_alone(self._site)

    def _can_be_captured(self) -> bool:
        return self._bound is not None

    @property
    def memory(self) -> torch.Tensor | None:
        """The secondary shard: uint8, or None before the first gather that keeps it."""
        return self._bound.secondary if self._bound else None

    def add_to(self, counted: ModuleStats) -> ModuleStats:
        """Return the group's counters with what only this shard knows."""
        return replace(counted, memory_bytes=0 if self.memory is None else self.memory.numel())

    def gather(self, call: GatherCall) -> Any:
        self.check_mark()
        is_captured = self._is_captured(call.output.device)
        if isinstance(call.plan, _c10d.Verdict):
            return call.run_alone(self._site)
        version = self._version_of(call.shard)
        if version is None or (is_captured and not self._can_be_captured()):
            self._counted.gathers_plain += 1
            return self._gather_without(call)
        if not self._is_worth_it(call.plan):
            self._reserved = 0
            return call.run_alone(self._site)
        plan, device = self._plan_of(call, call.plan), call.output.device
        if not self._fits(plan.largest_secondary_bytes, device):  # of the rank that needs most, so all decide alike
            self._counted.gathers_beyond_limit += 1
            return self._gather_without(call)
        bound = self._bind(plan, device)
        if not self._must_cross(call, version):
            self._counted.gathers_intra_node += 1
            self._check(call.shard)
            return call.run(bound, self.intra_node, again=True)
        self._gathered_version = None  # while it is being written
        self._counted.gathers_inter_node += 1
        work = self._gather_across(call, bound, version)
        self._gathered_version = version
        return work

    def _must_cross(self, call: GatherCall, version: WeightsVersion) -> bool:
        """Tell whether weights may have changed since they were kept. On CPUs all ranks ask each other, unless all of
        them know; on a GPU the host does not wait, and a kernel compares."""
        changed = version != self._gathered_version
        asks = self._checks and self._gathered_version is not None and call.output.device.type == "cpu"
        return self._agreement.any(changed, call.group) if asks else changed

    def _bind(self, plan: _c10d.Operation, device: torch.device) -> _c10d.Operation:
        """``plan``, bound to memory, which is that of the gather before if it is as large. Outdates what another plan
        has kept."""
        if self._bound is None or self._plan is not plan:
            self.outdate()
            memory = self.memory
            if memory is None or memory.numel() != plan.secondary_bytes or memory.device != device:
                memory = torch.empty(plan.secondary_bytes, dtype=torch.uint8, device=device)
            self._bound, self._plan = plan.bound_to(memory), plan
        return self._bound

    def outdate(self, forget_mark: bool = False) -> None:
        self._gathered_version = None
        if forget_mark:
            self._mark = None

    def forget(self) -> None:
        self._budget.give_back(self._reserved or 0)
        self.outdate(forget_mark=True)
        self._reserved = self._bound = self._plan = None

    def _fits(self, num_bytes: int, device: torch.device) -> bool:
        if 0 < (self._reserved or 0) < num_bytes:
            self.forget()
        if self._reserved is None:
            self._reserved = num_bytes if self._budget.reserve(self._notices.name, num_bytes, device) else 0
        return self._reserved > 0 or num_bytes == 0

    def _is_captured(self, device: torch.device) -> bool:
        """Tell whether a CUDA graph captures this gather.

        The first gather in a graph crosses nodes, because its replays need the weights of their time. So does the first
        gather after a capture, because replays change the kept wires without the host's knowledge."""
        capture = _c10d.capture_of(device)
        if capture != self._capture:
            self._capture = capture
            self.outdate()
        if capture != 0 and self.memory is not None:
            keep_for_replays(self.memory)
        return capture != 0

    def _note(self, shard: torch.Tensor) -> None:
        """Record the hash of ``shard`` on a GPU, where kernels compare it later so that the host need not wait."""
        if self._checks and not shard.is_cpu:
            self._mark = self._mark or _c10d.ShardMark(shard.device)
            self._mark.note(shard)
            if self._capture != 0:
                keep_for_replays(self._mark)

    def _check(self, shard: torch.Tensor) -> None:
        if self._mark is not None and self.memory is not None:
            self._mark.check(shard, self.memory)

    def check_mark(self) -> None:
        """Raise RuntimeError if a kernel has found a change of weights that PyTorch did not count."""
        if self._mark is not None and self._mark.has_changed:
            raise RuntimeError(
                f"{self._notices.name}: its weights were modified without a version bump, for example through .data; "
                "gathers since then returned NaN, or stale bytes where the dtype has no NaN. Call "
                "Compression.invalidate() on all ranks after such a change. Bytes that a cast makes at random "
                "require keep_in_node=False"
            )

    def _version_of(self, shard: torch.Tensor | None = None) -> WeightsVersion | None:
        """Return the version of the weights, or None if PyTorch does not count changes."""
        params = [version for version in map(_fsdp2.version_of, self._params) if version is not None]
        if len(params) < len(self._params):
            return None
        # Hashes on the CPU only: on a GPU kernels check the values, so that the host need not wait.
        is_hashed = self._checks and self._reserved != 0
        if not is_hashed or shard is None or not shard.is_cpu:
            return params, []
        parts = shard.buffer.parts if isinstance(shard, Deferred) else [shard]
        return params, [_c10d.hash_of(part) for part in parts]


class LosslessSecondaryShard(SecondaryShard):
    """Secondary shard of exact values, which lossless differences bring up to date."""

    def __init__(self, *shared: Any, prepare: Prepare) -> None:
        super().__init__(*shared)
        self._prepare = prepare
        self._lossless: _c10d.Operation | None = None  # the last plan, bound or not
        self._num_weights = 0  # of this rank's shard, or bytes of narrower ones
        self._group_name = ""  # of the last difference
        self._prepared_version: WeightsVersion | None = None  # of the weights that the next gather will send

    def add_to(self, counted: ModuleStats) -> ModuleStats:
        counted, bound = super().add_to(counted), self._bound
        if bound is None:
            return counted
        bits_per_weight = 8 * bound.sent_bytes / self._num_weights if self._num_weights else 0.0  # with headers
        return replace(counted, generation=bound.generation, bits_per_weight=bits_per_weight)

    @property
    def needs_sizes(self) -> bool:
        """NCCL needs the size of a difference on the host before it is sent."""
        return self.memory is not None and not self.memory.is_cpu

    def keeps_wires(self) -> bool:
        return False

    def _is_worth_it(self, plan: _c10d.Operation) -> bool:
        return True  # "lossless" is made of what is kept

    def outdate(self, forget_mark: bool = False) -> None:
        super().outdate(forget_mark)
        self._prepared_version = None

    def to_prepare_in(self, group: str) -> list[Prepared]:
        """Return what to prepare for the next gather in that process group: nothing unless the module has sent
        differences before and its weights have changed since."""
        version = self._version_of() if self._bound is not None and self._group_name == group else None
        if version is None or version in (self._gathered_version, self._prepared_version):
            return []
        shard = _fsdp2.shard_of(self._params)
        if shard is None:
            return []
        return [self.to_prepare(shard.view(torch.uint16) if shard.itemsize == 1 else shard, version)]

    def to_prepare(self, shard: torch.Tensor, version: WeightsVersion) -> Prepared:
        assert self._bound is not None
        self._prepared_version = version
        self._note(shard)
        return self._bound, shard, self._site

    def gather(self, call: GatherCall) -> Any:
        is_large = call.output.nbytes >= backend_of(call.group).options.min_bytes
        if call.shard.dtype == torch.float64 and is_large and overridden("all_gather") != "exact":
            self._plan_lossless(call)  # raises, as for float32
        return super().gather(call)

    def _can_be_captured(self) -> bool:
        return True  # it raises an error that says more

    def _plan_lossless(self, call: GatherCall) -> _c10d.Operation:
        """Plan by differences, as last time if the gather is like that one. Raises ValueError where it cannot."""
        try:
            parts = [(part.numel() // call.group.size(), True) for part in call.parts]
            return backend_of(call.group).plan_lossless(call.target, call.source, parts=parts, like=self._lossless)
        except ValueError as error:
            is_wide = call.shard.dtype in (torch.float32, torch.float64)
            hint = "; MixedPrecisionPolicy(param_dtype=torch.bfloat16) saves more than they would" if is_wide else ""
            raise ValueError(f"weights: {self._notices.name} cannot be sent as 'lossless': {error}{hint}") from None

    def _plan_of(self, call: GatherCall, plan: _c10d.Operation) -> _c10d.Operation:
        self._lossless = self._plan_lossless(call)
        self._num_weights = call.shard.numel() * (2 if call.shard.dtype == torch.uint16 else 1)  # pairs of bytes
        return self._lossless

    def _gather_across(self, call: GatherCall, bound: _c10d.Operation, version: WeightsVersion) -> Any:
        self._group_name = call.group.group_name
        if self.needs_sizes and self._prepared_version != version:
            self._prepare(self, call, version)
        else:
            self._check(call.shard)  # against what was prepared
        self._prepared_version = None
        work = bound.run(call.target, call.whole_shard, site=self._site, async_op=call.async_op)
        return finished(work, call.async_op)

    def _gather_without(self, call: GatherCall) -> Any:
        why = "PyTorch does not count their changes"
        if self._reserved == 0:
            why = "there is no room in max_bytes"
        elif not all(map(_fsdp2.is_sharded, self._params)):
            why = "they are shards of a mesh after the forward pass"
        backend = backend_of(call.group)
        if self._reserved != 0 or backend.is_strict:  # a line has told of max_bytes
            self._notices.tell_exact("lossless", f"gathers whole weights, not differences, as {why}", backend)
        if isinstance(call.output, Deferred):
            call.output.buffer.gather_into((), call.group.size())  # but into memory, from which FSDP2 copies
            self._counted.gathers_fused -= 1
        # Bytes are never compressed.
        output, shard = (in_memory(each).view(torch.uint8) for each in (call.output, call.shard))
        return finished(all_gather_single(output, shard, group=call.group, async_op=True), call.async_op)
