"""Any world in one process: ranks as threads that share the real codecs and collectives.

    world = LocalWorld("8x8")
    sums = world.run(lambda rank: rank.reduce_scatter(gradients[rank.rank], np.empty(n, np.float32)))

Arrays are those of zcomm.codec: NumPy or torch CPU, contiguous, float32, bfloat16 or float16.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from zcomm import _core
from zcomm.arrays import HOST, Call, slots_of

T = TypeVar("T")
ArrayT = TypeVar("ArrayT")


class LocalRank:
    """One rank of a :class:`LocalWorld`. After a failed call the whole world is unusable."""

    def __init__(self, communicator: Any, timeout: float) -> None:
        self._communicator = communicator
        self._timeout = datetime.timedelta(seconds=timeout)
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def all_gather(self, shard: Any, out: ArrayT, format: str = "int8:256") -> ArrayT:
        """Fills ``out``, size times the elements of ``shard``, with every rank's shard, and returns it. ``shard`` may
        be the own slot of ``out``."""
        call = Call(None, device=HOST)
        slots = slots_of(call.values(out, "out", writable=True), self.size, "out")
        self._communicator.all_gather(call.values(shard, "shard").raw, slots, format, self._timeout)
        return out

    def reduce_scatter(
        self, input: Any, out: ArrayT, formats: str = "int8:128/int4:128", *, factor: float = 1.0
    ) -> ArrayT:
        """Fills ``out`` with factor times the sum over ranks of their slot ``rank`` of ``input``, and returns it."""
        call = Call(None, device=HOST)
        slots = slots_of(call.values(input, "input"), self.size, "input")
        output = call.values(out, "out", writable=True).raw
        self._communicator.reduce_scatter(slots, output, formats, factor, self._timeout)
        return out

    def all_reduce(self, tensor: ArrayT, formats: str = "int8:128/int4:128", *, factor: float = 1.0) -> ArrayT:
        """Replaces ``tensor`` by factor times its sum over ranks, and returns it."""
        values = Call(None, device=HOST).values(tensor, "tensor", writable=True).raw
        self._communicator.all_reduce(values, formats, factor, self._timeout)
        return tensor


class LocalWorld:
    """``nodes``: "NODESxRANKS" such as "8x8", or the node of every rank, such as [0, 0, 0, 1]. ``timeout`` in seconds;
    ``chunk_bytes``: values of a shard that travel as one piece."""

    def __init__(
        self, nodes: str | Sequence[int], *, timeout: float = 60.0, chunk_bytes: int = _core.DEFAULT_CHUNK_BYTES
    ) -> None:
        if isinstance(nodes, str):
            num_nodes, _, node_size = nodes.partition("x")
            if not (num_nodes.isdecimal() and node_size.isdecimal() and int(num_nodes) and int(node_size)):
                raise ValueError(f"nodes: got {nodes!r}, expected NODESxRANKS such as '8x8'")
            nodes = [node for node in range(int(num_nodes)) for _ in range(int(node_size))]
        communicators = _core.make_local_communicators(list(nodes), chunk_bytes)
        self.ranks = [LocalRank(communicator, timeout) for communicator in communicators]
        self.size = len(self.ranks)

    def run(self, body: Callable[[LocalRank], T]) -> list[T]:
        """body(rank) for every rank at once; their results in rank order. Raises the first error of a rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(body, self.ranks))
