"""Ranks of communicators without torch, as threads. Each has a GPU of the stand-in; see cuda_on_host."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zcomm
from zcomm import _core, _nccl

CORE = Path(_nccl.load()[0]).with_name("libzcomm_core.so")
_runtime = ctypes.CDLL(str(CORE))


def set_device(device: int) -> None:
    """As frameworks do: the device of this thread."""
    assert _runtime._Z13cudaSetDevicei(device) == 0


def new_stream() -> int:
    handle = ctypes.c_void_p()
    assert _runtime._Z16cudaStreamCreatePP11CUstream_st(ctypes.byref(handle)) == 0
    return int(handle.value or 0)


def run(size: int, body: Callable[[Any], Any], **fields: Any) -> list[Any]:
    """body(communicator) on every rank, in threads; each has a GPU of its own."""
    unique_id = zcomm.Communicator.unique_id()

    def rank_body(rank: int) -> Any:
        set_device(rank)
        with zcomm.Communicator(rank, size, unique_id, **{"timeout": 60, **fields}) as comm:
            result = body(comm)
            _core.synchronize(0)
            return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_body, range(size)))
