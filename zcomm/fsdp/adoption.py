"""Recognition of FSDP's own collectives. Those of FSDP2's parameter groups are replaced if the process group is
zcomm's; those of FSDP1 are known to carry weights and gradients."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from zcomm.distributed import _fsdp1, _fsdp2
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import find_backend
from zcomm.distributed.overrides import all_reduce_of, forced_exact, known, overridden
from zcomm.fsdp.codes import Codes, Part, tell_of_codes
from zcomm.fsdp.collectives import Collectives

_log = logging.getLogger("zcomm")


@functools.cache
def watch_fsdp2() -> None:
    """Replace the collectives of each later parameter group before its first use. They gather copies of the weights
    that an optimizer steps, so their values may be rounded."""
    _fsdp2.before_first_use(_fsdp2.used_groups.add)
    _fsdp2.before_first_use(_adopt)
    _fsdp2.around(
        allocations=_given_back,
        symmetric_memory=_refused,
        custom_collectives=_told,
        reductions=_reduction,
    )


@functools.cache
def watch_fsdp1() -> None:
    """Let the forward and backward passes of FSDP1 compress their weights and gradients."""
    _fsdp1.pad_with_zeros()
    _fsdp1.around(gathers=_gather_of_handle, reductions=lambda handle: known())


def _gather_of_handle(handle: Any) -> AbstractContextManager[Any]:
    group = _fsdp1.process_group_of(handle)
    backend = find_backend(group)
    if backend is None:
        return contextlib.nullcontext()
    codes: Codes = vars(handle).setdefault("_zcomm_codes", Codes())
    (has_codes,), found = codes.find([_fsdp1_part(handle)], group)
    tell_of_codes(found, "FSDP1", backend)
    return forced_exact(_c10d.Verdict.not_a_float) if has_codes else known()


def _fsdp1_part(handle: Any) -> Part:
    names, places = zip(*_fsdp1.places_of(handle), strict=True)
    return Part(", ".join(names), places, *_fsdp1.values_of(handle), True)


def _adopt(param_group: Any) -> None:
    if _fsdp2.owner_of(param_group) is not None or not _fsdp2.has_plain_gather(param_group):
        return
    shards, _ = _fsdp2.process_groups_of(param_group)
    if shards is not None and find_backend(shards) is not None:
        Collectives(_fsdp2.name_in_root(param_group), param_group.modules[0], param_group)


def _given_back(param_group: Any) -> Any:
    """Restore torch's collectives while torch changes them: it refuses to change any others."""
    owner = _fsdp2.owner_of(param_group)
    return owner.given_back() if owner is not None else contextlib.nullcontext()


@contextlib.contextmanager
def _refused(param_group: Any) -> Iterator[None]:
    shards, _ = _fsdp2.process_groups_of(param_group)
    if shards is not None and find_backend(shards) is not None:
        raise ValueError(
            "set_symm_mem_for_comm: expected a group of the backend 'nccl', as only a ProcessGroupNCCL has symmetric "
            "memory, got one of 'zcomm'"
        )
    yield


@contextlib.contextmanager
def _told(module: Any) -> Iterator[None]:
    """Warn if the user's own collectives take the place of compressed ones."""
    groups = _fsdp2.groups_of(module)
    owners = [owner for group in groups if (owner := _fsdp2.owner_of(group)) is not None and owner.rule is not None]
    before = [owner.are_ours() for owner in owners]
    yield
    for owner, were_ours in zip(owners, before, strict=True):
        if sum(owner.are_ours()) < sum(were_ours):
            _log.warning("%s: a custom collective takes the place of the one that zcomm.fsdp.compress set", owner.name)


@contextlib.contextmanager
def _reduction(param_group: Any) -> Iterator[None]:
    """Known to carry gradients, in zcomm's groups."""
    shards, _ = _fsdp2.process_groups_of(param_group)
    is_ours = shards is not None and find_backend(shards) is not None
    with known() if is_ours else contextlib.nullcontext(), _formats_of_replicas(param_group):
        yield


def _formats_of_replicas(param_group: Any) -> AbstractContextManager[Any]:
    """Override the formats of the all-reduce of HSDP's replicas: with compress="auto" those of reduce-scatters."""
    unchanged = contextlib.nullcontext()
    shards, replicas = _fsdp2.process_groups_of(param_group)
    backend = find_backend(replicas) if shards is not None and replicas is not None else None
    if backend is None or (overridden("compress") or backend.options.compress) != "auto":
        return unchanged
    has_formats = overridden("all_reduce") or backend.options.all_reduce != "exact"
    if has_formats or not _fsdp2.reduces_replicas_alone(param_group):
        return unchanged
    owner = _fsdp2.owner_of(param_group)
    rule = owner.rule if owner is not None else None
    of_rule = rule.gradients if rule is not None else None
    formats: str = overridden("reduce_scatter") or of_rule or backend.options.reduce_scatter
    if formats.startswith("exact"):
        return unchanged
    if rule is not None and any(rule.exempt):
        if not all(rule.exempt):
            _tell_of_exempt()
        return unchanged
    return all_reduce_of(backend, formats)


@functools.cache
def _tell_of_exempt() -> None:
    _log.warning(
        "the all-reduce of HSDP's replicas stays exact, as it has exempt parameters in its messages: exempt=() lets "
        "compress='auto' compress it, or all_reduce= of the options"
    )
