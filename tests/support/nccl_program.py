"""A rank of a program that calls NCCL by a package that knows nothing of zcomm, on the stand-in for a GPU.

python nccl_program.py PACKAGE RANK FOLDER: writes FOLDER/outRANK.npy, with a sum, and the values of the other rank."""

import ctypes
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

COUNT, FLOAT32, SUM = 50_000, 7, 0
CORE = Path(__file__).parents[2] / "build" / "plain" / "cuda_host" / "libzcomm_core.so"


def values_of(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32)


class Device:
    """A stream and two buffers. The stand-in's functions are C++."""

    def __init__(self, rank: int) -> None:
        self._cuda = ctypes.CDLL(str(CORE))
        self._call("_Z13cudaSetDevicei", rank)
        stream, source, target = (ctypes.c_void_p() for _ in range(3))
        self._call("_Z25cudaStreamCreateWithFlagsPP11CUstream_stj", ctypes.byref(stream), 1)
        for buffer in (source, target):
            self._call("_Z10cudaMallocPPvm", ctypes.byref(buffer), ctypes.c_size_t(4 * COUNT))
        self.stream, self.source, self.target = stream.value, source.value, target.value

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name}: {code}")

    def _copy(self, to: int, source: int, kind: int) -> None:
        stream, size = ctypes.c_void_p(self.stream), ctypes.c_size_t(4 * COUNT)
        name = "_Z15cudaMemcpyAsyncPvPKvm14cudaMemcpyKindP11CUstream_st"
        self._call(name, ctypes.c_void_p(to), ctypes.c_void_p(source), size, kind, stream)
        self._call("_Z21cudaStreamSynchronizeP11CUstream_st", stream)

    def put(self, values: Any) -> None:
        self._copy(self.source, values.ctypes.data, 1)

    def get(self) -> Any:
        values = np.empty(COUNT, np.float32)
        self._copy(values.ctypes.data, self.target, 2)
        return values


def nccl4py(device: Device) -> Any:
    from nccl.bindings import nccl

    def new_id() -> bytes:
        made = nccl.get_unique_id()  # owns the memory
        return ctypes.string_at(made.ptr, 128)

    def connect(unique_id: bytes, rank: int) -> Any:
        held = nccl.UniqueId.from_buffer(bytearray(unique_id))
        comm = nccl.comm_init_rank(2, held.ptr, rank)
        ends = (COUNT, FLOAT32)
        return SimpleNamespace(
            sum=lambda: nccl.all_reduce(device.source, device.target, *ends, SUM, comm, device.stream),
            send=lambda peer: nccl.send(device.source, *ends, peer, comm, device.stream),
            recv=lambda peer: nccl.recv(device.target, *ends, peer, comm, device.stream),
            end=lambda: nccl.comm_destroy(comm),
        )

    return SimpleNamespace(
        new_id=new_id,
        connect=connect, group_start=nccl.group_start, group_end=nccl.group_end,
    )  # fmt: skip


def cupy(device: Device) -> Any:
    from cupy.cuda import nccl

    def connect(unique_id: Any, rank: int) -> Any:
        comm = nccl.NcclCommunicator(2, unique_id, rank)
        ends = (COUNT, FLOAT32)
        return SimpleNamespace(
            sum=lambda: comm.allReduce(device.source, device.target, *ends, SUM, device.stream),
            send=lambda peer: comm.send(device.source, *ends, peer, device.stream),
            recv=lambda peer: comm.recv(device.target, *ends, peer, device.stream),
            end=comm.destroy,
        )

    return SimpleNamespace(
        new_id=nccl.get_unique_id, connect=connect, group_start=nccl.groupStart, group_end=nccl.groupEnd
    )


def main(package: str, rank: int, folder: Path) -> None:
    device = Device(rank)
    nccl = {"nccl4py": nccl4py, "cupy": cupy}[package](device)
    file = folder / "id"
    if rank == 0:
        (folder / "new").write_bytes(pickle.dumps(nccl.new_id()))
        (folder / "new").rename(file)
    while not file.exists():
        time.sleep(0.01)
    comm = nccl.connect(pickle.loads(file.read_bytes()), rank)
    device.put(values_of(rank))
    comm.sum()
    total = device.get()
    nccl.group_start()
    comm.send(1 - rank)
    comm.recv(1 - rank)
    nccl.group_end()
    np.save(folder / f"out{rank}.npy", np.stack([total, device.get()]))
    comm.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
