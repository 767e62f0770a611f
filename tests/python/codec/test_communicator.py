"""Calls that a Communicator refuses before any byte moves, and its errors without a GPU. tests/gpu/stand_in tests
its results."""

from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.device_arrays import CUDA, READ_ONLY, Dlpack

import zcomm
from zcomm import _core, _nccl
from zcomm._arrays import HOST

ID = bytes(128)


class FakeCore:
    """Takes the place of the C++ communicator; notes what it is called with."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.num_nodes, self.is_closed = 2, False
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("make_"):
            return lambda *arguments: (name, *arguments)
        return lambda *arguments, **fields: self.calls.append((name, *arguments, *fields.values()))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A machine with eight GPUs: what _core.connect was called with."""
    made: list[tuple[Any, ...]] = []

    def connect(rank: int, size: int, *arguments: Any) -> FakeCore:
        made.append((rank, size, *arguments))
        return FakeCore(rank, size)

    monkeypatch.setattr(_nccl, "load", lambda: ("libnccl.so.2", "2.28.9"))
    monkeypatch.setattr(_core, "cuda_device_count", lambda: 8)
    monkeypatch.setattr(_core, "connect", connect)
    return made


@pytest.fixture
def comm(connections: list[tuple[Any, ...]]) -> Any:
    return zcomm.Communicator(1, 4, ID, node_size=2)


def gpu(count: int, dtype: Any = np.float32, **fields: Any) -> Dlpack:
    return Dlpack(np.zeros(count, dtype), (CUDA, fields.pop("device", 1)), **fields)


def test_arguments_arrive(connections: list[tuple[Any, ...]]) -> None:
    hour = datetime.timedelta(hours=1)
    for fields, nodes, device, timeout in [
        ({}, [0, 0, 0, 0], 1, 600),
        ({"node_size": 2, "timeout": 5}, [0, 0, 1, 1], 1, 5),
        ({"node_size": 3, "device": 7, "timeout": 0.5}, [0, 0, 0, 1], 7, 0.5),
        ({"node_ids": (4, 2, 4, 2), "timeout": hour, "connect_all": True}, [4, 2, 4, 2], 1, 3600),
    ]:
        comm = zcomm.Communicator(1, 4, ID, chunk_bytes=4096, **fields)
        limit = datetime.timedelta(seconds=timeout)
        assert connections[-1] == (1, 4, ID, nodes, device, limit, 4096, "connect_all" in fields)
        assert (comm.rank, comm.size, comm.num_nodes, comm.device) == (1, 4, 2, device)
    assert zcomm.Communicator(9, 16, ID).device == 1
    assert repr(comm) == "<zcomm.Communicator: rank 1 of 4 in 2 nodes, GPU 1>"


def test_wrong_groups_are_refused(connections: list[tuple[Any, ...]]) -> None:
    for message, rank, size, unique_id, fields in [
        ("rank: expected 0 to size - 1, got 4 of size 4", 4, 4, ID, {}),
        ("rank: expected 0 to size - 1, got 0 of size 0", 0, 0, ID, {}),
        ("unique_id: expected the 128 bytes of Communicator.unique_id.., got 127 bytes", 0, 1, ID[1:], {}),
        ("unique_id: expected the 128 bytes .* got str", 0, 1, "x" * 128, {}),
        ("node_size and node_ids are mutually exclusive", 0, 2, ID, {"node_size": 1, "node_ids": [0, 1]}),
        ("node_size: expected at least 1, got 0", 0, 2, ID, {"node_size": 0}),
        ("node_ids: expected one for each of the 2 ranks, got 3", 0, 2, ID, {"node_ids": [0, 1, 2]}),
        ("device: expected 0 to 7, got 8: this process sees 8 GPUs", 0, 1, ID, {"device": 8}),
        ("timeout: expected more than 0 seconds, got 0", 0, 1, ID, {"timeout": 0}),
        ("chunk_bytes: expected at least 1, got 0", 0, 1, ID, {"chunk_bytes": 0}),
    ]:
        with pytest.raises(ValueError, match=message):
            zcomm.Communicator(rank, size, unique_id, **fields)
    assert not connections


def test_calls_arrive(comm: Any) -> None:
    whole, part = gpu(12), gpu(3)
    address, own = whole.array.ctypes.data, (part.array.ctypes.data, 3, "float32")
    slots = [(address + 12 * i, 3, "float32") for i in range(4)]
    whole_array = (address, 12, "float32")
    limit = datetime.timedelta(minutes=10)
    comm.all_gather(part, whole, format="int8:64", stream=0x70)
    comm.reduce_scatter(whole, part, op="avg")
    comm.all_reduce(whole, formats="int8:64", stream=2)
    comm.abort("enough")
    assert comm._core.calls == [
        ("run", ("make_all_gather", slots, [(3, "int8:64")]), [own], slots, limit, 0x70),
        ("run", ("make_reduce_scatter", slots, [(3, "int8:128/int4:128")]), slots, [own], limit, 0, 0.25),
        ("run", ("make_all_reduce", whole_array, "int8:64"), [], [whole_array], limit, 2, 1.0),
        ("abort", "enough"),
    ]
    assert whole.streams == [*part.streams[:2], 2] == [0x70, 1, 2]


def test_wrong_arrays_are_refused(comm: Any) -> None:
    x = np.zeros(12, np.float32)
    host = r"\(a Communicator moves arrays on GPUs, over NCCL; for arrays on the CPU there are zcomm.testing.LocalWorld"
    gather, scatter, reduce = comm.all_gather, comm.reduce_scatter, comm.all_reduce
    for error, message, call in [
        (ValueError, "shard: expected an array on GPU 1, got one on the CPU " + host, lambda: gather(x[:3], gpu(12))),
        (ValueError, "out: expected an array on GPU 1, got one on the CPU " + host, lambda: gather(gpu(3), x)),
        (ValueError, "array: expected an array on GPU 1, got one on the CPU " + host, lambda: reduce(x)),
        (ValueError, "array: expected an array on GPU 1, got one on GPU 0$", lambda: reduce(gpu(3, device=0))),
        (TypeError, "array: expected dtype float32, .* got int32", lambda: reduce(gpu(3, np.int32))),
        (
            TypeError,
            "out: expected dtype float32 as in shard, got float16",
            lambda: gather(gpu(3), gpu(12, np.float16)),
        ),
        (
            TypeError,
            "array: expected dtype float32 as in out, got float16",
            lambda: scatter(gpu(12, np.float16), gpu(3)),
        ),
        (ValueError, "out: expected 4 times the 3 elements of shard, got 13", lambda: gather(gpu(3), gpu(13))),
        (ValueError, "array: expected 4 times the 12 elements of out, got 3", lambda: scatter(gpu(3), gpu(12))),
        (ValueError, "out: expected a writable array", lambda: gather(gpu(3), gpu(12, flags=READ_ONLY))),
        (ValueError, "array: expected a writable array", lambda: reduce(gpu(3, flags=READ_ONLY))),
        (ValueError, "array: expected a contiguous array", lambda: reduce(Dlpack(x[::2], (CUDA, 1)))),
        (ValueError, "op: expected 'sum' or 'avg', got 'max'", lambda: reduce(gpu(3), op="max")),
        (TypeError, "stream: expected None, a stream's .* got str", lambda: reduce(gpu(3), stream="x")),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert not comm._core.calls


def test_a_closed_communicator_says_so(comm: Any) -> None:
    with comm as same:
        assert same is comm
    comm.close()
    with pytest.raises(ValueError, match="this communicator is closed"):
        comm.all_reduce(gpu(3))
    assert "closed" in repr(comm)


def test_an_error_inside_aborts(comm: Any) -> None:
    with pytest.raises(KeyError), comm:
        raise KeyError("lost")
    assert comm._core.calls == [("abort", "KeyError: 'lost'")]
    assert comm._core.is_closed


def test_an_error_whose_text_is_no_text_aborts_all_the_same(comm: Any) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise LookupError

    with pytest.raises(Odd), comm:
        raise Odd
    assert comm._core.is_closed
    comm.abort("\udcff")  # of a file's name
    assert comm._core.calls[-1] == ("abort", "?")


def test_a_machine_without_gpus(connections: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cuda_device_count", lambda: 0)
    with pytest.raises(RuntimeError, match=r"found no GPU: a Communicator needs one per rank.*LocalWorld"):
        zcomm.Communicator(0, 1, ID)


@pytest.mark.skipif(bool(_core.cuda_toolkit()), reason="this build has CUDA")
def test_a_build_without_cuda_says_so() -> None:
    message = "this build of zcomm has no CUDA: it was built without nvcc, or with ZCOMM_CUDA=OFF."
    for call in (
        zcomm.Communicator.unique_id,
        _nccl.load,
        lambda: zcomm.Communicator(0, 1, ID),
        lambda: _core.synchronize(0),
        lambda: _core.connect(0, 1, ID, [0], 0, datetime.timedelta(seconds=1), 1, False),
    ):
        with pytest.raises(_core.Error, match=message):
            call()
    assert (_core.cuda_toolkit(), _core.cuda_targets()) == ("", "")


@pytest.mark.skipif(not _core.cuda_toolkit(), reason="this build has no CUDA")
def test_a_build_with_cuda_says_for_which_gpus() -> None:
    assert float(_core.cuda_toolkit()) >= 12
    assert _core.cuda_targets()
    try:
        path, version = _nccl.load()
    except _core.TransportError as error:
        assert "libnccl.so.2" in str(error)
    else:
        assert path
        assert int(version.partition(".")[0]) >= 2


def test_local_communicators_can_be_closed() -> None:
    first, second = _core.make_local_communicators([0, 1], 4096)
    assert (first.rank, second.rank, first.num_nodes) == (0, 1, 2)
    first.close()
    first.close()
    first.abort("is ignored")
    assert first.is_closed
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="this communicator is closed"):
        values = (x.ctypes.data, 4, "float32")
        first.run(first.make_all_reduce(values, "int8:32"), [], [values], datetime.timedelta(seconds=1))


def test_no_torch_is_needed() -> None:
    script = """
import sys
sys.modules["torch"] = None
import zcomm
zcomm.Communicator, zcomm.Communicator.unique_id
from zcomm import codec, testing
assert not {"cupy", "jax"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_host_is_what_the_core_calls_it() -> None:
    x = np.zeros(4, np.float32)
    wire = np.zeros(80, np.uint8)
    _core.encode((x.ctypes.data, 4, "float32"), "int8:32", wire.ctypes.data, "", HOST, 0)
