"""What one all-gather of FSDP2 sends: elements of which dtype, and which parts of them exactly."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from zcomm.distributed.binding import _c10d
from zcomm.distributed.overrides import override
from zcomm.fsdp.fused import COMPRESSIBLE, Deferred, in_memory
from zcomm.fsdp.rule import Rule

#: Pairs (number of elements of a shard, whether they are sent exactly), from its first element on.
Parts: TypeAlias = list[tuple[int, bool]]

#: Of each parameter: see ``_fsdp2.gathered_part``.
Gathered: TypeAlias = list[tuple[int, torch.dtype | None]]


@dataclass(frozen=True)
class Layout:
    """The elements of one all-gather. ``output`` and ``shard`` are FSDP2's: all ranks' shards, and this rank's. They
    are planned as elements of ``dtype``. ``codes`` tells of each parameter if it has codes, which are sent exactly."""

    output: torch.Tensor
    shard: torch.Tensor
    gathered: Gathered
    rule: Rule | None
    dtype: torch.dtype
    codes: Sequence[bool] = ()

    def in_pairs(self) -> Layout:
        """View bytes that nodes may keep, or codes beside nothing but exempt parameters, in pairs, as uint16."""
        exempt = self.codes if self.rule is None or self.rule.is_lossless else self.rule.exempt
        has_only_exact = any(self.codes) and all(map(operator.or_, self.codes, exempt))
        is_bytes = has_only_exact or self.dtype.itemsize == 1
        return replace(self, dtype=torch.uint16) if is_bytes and self.shard.nbytes % 2 == 0 else self

    @functools.cached_property
    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the shard as they are planned."""
        if self.dtype == self.shard.dtype:
            return self.output, self.shard
        return in_memory(self.output).view(self.dtype), in_memory(self.shard).view(self.dtype)

    @property
    def takes_parameters(self) -> bool:
        """Tell whether values may be decoded into the parameters: FSDP2 has left its buffer to zcomm, and the shard has
        the parameters' own values, in their dtype."""
        is_deferred = isinstance(self.output, Deferred) and self.dtype == self.shard.dtype
        return is_deferred and all(dtype == self.dtype for _, dtype in self.gathered)

    @property
    def parts(self) -> Parts:
        """The parts; none if all parameters have the same format. Parameters of other dtypes are exact."""
        rule = None if self.rule is None or self.rule.is_lossless else self.rule
        has_one_format = rule is None and self.dtype == self.shard.dtype and not any(self.codes)
        if self.dtype == torch.uint16 or has_one_format:
            return []
        exempt = rule.exempt if rule else [False] * len(self.gathered)
        size, planned = self.dtype.itemsize, (None, self.dtype)
        return [
            (numel * (dtype or self.dtype).itemsize // size, has_codes or is_exempt or dtype not in planned)
            for (numel, dtype), has_codes, is_exempt in zip(self.gathered, self.codes, exempt, strict=True)
        ]

    @property
    def hides_floats(self) -> bool:
        """Tell whether parameters that could be compressed are gathered as bytes, among those of others."""
        if self.dtype.itemsize != 1 or (self.rule is not None and self.rule.is_lossless):
            return False
        exempt = self.rule.exempt if self.rule else [False] * len(self.gathered)
        return any(dtype in COMPRESSIBLE and not each for (_, dtype), each in zip(self.gathered, exempt, strict=True))

    def would_plan(self, dtype: torch.dtype, backend: _c10d.ProcessGroup) -> bool:
        """Tell whether bytes would be planned as elements of ``dtype``, if that gains anything."""
        numel = self.shard.numel() // dtype.itemsize * dtype.itemsize
        whole, own = (self.output[: size * numel].view(dtype) for size in (backend.size(), 1))
        with override(compress="always"):  # a trial would make calls that nobody asked for
            plan = backend.plan(whole, own, formats=self.rule.formats if self.rule else None)
        return isinstance(plan, _c10d.Operation)


def planned_dtype(shard: torch.Tensor, gathered: Gathered) -> torch.dtype:
    """Return the dtype as which FSDP2's shard is planned. Shards of several dtypes, which FSDP2 gathers as bytes, are
    viewed as the float dtype with the most bytes, if they can be."""
    if shard.dtype != torch.uint8:
        return shard.dtype
    num_bytes: dict[torch.dtype, list[int]] = {}
    for numel, dtype in gathered:
        if dtype is None:
            return torch.uint8
        num_bytes.setdefault(dtype, []).append(numel * dtype.itemsize)
    for dtype in sorted(num_bytes.keys() & COMPRESSIBLE, key=lambda dtype: -sum(num_bytes[dtype])):
        if all(size % dtype.itemsize == 0 for sizes in num_bytes.values() for size in sizes):
            return dtype
    return torch.uint8
