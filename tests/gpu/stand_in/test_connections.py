"""Which ranks are connected over NCCL: those of the hops, and no others."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.device_arrays import CudaInterface
from support.stand_in import NCCL, Gather, ReduceScatter, run

import zcomm
from zcomm import _core


def num_connections() -> int:
    """Of this process, to a peer in one direction. A ring has two."""
    count = ctypes.CDLL(NCCL).nccl_host_num_connections
    count.restype = ctypes.c_longlong
    return int(count())


# Nodes of two; the peers of each rank, a ring being one.
GROUPS = pytest.mark.parametrize(("size", "num_peers"), [(2, 2), (4, 2), (8, 4)])


@GROUPS
def test_of_a_group(size: int, num_peers: int) -> None:
    def body() -> int:
        gather = Gather(1000)
        gather()
        ReduceScatter(1000)()
        gather.check()
        return num_connections()

    nodes = [rank // 2 for rank in range(size)]
    assert run(body, size, nodes=nodes) == [2 * num_peers] * size


@GROUPS
def test_of_a_communicator(size: int, num_peers: int) -> None:
    unique_id = zcomm.Communicator.unique_id()
    made = threading.Barrier(size)

    def body(rank: int) -> int:
        with zcomm.Communicator(rank, size, unique_id, node_size=2, timeout=60) as comm:
            array = np.ones(size * 64, np.float32)
            comm.all_reduce(CudaInterface(array))
            _core.synchronize(0)
            made.wait(60)
            count = num_connections()
            made.wait(60)
            return count

    with ThreadPoolExecutor(size) as pool:
        assert list(pool.map(body, range(size))) == [size * 2 * num_peers] * size
