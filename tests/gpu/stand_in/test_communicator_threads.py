"""Communicators without torch. The memory of the "GPUs" is that of NumPy arrays; the bits are those of
zcomm.testing.LocalWorld."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.device_arrays import CUDA, CudaInterface, Dlpack, OldDlpack
from support.stand_in_threads import CORE, new_stream, run, set_device

import zcomm
from zcomm import _core, _nccl, codec
from zcomm.testing import LocalWorld

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
GATHER, SCATTER, REDUCE = "int8:64", "int8:64/int4:32", "int8:32/int4:64"


def values(rank: int, count: int, dtype: str) -> Any:
    return np.random.default_rng(rank).standard_normal(count, np.float32).astype(DTYPES[dtype])


def on_gpu(array: Any, device: int) -> Any:
    """``array`` as one of the kinds of array on GPUs."""
    kinds = [lambda: Dlpack(array, (CUDA, device)), lambda: OldDlpack(array, (CUDA, device))]
    if array.dtype.kind == "f":
        kinds.append(lambda: CudaInterface(array))
    return kinds[device % len(kinds)]()


def collectives(comm: Any, count: int, dtype: str, stream: Any = None) -> tuple[list[Any], list[Any], list[Any]]:
    """What the collectives give, once the stream is done, what they send, and what must be kept until then."""
    rank, size = comm.rank, comm.size
    shard = values(rank, count, dtype)
    whole = np.zeros(size * count, shard.dtype)
    slots = values(100 + rank, size * count, dtype)
    part = np.zeros(count, shard.dtype)
    total = values(200 + rank, 3 * count + 1, dtype)
    in_place = np.zeros_like(whole)
    own = in_place[rank * count : (rank + 1) * count]
    own[:] = shard
    parts, gathered, scattered = (np.zeros_like(whole), np.zeros_like(whole), np.zeros_like(shard))
    published = values(rank, 3 * count + 1, dtype)
    is_root = rank == size - 1
    stats = [
        comm.all_gather(on_gpu(shard, rank), on_gpu(whole, rank), format=GATHER, stream=stream),
        comm.all_gather(on_gpu(own, rank), on_gpu(in_place, rank), format=GATHER, stream=stream),
        comm.reduce_scatter(on_gpu(slots, rank), on_gpu(part, rank), formats=SCATTER, op="avg", stream=stream),
        comm.all_reduce(on_gpu(total, rank), formats=REDUCE, stream=stream),
        comm.all_to_all(on_gpu(slots, rank), on_gpu(parts, rank), formats=SCATTER, stream=stream),
        comm.gather(
            on_gpu(shard, rank), on_gpu(gathered, rank) if is_root else None, size - 1, formats=SCATTER, stream=stream
        ),
        comm.scatter(
            on_gpu(slots, rank) if is_root else None, on_gpu(scattered, rank), size - 1, formats=SCATTER, stream=stream
        ),
        comm.broadcast(on_gpu(published, rank), size - 1, format=GATHER, stream=stream),
    ]
    return [whole, in_place, part, total, parts, gathered, scattered, published], stats, [shard, slots]


def expected(nodes: list[int], count: int, dtype: str) -> list[list[Any]]:
    size = len(nodes)

    def body(rank: Any) -> list[Any]:
        kind = DTYPES[dtype]
        whole = rank.all_gather(values(rank.rank, count, dtype), np.zeros(size * count, kind), GATHER)
        slots = values(100 + rank.rank, size * count, dtype)
        part = rank.reduce_scatter(slots, np.zeros(count, kind), SCATTER, factor=1 / size)
        total = rank.all_reduce(values(200 + rank.rank, 3 * count + 1, dtype), REDUCE)
        parts, gathered, scattered = np.zeros(size * count, kind), np.zeros(size * count, kind), np.zeros(count, kind)
        rank.all_to_all(slots, parts, formats=SCATTER)
        rank.gather(values(rank.rank, count, dtype), gathered, size - 1, formats=SCATTER)
        rank.scatter(slots, scattered, size - 1, formats=SCATTER)
        published = values(rank.rank, 3 * count + 1, dtype)
        rank.broadcast(published, size - 1, format=GATHER)
        return [whole, whole, part, total, parts, gathered, scattered, published]

    return LocalWorld(nodes).run(body)


def assert_same(got: list[Any], want: list[Any], what: object) -> None:
    names = ("all_gather", "in place", "reduce_scatter", "all_reduce", "all_to_all", "gather", "scatter", "broadcast")
    for name, one, other in zip(names, got, want, strict=True):
        bits = [array.view(f"u{array.itemsize}") for array in (one, other)]
        assert (bits[0] == bits[1]).all(), (what, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1]])
def test_the_bits_are_those_of_ranks_on_the_cpu(nodes: list[int], dtype: str) -> None:
    for count in (0, 1, 1000, 20_000):
        chunk = {"chunk_bytes": 8192} if count == 20_000 else {}
        results = run(len(nodes), lambda comm, n=count: collectives(comm, n, dtype), node_ids=nodes, **chunk)
        for rank, want in enumerate(expected(nodes, count, dtype)):
            assert_same(results[rank][0], want, (nodes, count, rank))


def test_bytes_are_counted() -> None:
    count = 4096
    (_, sent, _), *_ = run(4, lambda comm: collectives(comm, count, "float32"), node_size=2)
    stats = [(one.intra_node_bytes, one.inter_node_bytes) for one in sent]
    slot = codec.wire_bytes(GATHER, "float32", count)
    assert stats[0] == stats[1] == (2 * slot, slot)  # between nodes the own slot, inside the node two
    inside, between = (codec.wire_bytes(format, "float32", count) for format in SCATTER.split("/"))
    assert stats[2] == (2 * inside, between)


def test_the_host_does_not_wait() -> None:
    """One thread makes the calls of all ranks, one after the other, on streams of its own."""
    size, count = 4, 5000
    unique_id = zcomm.Communicator.unique_id()
    connect = lambda rank: zcomm.Communicator(rank, size, unique_id, node_size=2, connect_all=True)  # noqa: E731
    with ThreadPoolExecutor(size) as pool:
        comms = list(pool.map(connect, range(size)))
    streams, gathered = [], []
    for comm in comms:
        set_device(comm.device)
        streams.append(new_stream())
    for comm, stream in zip(comms, streams, strict=True):
        gathered.append(collectives(comm, count, "bfloat16", stream))
    for stream in streams:
        _core.synchronize(stream)
    set_device(0)
    for rank, want in enumerate(expected([0, 0, 1, 1], count, "bfloat16")):
        assert_same(gathered[rank][0], want, rank)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda comm: comm.close(), comms))


def _rank_process(rank: int, size: int, pipe: Any) -> None:
    """The main function of a rank's process."""
    unique_id = pipe.recv()
    with zcomm.Communicator(rank, size, unique_id, node_size=2, device=rank, timeout=60) as comm:
        set_device(rank)
        results, _, _kept = collectives(comm, 3000, "float32")
        _core.synchronize(0)
    pipe.send([one.tobytes() for one in results])


def test_ranks_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 4
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{CORE.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [context.Process(target=_rank_process, args=(rank, size, pipes[rank][1])) for rank in range(size)]
    for process in ranks:
        process.start()
    unique_id = zcomm.Communicator.unique_id()
    for pipe, _ in pipes:
        pipe.send(unique_id)
    try:
        for rank, want in enumerate(expected([0, 0, 1, 1], 3000, "float32")):
            assert pipes[rank][0].poll(60), f"rank {rank} is late"
            assert pipes[rank][0].recv() == [one.tobytes() for one in want], rank
    finally:
        for process in ranks:
            process.join(20)
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * size


def test_codecs_on_a_gpu_give_the_bits_of_the_cpu() -> None:
    x = values(0, 10_000, "float32")

    def memory(num_bytes: int) -> Any:
        raw = np.zeros(num_bytes + 16, np.uint8)
        start = -raw.ctypes.data % 16
        return raw[start : start + num_bytes]

    for format in ("exact", "bf16", "int8:256", "int4:32"):
        wire = codec.encode(x, format)
        on_device, out = memory(wire.size), np.zeros_like(x)
        sums = memory(codec.wire_bytes("int8:32", "float32", x.size))
        queue = new_stream()
        codec.encode(CudaInterface(x), format, out=CudaInterface(on_device), stream=queue)
        codec.decode(CudaInterface(on_device), format, CudaInterface(out), stream=queue)
        sources = [(CudaInterface(on_device), format), (CudaInterface(x), "exact")] * 12  # more than fit a launch
        codec.decode_sum_encode(sources, x.size, "int8:32", out=CudaInterface(sums), stream=queue)
        _core.synchronize(queue)
        assert (on_device == wire).all()
        assert (out == codec.decode(wire, format, np.empty_like(x))).all()
        assert (sums == codec.decode_sum_encode([(wire, format), (x, "exact")] * 12, x.size, "int8:32")).all()
        codec.decode_sum(sources, Dlpack(out), factor=0.5)
        _core.synchronize(0)
        assert (out == codec.decode_sum([(wire, format), (x, "exact")] * 12, np.empty_like(x), factor=0.5)).all()


@pytest.mark.parametrize(("size", "num_peers"), [(2, 2), (4, 2), (8, 4)])
def test_ranks_in_nodes_of_two_are_connected_with_those_of_their_hops(size: int, num_peers: int) -> None:
    """A ring is one more peer. Connections are counted in this process, to a peer in one direction."""
    count = ctypes.CDLL(_nccl.load()[0]).nccl_host_num_connections
    count.restype = ctypes.c_longlong
    made = threading.Barrier(size)

    def body(comm: Any) -> int:
        array = np.ones(size * 64, np.float32)
        comm.all_reduce(CudaInterface(array))
        _core.synchronize(0)
        made.wait(60)
        counted = int(count())
        made.wait(60)
        return counted

    assert run(size, body, node_size=2) == [size * 2 * num_peers] * size


def test_a_rank_that_does_not_come_is_missed() -> None:
    with pytest.raises(_core.TimeoutError, match="rank 0 of 2 could not connect over NCCL within 500 ms"):
        zcomm.Communicator(0, 2, zcomm.Communicator.unique_id(), timeout=0.5)


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class _Config(ctypes.Structure):
    """NCCL's, as of 2.18."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_uint) for name in ("magic", "version")),
        *((name, ctypes.c_int) for name in ("blocking", "cga_cluster_size", "min_ctas", "max_ctas")),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


def framework_communicator(rank: int, size: int, unique_id: bytes, blocking: bool) -> int:
    """An ncclComm_t as a framework makes it."""
    nccl = ctypes.CDLL(_nccl.load()[0])
    undefined = -(1 << 31)  # NCCL refuses 0
    fields = int(blocking), undefined, undefined, undefined, None, undefined
    config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21801, *fields)
    made = ctypes.c_void_p()
    made_by = nccl.ncclCommInitRankConfig
    made_by.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int, ctypes.c_void_p]
    assert made_by(ctypes.byref(made), size, _UniqueId(unique_id), rank, ctypes.byref(config)) in (0, 7)
    state = ctypes.c_int(7)
    while state.value == 7:  # in progress
        assert nccl.ncclCommGetAsyncError(made, ctypes.byref(state)) == 0
    assert state.value == 0
    return made.value or 0


def _close(pointer: int) -> None:
    nccl = ctypes.CDLL(_nccl.load()[0])
    communicator, state = ctypes.c_void_p(pointer), ctypes.c_int(7)
    assert nccl.ncclCommFinalize(communicator) in (0, 7)
    while state.value == 7:
        assert nccl.ncclCommGetAsyncError(communicator, ctypes.byref(state)) == 0
    assert nccl.ncclCommDestroy(communicator) == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_ranks_meet_over_a_communicator_that_the_caller_keeps(blocking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are hosts unless the caller says otherwise; an abort leaves the caller's communicator alone."""
    size, unique_id = 4, zcomm.Communicator.unique_id()

    def body(rank: int) -> list[Any]:
        set_device(rank)
        pointer = framework_communicator(rank, size, unique_id, blocking)
        with zcomm.Communicator.from_nccl(pointer) as comm:
            assert (comm.rank, comm.size, comm.num_nodes, comm.device) == (rank, size, 1, rank)
        with zcomm.Communicator.from_nccl(pointer, node_size=2, connect_all=True) as comm:
            assert comm.num_nodes == 2
            results, _, _kept = collectives(comm, 1000, "float32")
            _core.synchronize(0)
            comm.abort("for a test")
        monkeypatch.setattr("zcomm.communicator.host_identity", lambda: f"host {threading.get_ident()}")
        with zcomm.Communicator.from_nccl(pointer) as comm:
            assert comm.num_nodes == size
        _close(pointer)
        return results

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(body, range(size)))
    for rank, want in enumerate(expected([0, 0, 1, 1], 1000, "float32")):
        assert_same(results[rank], want, rank)


def test_ctrl_c_ends_a_meeting() -> None:
    size, unique_id = 2, zcomm.Communicator.unique_id()
    ended = threading.Event()

    def body(rank: int) -> None:
        set_device(rank)
        pointer = framework_communicator(rank, size, unique_id, blocking=False)
        if rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                zcomm.Communicator.from_nccl(pointer, timeout=600)
            ended.set()
        assert ended.wait(60)
        assert ctypes.CDLL(_nccl.load()[0]).ncclCommAbort(ctypes.c_void_p(pointer)) == 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what is in the background ignore it
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(body, 1)
            body(0)  # in the thread that Python's handlers of signals run in
            other.result()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_that_does_not_meet_the_others_is_missed() -> None:
    size, unique_id = 2, zcomm.Communicator.unique_id()

    def body(rank: int) -> None:
        set_device(rank)
        pointer = framework_communicator(rank, size, unique_id, blocking=False)
        if rank == 0:
            with pytest.raises(_core.TimeoutError, match="rank 0 of 2 did not meet the others over the given NCCL"):
                zcomm.Communicator.from_nccl(pointer, timeout=1)
        met.wait(60)
        assert ctypes.CDLL(_nccl.load()[0]).ncclCommAbort(ctypes.c_void_p(pointer)) == 0

    met = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(body, range(size)))
    with pytest.raises(ValueError, match="communicator: expected an ncclComm_t, got null"):
        zcomm.Communicator.from_nccl(0)
