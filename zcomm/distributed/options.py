"""The options of a group.

They follow from the table in python/c10d/options.hpp: an option is a row there, a paragraph in the docstring below and
a line in the README.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from zcomm.distributed.binding import _c10d

OPTION_FIELDS = _c10d.OPTION_FIELDS


def variable_of(option: str) -> str:
    """The environment variable that sets an option."""
    return f"ZCOMM_{option.upper()}"


class Options(_c10d.Options):
    """How a group compresses: ``pg_options=`` of ``init_process_group`` and ``new_group``. Immutable. A group that is
    made without options has those of the world.

    Args (None: the ``ZCOMM_*`` environment variable of the same name, else the default):
        policy: ``"always"``, the default: all calls that the options below name are compressed. ``"auto"``: those that
            gain at least 3 % by it. The first call of a collective, dtype and size (rounded down to a power of two)
            decides for all later ones: it times both ways on scratch, or asks the ``calibration``.
        all_gather: a format, default ``"int8:256"``.
        reduce_scatter: intra-node, then inter-node, or one format for both; default ``"int8:128/int4:128"``.
            ``"exact:direct"``: exact values go straight to their owner, who adds them in float32 in rank order. That
            is half the bytes of gloo's, and other bits. Of CPU tensors of float32, bfloat16 and float16, summed or
            averaged, single or in lists, of any size; other calls are gloo's, as with ``"exact"``.
        small_reduce_scatter: of tensors below ``min_bytes``: ``"exact"``, the default, or ``"exact:direct"``.
        all_reduce: like ``reduce_scatter``; default ``"exact"``. The sum is gathered in the INSIDE format.
        min_bytes: smaller tensors (as gathered, scattered or reduced) stay exact; default 65536.
        out_of_place: compress all-gathers whose input is not its own slot of the output, too; default False.
        lists: compress list forms, too; default False.
        coalesced: compress coalesced forms, too; default False.
        strict: raise where a floating-point call of at least ``min_bytes`` would stay exact for any reason but its
            format and what ``policy="auto"`` finds; default False.
        node_size: ranks per node, in order of their rank in the world, for virtual nodes; default: found from the
            launcher or the host.
        chunk_bytes: values of a shard that are sent as one piece, in bytes; default 1 MiB, on GPUs 128 MiB over the
            ranks of the group.
        seed: of formats with ``:stochastic``; default 0. See :func:`zcomm.set_step`.
        high_priority_stream: asynchronous calls on a GPU run on a stream of high priority; default True.
        blocking_wait: ``wait()`` of asynchronous calls on a GPU blocks the host until they are done; default False.
        end_on_failure: end the process where transfers on a GPU fail after their calls have returned, as their results
            are undefined; default True. False: the group's next call of any kind raises, and so does ``wait()``.
        max_ctas: at most so many of a GPU's multiprocessors for transfers over NCCL, and memory for as many channels to
            each peer; default 0, what NCCL takes.
        telemetry_every: compressed calls of a site from one sample of what compression loses to the next, for
            :func:`zcomm.report`; default 0, no samples. May differ between ranks.
        calibration: a file that ``python -m zcomm measure`` has written on this cluster, by which ``policy="auto"``
            decides without making a call; default: none.

    A format is ``"exact"``, ``"bf16"`` or ``"int8:B"``, ``"int6:B"``, ``"int4:B"``, ``"int2:B"`` or ``"fp8:B"``,
    B a multiple of 32 from 32 to 4096 elements; ``":hadamard"`` and ``":stochastic"`` may follow B.
    Raises ValueError or TypeError that names the field, what was given and what is accepted.
    """

    __signature__ = inspect.Signature(  # what help() and editors show
        [inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None) for field in _c10d.OPTION_FIELDS]
    )

    def __init__(self, **fields: Any) -> None:
        known = {field.name for field in OPTION_FIELDS}
        given = {name: value for name, value in fields.items() if value is not None or name not in known}
        super().__init__(**{**_of_environment(), **given})

    def __copy__(self) -> Options:
        twin = Options.__new__(Options)
        fields = {field.name: getattr(self, field.name) for field in OPTION_FIELDS}
        _c10d.Options.__init__(twin, **fields)  # not the environment's
        twin._timeout = self._timeout
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self.__copy__()


def _of_environment() -> dict[str, Any]:
    """The options that the environment sets. Raises ValueError that names the variable."""
    fields = {}
    for field in OPTION_FIELDS:
        text = os.environ.get(variable_of(field.name))
        if text is None:
            continue
        try:
            fields[field.name] = _READ[field.kind](text)
        except ValueError as error:
            raise ValueError(f"{variable_of(field.name)}: {error}") from None
    return fields


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"expected 1, 0, true or false, got {text!r}")
    return values[text.lower()]


_READ: dict[str, Callable[[str], Any]] = {"text": str, "integer": int, "flag": _flag}
