"""How a group compresses: the options that a user gives."""

from __future__ import annotations

import inspect
from typing import Any

from zcomm.distributed import environment
from zcomm.distributed.binding import _c10d

FIELDS = tuple(option for option, _ in environment.VARIABLES.values())


class Options(_c10d.Options):
    """How a group compresses: ``pg_options=`` of ``init_process_group`` and ``new_group``. Immutable. A group that is
    made without options has those of the world.

    Args (None: the ``ZCOMM_*`` environment variable of the same name, else the default):
        all_gather: a format, default ``"int8:256"``.
        reduce_scatter: ``"INSIDE/BETWEEN"`` nodes, or one format for both; default ``"int8:128/int4:128"``.
        all_reduce: like ``reduce_scatter``; default ``"exact"``. The sum is gathered in the INSIDE format.
        min_bytes: smaller tensors (as gathered, scattered or reduced) stay exact; default 65536.
        out_of_place: compress all-gathers whose input is not its own slot of the output, too; default False.
        lists: compress list forms, too; default False.
        coalesced: compress coalesced forms, too; default False.
        strict: raise where a floating-point call of at least ``min_bytes`` would stay exact for any reason but its
            format; default False.
        node_size: ranks per node, in order of their rank in the world, for virtual nodes; default: found from the
            launcher or the host.
        chunk_bytes: values of a shard that travel as one piece, in bytes; default 1 MiB.
        seed: of formats with ``:stochastic``; default 0. See :func:`zcomm.set_step`.
        high_priority_stream: asynchronous calls on a GPU run on a stream of high priority; default False.
        blocking_wait: ``wait()`` of asynchronous calls on a GPU blocks the host until they are done; default False.
        telemetry_every: compressed calls of a site from one sample of what compression loses to the next, for
            :func:`zcomm.report`; default 0, no samples. May differ between ranks.

    A format is ``"exact"``, ``"bf16"`` or ``"int8:B"``, ``"int6:B"``, ``"int4:B"``, ``"int2:B"`` or ``"fp8:B"``,
    B a multiple of 32 from 32 to 4096 elements; ``":hadamard"`` and ``":stochastic"`` may follow B.
    Raises ValueError or TypeError that names the field, what was given and what is accepted.
    """

    __signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in FIELDS]
    )

    def __init__(self, **fields: Any) -> None:
        given = {name: value for name, value in fields.items() if value is not None}
        super().__init__(**{**environment.option_fields(), **given})

    def __copy__(self) -> Options:
        twin = Options.__new__(Options)
        _c10d.Options.__init__(twin, **{name: getattr(self, name) for name in FIELDS})  # not the environment's
        twin._timeout = self._timeout
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return self.__copy__()
