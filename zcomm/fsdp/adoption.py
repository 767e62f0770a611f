"""Adoption of FSDP2's parameter groups: their collectives are replaced if the process group is zcomm's."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

from zcomm.distributed.groups import find_backend
from zcomm.distributed.overrides import is_overridden, override
from zcomm.fsdp import _fsdp2
from zcomm.fsdp.collectives import Collectives, full_name_of, owner_of

_log = logging.getLogger("zcomm")


@functools.cache
def watch_fsdp2() -> None:
    """Replace the collectives of each later parameter group before its first use. They gather copies of the weights
    that an optimizer steps, so their values may be rounded."""
    _fsdp2.before_first_use(_adopt)
    _fsdp2.around_choices(_given_back)
    _fsdp2.around_symmetric_memory(_refused)
    _fsdp2.around_custom_collectives(_told)
    _fsdp2.around_reductions(_formats_of_replicas)


def _adopt(param_group: Any) -> None:
    shards, _ = _fsdp2.process_groups_of(param_group)
    if shards is not None and find_backend(shards) is not None and _fsdp2.has_plain_gather(param_group):
        path = _fsdp2.name_in_root(param_group)
        Collectives(full_name_of(path, param_group.modules[0], param_group), path, param_group)


@contextlib.contextmanager
def _given_back(param_group: Any) -> Iterator[None]:
    """Restore torch's collectives while torch changes them: it refuses to change any others."""
    owner = owner_of(param_group)
    if owner is not None:
        owner.give_back()
    try:
        yield
    finally:
        if owner is not None and (_fsdp2.has_plain_gather(param_group) or not owner.is_plain()):
            owner.take_over()


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
    before = [(owner_of(group), _fsdp2.collectives_of(group)) for group in groups]
    yield
    for group, (owner, collectives) in zip(groups, before, strict=True):
        if owner is not None and not owner.is_plain() and _fsdp2.collectives_of(group) != collectives:
            _log.warning("%s: a custom collective takes the place of the one that zcomm.fsdp.compress set", owner.name)


def _formats_of_replicas(param_group: Any) -> Any:
    """Override the formats of the all-reduce of HSDP's replicas: with policy="auto" those of reduce-scatters."""
    formats = _automatic_formats(param_group)
    return override(all_reduce=formats) if formats is not None else contextlib.nullcontext()


def _automatic_formats(param_group: Any) -> str | None:
    """Return the formats; None if other formats are set, or if the override would affect calls that are not FSDP2's."""
    shards, replicas = _fsdp2.process_groups_of(param_group)
    backend = find_backend(replicas) if shards is not None and replicas is not None else None
    if backend is None or backend.options.policy != "auto" or backend.options.all_reduce != "exact":
        return None
    if is_overridden("all_reduce") or not _fsdp2.reduces_replicas_alone(param_group):
        return None
    owner = owner_of(param_group)
    rule = owner.rule if owner is not None else None
    if rule is not None and any(rule.exempt):
        return None
    formats: str = (rule.gradients if rule is not None else None) or backend.options.reduce_scatter
    return None if formats.startswith("exact") else formats
