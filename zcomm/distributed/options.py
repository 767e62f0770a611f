"""The options of a group.

They follow from the table in python/c10d/calls/options.hpp: an option is a row there, and an argument and a paragraph
of the docstring below.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from zcomm._formats import Format, Forms, Groups
from zcomm.distributed import environment
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import use

if TYPE_CHECKING:
    from typing_extensions import Never

OPTION_NAMES = _c10d.OPTION_NAMES


def variable_of(option: str) -> str:
    """Return the environment variable that sets an option."""
    return f"ZCOMM_{option.upper()}"


class Options(_c10d.Options):
    """How a group compresses: ``pg_options=`` of ``init_process_group`` and ``new_group``. Immutable. A group that is
    made without options has those of the world.

    Args (None: the ``ZCOMM_*`` environment variable of the same name, else the default):
        compress: ``"always"``, the default: all calls that the options below name are compressed. ``"auto"``: those
            that gain at least 3 %. Steps of optimizers are made both ways in turn, and the faster way stays. Without
            steps, the first call of a collective, dtype and size (rounded down to a power of two) decides for all later
            ones: it times both ways on scratch, or reads the ``decisions``. The all-reduce of HSDP's replicas is one of
            these, in the formats of ``reduce_scatter``, unless ``all_reduce`` has others.
        all_gather: a format, default ``"int8:256"``.
        reduce_scatter: intra-node, then inter-node, or one format for both; default ``"int8:128/int4:128"``.
        all_reduce: like ``reduce_scatter``; default ``"exact"``. The sum is gathered in the intra-node format.
        exchanges: formats of all-to-alls, gathers, scatters, broadcasts and messages between two ranks, like
            ``reduce_scatter``; default ``"exact"``. Values are encoded once, in the format of the link to their
            receiver. Lists count as single tensors. ``compress`` does not apply. In an all-to-all, two ranks exchange
            less than ``min_bytes`` over the number of ranks exactly. A broadcast has the format of the group's slowest
            link, and rounds the source's own values, too. Receives without a source need one format for all links. On
            GPUs an override may not change it for messages.
        min_bytes: smaller tensors (as gathered, scattered or reduced) stay exact; default 65536. Groups with
            ``compress="auto"`` and no ``decisions`` choose theirs by the slowest link between their nodes, if none is
            given: ``zcomm.stats().threshold`` tells.
        forms: forms of calls to compress in all groups, although zcomm does not know what they carry; a sequence of
            names or one text with commas. Default: none. FSDP's own calls and those of DDP's hook need no form.

            * ``"single"``: reduce-scatters of one tensor.
            * ``"in_place"``: all-gathers in place, in any form. This rounds the sender's own values as well, so no
              optimizer may step them.
            * ``"out_of_place"``: all-gathers of one tensor whose input is not its own slot of the output.
            * ``"list"``: calls with lists of tensors.
            * ``"coalesced"``: coalesced calls.
            * ``"traced"``: gathers and reduce-scatters of compiled graphs, if they are alone in a coalesced call, and
              gathers in place. What DTensor redistributes outside of graphs, such as full state dicts, is exact.
        groups: the same for the groups of a name: ``{"DATA_PARALLEL*": "single,coalesced", "TENSOR*": "exact"}``, or
            ``"DATA_PARALLEL*=single,coalesced; TENSOR*=exact"``. Default: none. A pattern is one of :mod:`fnmatch` for
            the group's description (``group_desc`` of ``new_group``). ``"dp"`` also names the group of a mesh dimension
            ``dp``, and ``"world"`` the default group, which is that of each dimension with all ranks. All patterns that
            match a group count. ``"exact"`` wins: nothing in that group is compressed.
        strict: raise where a floating-point call of at least ``min_bytes`` would stay exact for any reason but its
            format and what ``compress="auto"`` finds; default False.
        node_size: ranks per node, in order of their rank in the world, for virtual nodes; default: found from the
            NVLink fabric, the launcher or the host.
        chunk_bytes: values of a shard that are sent as one piece, in bytes; default 1 MiB. On GPUs a call has by
            default one piece up to 128 MiB over all ranks, and two for each hop above that.
        decisions: a file that ``python -m zcomm_bench measure`` has written on this cluster, by which
            ``compress="auto"`` decides without making a call; default: none. Calls that it lacks are rehearsed.
        verify: True: send a checksum behind each compressed message, and raise :class:`zcomm.CorruptedWireError` where
            other bytes arrive. ``"sample"``: in one of 16 compressed collectives, and in all messages between two
            ranks. Default False. On CPUs only. Exact calls are torch's own, and have none.

    :func:`zcomm.formats` lists the formats. On GPUs torch's ``TORCH_NCCL_HIGH_PRIORITY`` (here on by default),
    ``TORCH_NCCL_BLOCKING_WAIT``, ``TORCH_NCCL_ASYNC_ERROR_HANDLING``, ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC`` and
    NCCL's own variables count, too.

    Raises ValueError or TypeError that names the field, what was given and what is accepted.
    """

    def __init__(
        self,
        *,
        compress: Literal["always", "auto"] | None = None,
        all_gather: Format | None = None,
        reduce_scatter: Format | None = None,
        all_reduce: Format | None = None,
        exchanges: Format | None = None,
        min_bytes: int | None = None,
        forms: Forms | None = None,
        groups: Groups | None = None,
        strict: bool | None = None,
        node_size: int | None = None,
        chunk_bytes: int | None = None,
        decisions: str | None = None,
        verify: bool | Literal["sample"] | None = None,
        **unknown: Never,
    ) -> None:
        fields = {**_of_environment(), **given_of(locals()), **unknown}
        use.has_options = True
        super().__init__(**fields)
        self._gives_min_bytes = "min_bytes" in fields
        self.threshold = ""  # of a group: how its min_bytes was chosen, if follows_link
        self.of_nccl: Any = None  # torch's options of the NCCL group that makes exact calls; None: zcomm's choice

    @property
    def follows_link(self) -> bool:
        """Whether a group chooses ``min_bytes`` by its slowest link. A file of decisions begins at the default."""
        return self.compress == "auto" and not self._gives_min_bytes and not self.decisions

    def with_threshold(self, min_bytes: int, why: str) -> Options:
        """Return the same options of the same group with the ``min_bytes`` that it has chosen."""
        twin = self._twin(min_bytes=min_bytes)
        twin.group_name, twin.global_ranks_in_group = self.group_name, self.global_ranks_in_group
        twin.threshold, twin.of_nccl = why, self.of_nccl
        return twin

    def like(self, given: _c10d.Options) -> Options:
        """Return the options that were given for a split of this group. torch 2.14 clones them, to the base class."""
        if isinstance(given, Options):
            return given
        twin = self._twin(**{name: getattr(given, name) for name in OPTION_NAMES})
        twin._gives_min_bytes = self._gives_min_bytes or twin.min_bytes != self.min_bytes
        return twin

    def _twin(self, **changed: Any) -> Options:
        twin = Options.__new__(Options)
        fields = {name: getattr(self, name) for name in OPTION_NAMES}
        _c10d.Options.__init__(twin, **{**fields, **changed})  # not the environment's
        twin._timeout, twin._gives_min_bytes, twin.threshold = self._timeout, self._gives_min_bytes, ""
        twin.of_nccl = None  # another group's
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
    for name in (*_c10d.COLLECTIVES, "send_recv"):
        if name not in OPTION_NAMES and variable_of(name) in os.environ:
            raise ValueError(f"{variable_of(name)}: expected ZCOMM_EXCHANGES, got the name of one exchange")
    defaults = _c10d.Options()
    fields = {}
    for name in OPTION_NAMES:
        text = os.environ.get(variable_of(name))
        if text is None:
            continue
        read = _READ.get(name, _READ.get(type(getattr(defaults, name)), str))
        try:
            fields[name] = read(text)
            _c10d.Options(**{name: fields[name]})
        except ValueError as error:
            raise ValueError(f"{variable_of(name)}: {str(error).removeprefix(f'{name}: ')}") from None
    return fields


_FLAGS: dict[str, Any] = {"1": True, "0": False, "true": True, "false": False}


def _flag(text: str, values: dict[str, Any] = _FLAGS) -> Any:
    if text.lower() not in values:
        *names, last = values
        raise ValueError(f"expected {', '.join(names)} or {last}, got {text!r}")
    return values[text.lower()]


def _integer(text: str) -> int:
    if re.fullmatch(r"\s*[+-]?[0-9]+\s*", text) is None:  # int() takes "6_5", too
        raise ValueError(f"expected a whole number in digits, got {text!r}")
    return int(text)


# By the name of the option, else by the type of its default: numbers without one are None.
_READ: dict[Any, Callable[[str], Any]] = {
    "verify": lambda text: _flag(text, {**_FLAGS, "sample": "sample"}),
    bool: _flag,
    int: _integer,
    type(None): _integer,
}
