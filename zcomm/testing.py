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

import zcomm._core as _core
from zcomm._exchanges import Exchanges
from zcomm._units import parse_nodes
from zcomm.feedback import ErrorFeedback

T = TypeVar("T")
ArrayT = TypeVar("ArrayT")


#: One format, or pairs (number of elements, format) that partition a slot from its first element on.
Format: TypeAlias = "str | Sequence[tuple[int, str]]"


def _aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros at an address that is a multiple of 64."""
    buffer = np.zeros(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes]


def _segments(format: Format, num_elements: int) -> list[tuple[int, str]]:
    return [(num_elements, format)] if isinstance(format, str) else list(format)


class SecondaryShards:
    """Values that one rank keeps between gathers by lossless differences. All these gathers have shards of the same
    size and dtype."""

    def __init__(self) -> None:
        self._operation: Any = None
        self._data: NDArray[np.uint8] | None = None
        self._secondary: Any = None

    @property
    def generation(self) -> int:
        """Number of gathers so far; 0 after a failed one."""
        return 0 if self._secondary is None else int(self._secondary.generation)

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's shard that the last gather sent to each other node."""
        return 0 if self._secondary is None else int(self._secondary.sent_bytes)

    def _of(self, communicator: Any, slots: list[tuple[int, int, str]]) -> Any:
        if self._operation is None:
            gather = communicator.make_lossless_gather(slots)
            self._data = _aligned_bytes(gather.secondary_bytes)
            self._secondary = _core.SecondaryShard(self._data.ctypes.data, gather.secondary_bytes)
            self._operation = gather.bound_to(self._secondary)
        return self._operation


class LocalRank(Exchanges):
    """One rank of a :class:`LocalWorld`. After a failed call the whole world is unusable."""

    def all_gather(self, shard: Any, out: ArrayT, format: Format = "int8:256") -> ArrayT:
        """Fills ``out``, size times the elements of ``shard``, with every rank's shard, and returns it. ``shard`` may
        be the own slot of ``out``."""
        call = self._call(None)
        source = call.values(shard, "shard")
        slots = self._slots(call, out, "out", source, "shard", writable=True)
        segments = _segments(format, source.num_elements)
        self._run(self._core.make_all_gather(slots, segments), [source.raw], slots, call)
        return out

    def all_gather_lossless(self, shard: Any, out: ArrayT, held: SecondaryShards) -> ArrayT:
        """Fill ``out`` with every rank's shard of bfloat16 or float16, bit for bit, and return it. Between nodes only
        lossless differences to the last gather in ``held`` are sent; the first time, the shards."""
        call = self._call(None)
        source = call.values(shard, "shard")
        slots = self._slots(call, out, "out", source, "shard", writable=True)
        self._run(held._of(self._core, slots), [source.raw], slots, call)
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
        """Fill ``out`` with factor times the sum, over all ranks, of slot ``rank`` of ``input``, and return it.
        ``feedback`` is this rank's error feedback for repeated calls of the same reduction: with another one it starts
        over."""
        call = self._call(None)
        output = call.values(out, "out", writable=True)
        slots = self._slots(call, input, "input", output, "out")
        segments = _segments(formats, output.num_elements)
        kept = None
        operation = self._core.make_reduce_scatter(slots, segments, feedback.format if feedback else None)
        if feedback is not None:
            key = f"reduce_scatter/rank {self.rank}"
            layout = f"{output.raw[1:]} in {segments} on {self.size} ranks in {self._core.num_nodes} nodes"
            residual, empty = feedback.use(key, layout, operation.residual_bytes, _aligned_bytes)
            kept = (residual.ctypes.data, feedback.format, feedback.decay, empty)
        self._run(operation, slots, [output.raw], call, factor=factor, feedback=kept)
        return out

    def all_reduce(self, tensor: ArrayT, formats: str = "int8:128/int4:128", *, factor: float = 1.0) -> ArrayT:
        """Replace ``tensor`` by factor times its sum over ranks, and return it."""
        call = self._call(None)
        values = call.values(tensor, "tensor", writable=True)
        self._run(self._core.make_all_reduce(values.raw, formats), [], [values.raw], call, factor=factor)
        return tensor


class LocalWorld:
    """Group of ranks that are threads of this process.

    Args:
        nodes: "NODESxRANKS" such as "8x8", or the node of every rank, such as [0, 0, 0, 1].
        timeout: for a peer to answer, in seconds.
        chunk_bytes: values of a shard that are sent as one piece, in bytes.
        seed: seed of formats with ``:stochastic``.
    """

    def __init__(
        self,
        nodes: str | Sequence[int],
        *,
        timeout: float = 60.0,
        chunk_bytes: int = _core.DEFAULT_CHUNK_BYTES,
        seed: int = 0,
    ) -> None:
        if isinstance(nodes, str):
            num_nodes, node_size = parse_nodes(nodes)
            nodes = [node for node in range(num_nodes) for _ in range(node_size)]
        communicators = _core.make_local_communicators(list(nodes), chunk_bytes)
        for communicator in communicators:
            communicator.set_seed(seed)
        self.ranks = [LocalRank(each, datetime.timedelta(seconds=timeout)) for each in communicators]
        self.size = len(self.ranks)

    def run(self, body: Callable[[LocalRank], T]) -> list[T]:
        """Call body(rank) for all ranks at once and return the results in rank order. Raises the error that came first;
        it ends the calls of the other ranks."""
        errors: list[BaseException] = []

        def run_one(rank: LocalRank) -> T:
            try:
                return body(rank)
            except BaseException as error:
                errors.append(error)
                rank._core.abort(f"rank {rank.rank} raised {type(error).__name__}")
                raise

        with ThreadPoolExecutor(self.size) as pool:
            results = [pool.submit(run_one, rank) for rank in self.ranks]
        if errors:
            raise errors[0]
        return [result.result() for result in results]
