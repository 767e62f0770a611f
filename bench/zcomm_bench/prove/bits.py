"""Which bits each rank should have after compressed calls: inputs that any machine makes alike, and CRCs of results by
``zcomm_bench.reference``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zcomm_bench import expected, reference
from zcomm_bench.prove.scale import GATHER, REDUCE
from zcomm_bench.reference import Values

DTYPES = ("float32", "bfloat16", "float16")
_FORMATS = {
    "all_gather": (GATHER, "int4:128", "eden4:128", "eden3:64", "eden2:128", "fp8:128", "bf16"),
    "reduce_scatter": (REDUCE, "int8:128", "eden2:128", "fp8:128"),
    "all_reduce": (REDUCE, "int4:128"),
    "all_to_all": (REDUCE,),
    "gather": (REDUCE,),
    "scatter": (REDUCE,),
    "broadcast": (GATHER,),
    "send_recv": (REDUCE,),
}
COLLECTIVES = tuple(_FORMATS)
SAME_ON_ALL = ("all_gather", "all_reduce", "broadcast", "weights")


@dataclass(frozen=True)
class Case:
    """One call. `elements`: of a shard, or of a part of an exchange."""

    collective: str
    dtype: str
    format: str
    elements: int

    def input(self, rank: int, size: int) -> Values:
        """What `rank` has before the call: for an all-gather its shard, for a broadcast its tensor, else all slots."""
        count = self.elements * (1 if self.collective in ("all_gather", "broadcast", "gather", "send_recv") else size)
        uniform = reference.random_offsets(1 + rank, 0, count)
        powers = np.exp2((np.arange(count) // 7 % 13 - 6).astype(np.float32))  # blocks of unlike size
        return reference.narrow((uniform * powers).astype(np.float32), self.dtype)

    def result(self, rank: int, nodes: Sequence[int]) -> Values:
        """What `rank` has afterwards. Roots are rank 0; even ranks send to the next one."""
        size = len(nodes)
        inputs = [self.input(each, size) for each in range(size)]
        if self.collective == "all_gather":
            return expected.all_gather(inputs, self.dtype, self.format)
        if self.collective == "reduce_scatter":
            slots = [self._slot(values, rank) for values in inputs]
            return expected.reduce_scatter(slots, self.dtype, rank, self.format, nodes)
        if self.collective == "all_reduce":
            return expected.all_reduce(inputs, self.dtype, self.format, nodes)
        if self.collective == "broadcast":
            return expected.roundtrip(inputs[0], self.dtype, self.format)
        if self.collective == "all_to_all":
            parts = [self._slot(values, rank) for values in inputs]
            return np.concatenate([self._arrives(part, peer, rank, nodes) for peer, part in enumerate(parts)])
        if self.collective == "gather":
            parts = [self._arrives(values, peer, 0, nodes) for peer, values in enumerate(inputs)]
            return np.concatenate(parts) if rank == 0 else inputs[rank]
        if self.collective == "scatter":
            return self._arrives(self._slot(inputs[0], rank), 0, rank, nodes)
        return self._arrives(inputs[rank - 1], rank - 1, rank, nodes) if rank % 2 else inputs[rank]

    def _slot(self, values: Values, rank: int) -> Values:
        return values[rank * self.elements : (rank + 1) * self.elements]

    def _arrives(self, values: Values, source: int, to: int, nodes: Sequence[int]) -> Values:
        return expected.arrives(values, self.dtype, source, to, self.format, nodes)

    def crc(self, rank: int, nodes: Sequence[int]) -> int:
        return crc_of(self.result(rank, nodes))


def crc_of(values: Values) -> int:
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8).tobytes())


def cases(elements: int) -> Iterator[Case]:
    """Every collective, dtype and format. Formats of 16 bits compress float32 alone."""
    for collective, formats in _FORMATS.items():
        for dtype in DTYPES:
            for format in formats:
                if format != "bf16" or dtype == "float32":
                    yield Case(collective, dtype, format, elements)
