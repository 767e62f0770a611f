"""Parameters whose floats are no numbers: packed codes of quantized weights, stored in a float dtype so that FSDP takes
them. Rounded, they would decode to noise, so they are always sent exactly."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcomm.distributed import _fsdp2
from zcomm.distributed.binding import _c10d

_log = logging.getLogger("zcomm")

#: Classes that hold codes, of bitsandbytes, HQQ, AWQ, GPTQ and others, by name: nothing is imported.
_CLASSES = {
    *("Params4bit", "Int8Params", "QuantizedTensor", "NF4Tensor", "GPTQParam"),
    *("Linear4bit", "LinearNF4", "LinearFP4", "Linear8bitLt", "Embedding4bit", "Embedding8bit"),
    *("HQQLinear", "WQLinear", "WQLinear_GEMM", "QuantLinear"),
}
#: What marks a module or a parameter that has codes.
_MARKS = ("quant_state", "bnb_quantized", "SCB")

_LARGEST = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 3e4}  # beyond any weight
_SHARE = 1e-3  # of values beyond that, which random bits exceed thirtyfold
_ENTROPY = 6.5  # bits of an exponent: weights have 2 to 4, random bits 8


def _is_marked(one: object) -> bool:
    is_class = not _CLASSES.isdisjoint(kind.__name__ for kind in type(one).__mro__)
    return is_class or any(getattr(one, mark, None) is not None for mark in _MARKS)


def look_like_codes(values: torch.Tensor) -> bool:
    """Tell whether floats cannot be weights: by values that are not finite or huge, and by exponents that are as good
    as random. On a GPU the host waits for it."""
    if values.dtype not in _LARGEST or values.numel() == 0:
        return False
    with torch.no_grad():
        values = values.detach().reshape(-1)
        wild = ~(values.abs() <= _LARGEST[values.dtype])  # a NaN, too
        if int(wild.sum()) > _SHARE * values.numel():
            return True
        if values.dtype == torch.float16:  # has few exponents
            return False
        width = values.itemsize * 8
        bits = values.view(torch.int16 if width == 16 else torch.int32)
        exponents = (bits >> (width - 9)) & 0xFF
        shares = torch.bincount(exponents.to(torch.int64), minlength=256).double() / values.numel()
        return float(-(shares * shares.clamp_min(1e-30).log2()).sum()) > _ENTROPY


@dataclass(frozen=True)
class Part:
    """A part of a gathered buffer: the modules whose parameters it has and their names there, this rank's values, a
    version that changes with them. Values that are not ``checked`` are weights. ``parameter`` is given where it is not
    found through ``places``."""

    name: str
    places: Sequence[tuple[nn.Module, str]]
    values: torch.Tensor
    version: object
    checked: bool
    parameter: torch.Tensor | None = None

    def is_marked(self) -> bool:
        """Tell whether it has codes by the class or the attributes of a parameter or its module."""
        owners: list[object] = [] if self.parameter is None else [self.parameter]
        for module, name in self.places:
            parameter = getattr(module, name, None)
            if isinstance(parameter, torch.Tensor) and not parameter.requires_grad and name != "bias":
                owners += [module, parameter, getattr(parameter, "_local_tensor", parameter)]
        return any(map(_is_marked, owners))

    def looks(self) -> bool:
        return self.checked and look_like_codes(self.values)


def parts_of_params(owner: str, params: Sequence[Any]) -> list[Part]:
    """Return the parts of a buffer of FSDP2. ``owner`` names the module that gathers it. Parameters that require a
    gradient are weights."""
    parts = []
    for param in params:
        module, name, values = _fsdp2.values_of(param)
        checked = values.dtype in _LARGEST and not _fsdp2.requires_grad(param)
        parts.append(
            Part(f"{owner}.{name}", [(module, name)], values, _fsdp2.version_of(param) if checked else None, checked)
        )
    return parts


def find_codes(parts: Sequence[Part], group: dist.ProcessGroup) -> tuple[list[bool], str]:
    """Return a flag for each part that has codes, and the names of those that only their values show. All ranks call
    it with the same parts in the same order, and find the same."""
    marked, looks = 2, 1
    found = [0 if not part.checked else marked if part.is_marked() else looks * part.looks() for part in parts]
    if group.size() > 1 and any(part.checked for part in parts):
        flags = torch.tensor(found, dtype=torch.uint8, device=parts[0].values.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        found = flags.tolist()
    return [flag > 0 for flag in found], ", ".join(
        part.name for part, flag in zip(parts, found, strict=True) if flag == looks
    )


def tell_of_codes(found: str, owner: str, backend: _c10d.ProcessGroup) -> None:
    """Log on one rank that these parameters were found by their values; raise RuntimeError where strict forbids it."""
    if found and backend.is_strict:
        raise RuntimeError(f"strict=True, but {found} would be sent uncompressed: its values look like packed codes")
    if found and backend.rank() == 0:
        _log.warning("%s: %s taken for packed codes, as the values cannot be weights: left exact", owner, found)


class Codes:
    """Which parameters of one gathered buffer have codes: agreed upon by all ranks at its first gather, and looked for
    again where this rank's values change. A part without a version has not changed."""

    def __init__(self) -> None:
        self._flags: list[bool] | None = None
        self._versions: list[object] = []

    def find(self, parts: Sequence[Part], group: dist.ProcessGroup) -> tuple[list[bool], str]:
        """Return a flag for each part, and the names of those that were found by their values just now.

        Raises RuntimeError if values have changed to codes since the first gather, of which other ranks cannot know."""
        if self._flags is None and _c10d.capture_of(parts[0].values.device):  # in which nothing can be agreed upon
            return [part.checked for part in parts], ""
        if self._flags is None:
            self._versions = [part.version for part in parts]
            self._flags, found = find_codes(parts, group)
            return self._flags, found
        versions = [
            known if part.version is None else part.version for part, known in zip(parts, self._versions, strict=True)
        ]
        if versions != self._versions:
            changed = zip(parts, self._flags, versions, self._versions, strict=True)
            new = [part.name for part, flag, now, before in changed if now != before and not flag and part.looks()]
            if new:
                raise RuntimeError(
                    f"{', '.join(new)}: expected weights, as at the first gather, got values whose exponents cannot be "
                    "weights: exempt these parameters with zcomm.fsdp.compress(exempt=...), or set all_gather='exact'"
                )
            self._versions = versions
        return self._flags, ""
