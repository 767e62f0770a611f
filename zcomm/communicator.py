"""Collectives for arrays on GPUs, over NCCL, without torch: one Communicator per rank.

    comm = zcomm.Communicator(rank, size, unique_id, node_size=8)
    comm.all_gather(shard, weights)          # CuPy arrays, or those of any library that speaks DLPack
    comm.reduce_scatter(gradients, shard)

docs/communicator.md lists the supported arrays and streams.
"""

from __future__ import annotations

import datetime
import hashlib
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import zcomm._core as _core
import zcomm._nccl as _nccl
from zcomm._arrays import Call
from zcomm._core import CallStats
from zcomm._exchanges import Exchanges
from zcomm._node import host_identity

_HINT = (
    " (a Communicator moves arrays on GPUs, over NCCL; for arrays on the CPU there are zcomm.testing.LocalWorld, whose "
    "ranks are threads, and the torch backend)"
)


class Communicator(Exchanges):
    """One rank of a group of ``size`` ranks, on one GPU. All ranks construct it together, with the same ``unique_id``,
    nodes and ``chunk_bytes``, and then make the same calls in the same order.

    Calls check their arguments, queue their work on ``stream`` and return. Keep the arrays until the stream has done
    this work. A call returns the bytes that this rank sends: ``intra_node_bytes``, ``inter_node_bytes``, and
    ``wire_bytes``, their sum. After a failed transfer the communicator is unusable: later calls raise, and the results
    of pending calls are undefined.

    Args:
        rank: this rank's number, from 0.
        size: the number of ranks.
        unique_id: the result of Communicator.unique_id() on one rank.
        node_size: ranks per node, in rank order.
        node_ids: the node of every rank, instead of ``node_size``. Without both, all ranks are in one node.
        device: the GPU's index; by default rank modulo the number of GPUs that this process sees.
        timeout: for a peer to connect or to answer, in seconds or as a timedelta.
        chunk_bytes: values of a shard that are sent as one piece, in bytes; by default 128 MiB over ``size``,
            512 KiB among more than 256 ranks.
        seed: seed of formats with ``:stochastic``.
        connect_all: connect with all ranks now, and not only with those of the hops of gathers and reductions. Without
            it the first exchange of two other ranks blocks the host until both have called it.

    Example::

        communicator = zcomm.Communicator(rank, size, unique_id, node_size=8)
        gathered = cupy.empty(size * shard.size, shard.dtype)
        communicator.all_gather(shard, gathered, format="int8:256")
    """

    def __init__(
        self,
        rank: int,
        size: int,
        unique_id: bytes,
        *,
        node_size: int | None = None,
        node_ids: Sequence[int] | None = None,
        device: int | None = None,
        timeout: datetime.timedelta | float = 600.0,
        chunk_bytes: int | None = None,
        seed: int = 0,
        connect_all: bool = False,
    ) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank: expected 0 to size - 1, got {rank} of size {size}")
        if not isinstance(unique_id, bytes) or len(unique_id) != 128:
            given = f"{len(unique_id)} bytes" if isinstance(unique_id, bytes) else type(unique_id).__name__
            raise ValueError(f"unique_id: expected the 128 bytes of Communicator.unique_id(), got {given}")
        if chunk_bytes is None:
            chunk_bytes = _core.DEFAULT_GPU_CHUNK_BYTES
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes: expected at least 1, got {chunk_bytes}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed: expected 0 to 2^64 - 1, got {seed}")
        patience = _timedelta(timeout)
        nodes = _nodes(size, node_size, node_ids)
        _nccl.load()
        self.device = _device(rank, device)
        core = _core.connect(rank, size, unique_id, nodes, self.device, patience, chunk_bytes, connect_all)
        super().__init__(core, patience)
        if seed:
            core.set_seed(seed)
        self.num_nodes = core.num_nodes

    @staticmethod
    def unique_id() -> bytes:
        """Return 128 bytes that identify a new group. Call it on one rank and send the result to the others."""
        _nccl.load()
        return bytes(_core.make_unique_id())

    @classmethod
    def from_nccl(
        cls,
        pointer: int,
        *,
        node_size: int | None = None,
        node_ids: Sequence[int] | None = None,
        timeout: datetime.timedelta | float = 600.0,
        chunk_bytes: int | None = None,
        seed: int = 0,
        connect_all: bool = False,
    ) -> Communicator:
        """Construct one of the ranks and GPUs of an NCCL communicator that the caller has, on all of them together.

        That communicator is borrowed for one small all-gather, and then not needed: it is neither kept, nor aborted,
        nor closed. No other call may be in progress on it. zcomm's own can be aborted without it, and takes memory of
        its own.

        Args:
            pointer: the ``ncclComm_t``, of the NCCL that ``python -m zcomm info`` names in this process.
            node_size: as all others, as in the constructor. Without it and ``node_ids``, ranks on one host are in one
                node.
            timeout: a communicator that blocks in NCCL may block for longer, until all ranks have called.
        """
        _nccl.load()
        token = int.from_bytes(hashlib.blake2b(host_identity().encode(), digest_size=8).digest(), "little")
        rank, device, unique_id, hosts = _core.bootstrap_over_nccl(pointer, token, _timedelta(timeout))
        if node_size is None and node_ids is None:
            node_ids = [hosts.index(host) for host in hosts]
        return cls(
            rank,
            len(hosts),
            unique_id,
            node_size=node_size,
            node_ids=node_ids,
            device=device,
            timeout=timeout,
            chunk_bytes=chunk_bytes,
            seed=seed,
            connect_all=connect_all,
        )

    def all_gather(self, shard: Any, out: Any, *, format: str = "int8:256", stream: Any = None) -> CallStats:
        """Fill ``out``, size times the elements of ``shard``, with every rank's shard: the same bits on every rank.
        ``shard`` may be this rank's slot of ``out``."""
        call = self._call(stream, out, shard)
        source = call.values(shard, "shard")
        slots = self._slots(call, out, "out", source, "shard", writable=True)
        operation = self._core.make_all_gather(slots, [(source.num_elements, format)])
        return self._run(operation, [source.raw], slots, call)

    def reduce_scatter(
        self, array: Any, out: Any, *, formats: str = "int8:128/int4:128", op: str = "sum", stream: Any = None
    ) -> CallStats:
        """Fill ``out`` with the sum or mean, over all ranks, of slot ``rank`` of ``array``. ``array`` has size times
        the elements of ``out``, and ``out`` may be this rank's slot of it."""
        factor = self._factor(op)
        call = self._call(stream, out, array)
        target = call.values(out, "out", writable=True)
        slots = self._slots(call, array, "array", target, "out")
        operation = self._core.make_reduce_scatter(slots, [(target.num_elements, formats)])
        return self._run(operation, slots, [target.raw], call, factor=factor)

    def all_reduce(
        self, array: Any, *, formats: str = "int8:128/int4:128", op: str = "sum", stream: Any = None
    ) -> CallStats:
        """Replace ``array`` by its sum or mean over ranks: the same bits on every rank."""
        factor = self._factor(op)
        call = self._call(stream, array)
        values = call.values(array, "array", writable=True)
        operation = self._core.make_all_reduce(values.raw, formats)
        return self._run(operation, [], [values.raw], call, factor=factor)

    def abort(self, reason: str) -> None:
        """Abort the calls in progress and make every later call raise. Thread-safe."""
        self._core.abort(reason.encode(errors="replace").decode())

    def close(self) -> None:
        """Close the connections and free scratch memory; later calls raise. May be called again."""
        self._core.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self.abort("".join(traceback.format_exception_only(kind, error)).strip())
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self._core.is_closed else f"GPU {self.device}"
        return f"<zcomm.Communicator: rank {self.rank} of {self.size} in {self.num_nodes} nodes, {state}>"

    def _call(self, stream: Any, *arrays: Any) -> Call:
        if self._core.is_closed:
            raise ValueError("this communicator is closed")
        return Call(stream, *arrays, device=self.device, hint=_HINT)

    def _factor(self, op: str) -> float:
        if op not in ("sum", "avg"):
            raise ValueError(f"op: expected 'sum' or 'avg', got {op!r}")
        return 1.0 if op == "sum" else 1.0 / self.size


def _timedelta(timeout: datetime.timedelta | float) -> datetime.timedelta:
    try:
        given = timeout if isinstance(timeout, datetime.timedelta) else datetime.timedelta(seconds=timeout)
    except OverflowError:
        given = datetime.timedelta.max
    if given < datetime.timedelta(milliseconds=1):
        raise ValueError(f"timeout: expected more than 0 seconds, got {timeout}")
    return given


def _nodes(size: int, node_size: int | None, node_ids: Sequence[int] | None) -> list[int]:
    if node_size is not None and node_ids is not None:
        raise ValueError("node_size and node_ids are mutually exclusive")
    if node_ids is not None:
        if len(node_ids) != size:
            raise ValueError(f"node_ids: expected one for each of the {size} ranks, got {len(node_ids)}")
        return list(node_ids)
    if node_size is not None and node_size < 1:
        raise ValueError(f"node_size: expected at least 1, got {node_size}")
    return [rank // (node_size or size) for rank in range(size)]


def _device(rank: int, device: int | None) -> int:
    count = _core.cuda_device_count()
    if not count:
        raise RuntimeError("found no GPU: a Communicator needs one per rank" + _HINT)
    if device is None:
        return rank % int(count)
    if not 0 <= device < count:
        raise ValueError(f"device: expected 0 to {count - 1}, got {device}: this process sees {count} GPUs")
    return device
