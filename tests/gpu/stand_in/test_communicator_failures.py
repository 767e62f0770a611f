"""Communicators without torch, as threads: what fails, ends, or differs between ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.device_arrays import CUDA, CudaInterface, Dlpack
from support.stand_in_threads import new_stream, run, set_device

import zcomm
from zcomm import _core


def test_an_abort_ends_the_calls_of_its_rank() -> None:
    made = threading.Barrier(2)

    def body(comm: Any) -> None:
        made.wait(30)
        if comm.rank == 0:
            comm.abort("the trainer gave up")
            with pytest.raises(_core.TransportError, match="the trainer gave up"):
                comm.all_reduce(CudaInterface(np.zeros(64, np.float32)))
        made.wait(30)

    run(2, body)


def test_ranks_that_give_different_nodes_learn_so() -> None:
    """Their messages have equal sizes."""
    unique_id = zcomm.Communicator.unique_id()

    def body(rank: int) -> None:
        set_device(rank)
        with pytest.raises(
            _core.TransportError, match=r"on nodes 0 [01]\", rank \d \"a communicator .* on nodes 0 [01]"
        ):
            zcomm.Communicator(rank, 2, unique_id, node_size=rank + 1, timeout=60)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, range(2)))


def test_an_abort_ends_a_close_that_waits() -> None:
    made = threading.Barrier(2)

    def body(comm: Any) -> None:
        made.wait(30)
        if comm.rank == 0:
            comm.all_reduce(CudaInterface(np.zeros(64, np.float32)))  # the other rank does not
            closing = threading.Thread(target=comm.close)
            closing.start()
            while "closed" not in repr(comm):
                pass
            comm.abort("the trainer gave up")
            closing.join(30)
            assert not closing.is_alive()
        made.wait(60)

    run(2, body, timeout=3600)


def test_producers_are_waited_for_on_the_communicators_gpu_whichever_is_current() -> None:
    def body(comm: Any) -> Any:
        x = np.full(64, comm.rank + 1, np.float32)
        producer = new_stream()
        set_device(comm.device + 2)
        comm.all_reduce(CudaInterface(x, stream=producer), formats="exact")
        set_device(comm.device)
        _core.synchronize(0)
        return x

    for x in run(2, body):
        assert (x == 3).all()


def test_a_peer_that_does_not_call_is_missed() -> None:
    done = threading.Barrier(2)

    def body(comm: Any) -> None:
        if comm.rank == 0:
            x = np.zeros(64, np.float32)
            comm.all_reduce(CudaInterface(x))
            _core.synchronize(0)  # the watchdog ends it
            with pytest.raises(_core.TimeoutError, match="all_reduce"):
                comm.all_reduce(CudaInterface(x))
        done.wait(60)

    run(2, body, timeout=2)


def test_wrong_arguments_leave_the_communicator_usable() -> None:
    def body(comm: Any) -> Any:
        x = np.full(64, comm.rank + 1, np.float32)
        for error, message, array, formats in [
            (ValueError, "array: expected an array on GPU .*, got one on the CPU.*LocalWorld", x, "int8:32"),
            (ValueError, f"expected an array on GPU {comm.rank}, got one on GPU 7$", Dlpack(x, (CUDA, 7)), "bf16"),
            (ValueError, "format: expected exact, .* got 'int8:33'", CudaInterface(x), "int8:33"),
        ]:
            with pytest.raises(error, match=message):
                comm.all_reduce(array, formats=formats)
        comm.all_reduce(CudaInterface(x), formats="exact")
        _core.synchronize(0)
        return x

    for x in run(2, body):
        assert (x == 3).all()
