"""The options of a group.

They follow from the table in python/c10d/calls/options.hpp: an option is a row there, and an argument and a paragraph
of the docstring below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from typing import Any, Literal

from zcomm._formats import Format
from zcomm.distributed import environment
from zcomm.distributed.binding import _c10d

OPTION_NAMES = _c10d.OPTION_NAMES
MAY_DIFFER = ("sample_errors_every",)  # between ranks


def variable_of(option: str) -> str:
    """Return the environment variable that sets an option."""
    return f"ZCOMM_{option.upper()}"


class Options(_c10d.Options):
    """How a group compresses: ``pg_options=`` of ``init_process_group`` and ``new_group``. Immutable. A group that is
    made without options has those of the world.

    Args (None: the ``ZCOMM_*`` environment variable of the same name, else the default):
        policy: ``"always"``, the default: all calls that the options below name are compressed. ``"auto"``: those that
            gain at least 3 % by it. Steps of optimizers are made both ways in turn, and the faster way stays. Without
            steps, the first call of a collective, dtype and size (rounded down to a power of two) decides for all later
            ones: it times both ways on scratch, or reads the ``decisions``. The all-reduce of HSDP's replicas is one of
            these, in the formats of ``reduce_scatter``, unless ``all_reduce`` has others.
        all_gather: a format, default ``"int8:256"``.
        reduce_scatter: intra-node, then inter-node, or one format for both; default ``"int8:128/int4:128"``.
        all_reduce: like ``reduce_scatter``; default ``"exact"``. The sum is gathered in the intra-node format.
        all_to_all: like ``reduce_scatter``; default ``"exact"``. Values are encoded once, in the format of the link to
            their receiver. Lists count as single tensors, and ``policy`` has no say. Less than ``min_bytes`` over the
            number of ranks stays exact between two ranks.
        gather: like ``all_to_all``, in tensors of ``min_bytes`` of all ranks together; default ``"exact"``.
        scatter: like ``gather``; default ``"exact"``.
        broadcast: a format, in tensors of ``min_bytes``; default ``"exact"``. All ranks have the same bits afterwards:
            the source's own values are rounded, too.
        send_recv: formats of messages between two ranks, as in ``all_to_all``, in tensors of ``min_bytes``; default
            ``"exact"``. Receives without a source are exact. On GPUs overrides may not change it.
        min_bytes: smaller tensors (as gathered, scattered or reduced) stay exact; default 65536. Groups with
            ``policy="auto"`` and no ``decisions`` choose theirs by the slowest link between their nodes, if none is
            given: ``zcomm.stats().threshold`` tells.
        forms: forms of calls to compress beside FSDP2's and plain reductions, a sequence of names or one text with
            commas; default: none.

            * ``"in_place"``: all-gathers in place. This rounds the sender's own values as well. Those of FSDP2 are
              compressed without it, as it gathers copies of its shards.
            * ``"out_of_place"``: all-gathers whose input is not its own slot of the output.
            * ``"list"``: calls with lists of tensors.
            * ``"coalesced"``: coalesced calls.
            * ``"traced:DIM"``: gathers and reduce-scatters of compiled graphs in the group of the mesh dimension
              ``DIM``, such as ``"traced:fsdp"``, if they are alone in a coalesced call, and gathers in place.
              ``"traced:world"`` names the default group, which is that of each dimension with all ranks. What DTensor
              redistributes outside of graphs, such as full state dicts, is exact.
        strict: raise where a floating-point call of at least ``min_bytes`` would stay exact for any reason but its
            format and what ``policy="auto"`` finds; default False.
        node_size: ranks per node, in order of their rank in the world, for virtual nodes; default: found from the
            NVLink fabric, the launcher or the host.
        chunk_bytes: values of a shard that are sent as one piece, in bytes; default 1 MiB, on GPUs 128 MiB over the
            ranks of the group, 512 KiB among more than 256.
        sample_errors_every: compressed calls of a site from one sample of what compression loses to the next, for
            :func:`zcomm.report`; default 0, no samples. May differ between ranks.
        decisions: a file that ``python -m zcomm_bench measure`` has written on this cluster, by which
            ``policy="auto"`` decides without making a call; default: none. Calls that it lacks are rehearsed.

    :func:`zcomm.formats` lists the formats. On GPUs torch's ``TORCH_NCCL_HIGH_PRIORITY`` (here on by default),
    ``TORCH_NCCL_BLOCKING_WAIT`` and ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` and NCCL's own variables count, too.

    Raises ValueError or TypeError that names the field, what was given and what is accepted.
    """

    def __init__(
        self,
        *,
        policy: Literal["always", "auto"] | None = None,
        all_gather: Format | None = None,
        reduce_scatter: Format | None = None,
        all_reduce: Format | None = None,
        all_to_all: Format | None = None,
        gather: Format | None = None,
        scatter: Format | None = None,
        broadcast: Format | None = None,
        send_recv: Format | None = None,
        min_bytes: int | None = None,
        forms: str | Collection[str] | None = None,
        strict: bool | None = None,
        node_size: int | None = None,
        chunk_bytes: int | None = None,
        sample_errors_every: int | None = None,
        decisions: str | None = None,
    ) -> None:
        fields = {**_of_environment(), **given_of(locals())}
        super().__init__(**fields)
        self._gives_min_bytes = "min_bytes" in fields
        self.threshold = ""  # of a group: how its min_bytes was chosen, if follows_link

    @property
    def follows_link(self) -> bool:
        """Whether a group chooses ``min_bytes`` by its slowest link. A file of decisions begins at the default."""
        return self.policy == "auto" and not self._gives_min_bytes and not self.decisions

    def with_threshold(self, min_bytes: int, why: str) -> Options:
        """Return the same options of the same group with the ``min_bytes`` that it has chosen."""
        twin = self._twin(min_bytes=min_bytes)
        twin.group_name, twin.global_ranks_in_group = self.group_name, self.global_ranks_in_group
        twin.threshold = why
        return twin

    def _twin(self, **changed: Any) -> Options:
        twin = Options.__new__(Options)
        fields = {name: getattr(self, name) for name in OPTION_NAMES}
        _c10d.Options.__init__(twin, **{**fields, **changed})  # not the environment's
        twin._timeout, twin._gives_min_bytes, twin.threshold = self._timeout, self._gives_min_bytes, ""
        return twin

    def __copy__(self) -> Options:
        return self._twin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self.__copy__()


def given_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options among the arguments of a function that are not None."""
    return {name: arguments[name] for name in OPTION_NAMES if arguments.get(name) is not None}


def _of_environment() -> dict[str, Any]:
    """Return the options that the environment sets. Raises ValueError that names the variable."""
    environment.warn_of_unknown(tuple(map(variable_of, OPTION_NAMES)))
    defaults = _c10d.Options()
    fields = {}
    for name in OPTION_NAMES:
        text = os.environ.get(variable_of(name))
        if text is None:
            continue
        read = _READ.get(type(getattr(defaults, name)), str)
        try:
            fields[name] = read(text)
            _c10d.Options(**{name: fields[name]})
        except ValueError as error:
            raise ValueError(f"{variable_of(name)}: {str(error).removeprefix(f'{name}: ')}") from None
    return fields


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"expected 1, 0, true or false, got {text!r}")
    return values[text.lower()]


def _integer(text: str) -> int:
    if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) is None:  # int() takes "6_5", too
        raise ValueError(f"expected a whole number in digits, got {text!r}")
    return int(text)


# By the type of the default: numbers without one are None.
_READ: dict[type, Callable[[str], Any]] = {bool: _flag, int: _integer, type(None): _integer}
