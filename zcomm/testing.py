"""Any world in one process: ranks as threads that share the real codecs and collectives.

    world = LocalWorld("8x8")
    sums = world.run(lambda rank: rank.reduce_scatter(gradients[rank.rank], np.empty(n, np.float32)))

Arrays are those of zcomm.codec: NumPy or torch CPU, contiguous, float32, bfloat16 or float16.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from zcomm import _core
from zcomm._arrays import HOST, Call, slots_of
from zcomm.feedback import ErrorFeedback

T = TypeVar("T")
ArrayT = TypeVar("ArrayT")


#: One format, or how many elements of a slot are sent in which, from its first element on.
Format: TypeAlias = "str | Sequence[tuple[int, str]]"


def _aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros at an address that is a multiple of 64."""
    buffer = np.zeros(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes]


def _segments(format: Format, num_elements: int) -> list[tuple[int, str]]:
    return [(num_elements, format)] if isinstance(format, str) else list(format)


class HeldShards:
    """What one rank holds of its gathers by lossless differences: nothing before the first one. They are all of shards
    of one size and dtype."""

    def __init__(self) -> None:
        self._plan: Any = None
        self._data: NDArray[np.uint8] | None = None
        self._kept: Any = None

    @property
    def generation(self) -> int:
        """Gathers so far; 0 after one that failed."""
        return 0 if self._kept is None else int(self._kept.generation)

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's shard that the last gather sent to each other node."""
        return 0 if self._kept is None else int(self._kept.sent_bytes)

    def _of(self, communicator: Any, slots: list[tuple[int, int, str]]) -> tuple[Any, Any]:
        if self._data is None:
            self._plan = communicator.plan_differences(slots)
            self._data = _aligned_bytes(self._plan.kept_bytes)
            self._kept = _core.KeptShards(self._data.ctypes.data, self._plan.kept_bytes)
        return self._plan, self._kept


class LocalRank:
    """One rank of a :class:`LocalWorld`. After a failed call the whole world is unusable."""

    def __init__(self, communicator: Any, timeout: float) -> None:
        self._communicator = communicator
        self._timeout = datetime.timedelta(seconds=timeout)
        self.rank: int = communicator.rank
        self.size: int = communicator.size

    def all_gather(self, shard: Any, out: ArrayT, format: Format = "int8:256", *, reference: Any = None) -> ArrayT:
        """Fills ``out``, size times the elements of ``shard``, with every rank's shard, and returns it. ``shard`` may
        be the own slot of ``out``.

        ``reference``: differences are sent. ``out`` holds, on every rank, what an earlier gather left in the slots of
        other ranks, and ``reference``, as large as ``shard``, what it left in the own one; both are brought up to date.
        """
        call = Call(None, device=HOST)
        slots = slots_of(call.values(out, "out", writable=True), self.size, "out")
        source = call.values(shard, "shard")
        own = 0
        if reference is not None:
            held = call.values(reference, "reference", writable=True)
            if (held.dtype, held.num_elements) != (source.dtype, source.num_elements):
                raise ValueError(
                    f"reference: expected {source.num_elements} {source.dtype}, got {held.num_elements} {held.dtype}"
                )
            own = held.address
        segments = _segments(format, source.num_elements)
        self._communicator.all_gather(source.raw, slots, segments, self._timeout, reference=own)
        return out

    def all_gather_differences(self, shard: Any, out: ArrayT, held: HeldShards) -> ArrayT:
        """Fills ``out`` with every rank's shard of bfloat16 or float16, bit for bit, and returns it: lossless
        differences to what ``held`` has of the last gather cross nodes, or, the first time, the shards."""
        call = Call(None, device=HOST)
        slots = slots_of(call.values(out, "out", writable=True), self.size, "out")
        source = call.values(shard, "shard")
        plan, kept = held._of(self._communicator, slots)
        self._communicator.all_gather_differences(plan, source.raw, slots, kept, self._timeout)
        return out

    def reduce_scatter(
        self,
        input: Any,
        out: ArrayT,
        formats: Format = "int8:128/int4:128",
        *,
        factor: float = 1.0,
        feedback: ErrorFeedback | None = None,
    ) -> ArrayT:
        """Fills ``out`` with factor times the sum over ranks of their slot ``rank`` of ``input``, and returns it.
        ``feedback``: this rank's, of a reduction that is called again and again."""
        call = Call(None, device=HOST)
        slots = slots_of(call.values(input, "input"), self.size, "input")
        output = call.values(out, "out", writable=True).raw
        segments = _segments(formats, output[1])
        if feedback is None:
            self._communicator.reduce_scatter(slots, output, segments, factor, self._timeout)
            return out
        plan = self._communicator.plan_reduce_scatter(slots, segments, feedback.format)
        shape = f"{output[1:]} in {segments}"
        residual, empty = feedback.use("reduce_scatter", shape, plan.residual_bytes, _aligned_bytes)
        kept = (residual.ctypes.data, feedback.format, feedback.decay, empty)
        self._communicator.run_reduce_scatter(plan, slots, output, factor, self._timeout, feedback=kept)
        return out

    def all_reduce(self, tensor: ArrayT, formats: str = "int8:128/int4:128", *, factor: float = 1.0) -> ArrayT:
        """Replaces ``tensor`` by factor times its sum over ranks, and returns it."""
        values = Call(None, device=HOST).values(tensor, "tensor", writable=True).raw
        self._communicator.all_reduce(values, formats, factor, self._timeout)
        return tensor


class LocalWorld:
    """``nodes``: "NODESxRANKS" such as "8x8", or the node of every rank, such as [0, 0, 0, 1]. ``timeout`` in seconds;
    ``chunk_bytes``: values of a shard that are sent as one piece; ``seed``: of formats with ``:stochastic``."""

    def __init__(
        self,
        nodes: str | Sequence[int],
        *,
        timeout: float = 60.0,
        chunk_bytes: int = _core.DEFAULT_CHUNK_BYTES,
        seed: int = 0,
    ) -> None:
        if isinstance(nodes, str):
            num_nodes, _, node_size = nodes.partition("x")
            if not (num_nodes.isdecimal() and node_size.isdecimal() and int(num_nodes) and int(node_size)):
                raise ValueError(f"nodes: expected NODESxRANKS such as '8x8', got {nodes!r}")
            nodes = [node for node in range(int(num_nodes)) for _ in range(int(node_size))]
        communicators = _core.make_local_communicators(list(nodes), chunk_bytes)
        for communicator in communicators:
            communicator.set_seed(seed)
        self.ranks = [LocalRank(communicator, timeout) for communicator in communicators]
        self.size = len(self.ranks)

    def run(self, body: Callable[[LocalRank], T]) -> list[T]:
        """body(rank) for every rank at once; their results in rank order. Raises the first error of a rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(body, self.ranks))
