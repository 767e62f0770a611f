"""Connections over NCCL: which ranks have one, and what ends the wait for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import worlds
from support.device_arrays import CudaInterface
from support.stand_in import NCCL, Gather, ReduceScatter, dist, run, torch, with_nccl

import zcomm
from zcomm.distributed import backend

# Of the group, which no test waits for, and of a test.
GROUP_SECONDS = 600.0
IN_TIME = 90.0


def num_connections() -> int:
    """Of this process, to a peer in one direction. A ring has two."""
    count = ctypes.CDLL(NCCL).nccl_host_num_connections
    count.restype = ctypes.c_longlong
    return int(count())


@pytest.mark.parametrize(("size", "num_peers"), [(2, 2), (4, 2), (8, 4)])
def test_ranks_in_nodes_of_two_are_connected_with_those_of_their_hops(size: int, num_peers: int) -> None:
    """A ring is one more peer."""

    def body() -> int:
        gather = Gather(1000)
        gather()
        ReduceScatter(1000)()
        gather.check()
        return num_connections()

    nodes = [rank // 2 for rank in range(size)]
    assert run(body, size, nodes=nodes) == [2 * num_peers] * size


def before_connecting(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], Any]]) -> None:
    """Let a rank do this between the meeting of all ranks and its connections."""
    meet = backend._Group._meet_for_nccl

    def hook(group: Any) -> Any:
        met = meet(group)
        actions.get(group._rank, lambda: None)()
        return met

    monkeypatch.setattr(backend._Group, "_meet_for_nccl", hook)


def first_call() -> str:
    """What a group's first call raises."""
    gather = Gather(1000)
    try:
        gather()
    except RuntimeError as error:
        return str(error)
    gather.check()
    return "well"


def collect(body: Callable[[], Any], size: int) -> list[worlds.Outcome]:
    fields = {"grace": IN_TIME, "seconds": IN_TIME, "group_seconds": GROUP_SECONDS}
    return worlds.collect(body, size, **with_nccl(fields))


def texts_of(body: Callable[[], Any], size: int, but: int = -1) -> list[str]:
    """What each rank but one returns, in time."""
    outcomes = [outcome for rank, outcome in enumerate(collect(body, size)) if rank != but]
    for outcome in outcomes:
        assert outcome.finished and outcome.error is None, outcome.trace
    return [outcome.value for outcome in outcomes]


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_a_rank_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no reason; its neighbour misses it and tells the others."""
    before_connecting(monkeypatch, {1: lambda: os.kill(os.getpid(), signal.SIGKILL)})
    for text in texts_of(first_call, 3, but=1):
        assert "rank 1 is gone" in text, text


def test_a_rank_that_cannot_connect_tells_the_others_why(monkeypatch: pytest.MonkeyPatch) -> None:
    before_connecting(monkeypatch, {1: lambda: os.environ.update(NCCL_COMM_BLOCKING="1")})
    texts = texts_of(first_call, 3)
    assert "rank 1 gave up" not in texts[1]
    for text in texts:
        assert "NCCL_COMM_BLOCKING: expected it unset or 0, got 1" in text, text


def test_a_rank_without_nccl_ends_the_call_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    load = backend._nccl.load

    def load_or_fail() -> tuple[str, str]:
        if dist.get_rank() == 1:
            raise RuntimeError("NCCL was not found")
        return load()

    monkeypatch.setattr(backend._nccl, "load", load_or_fail)
    for text in texts_of(first_call, 3):
        assert "rank 1 failed: NCCL was not found" in text, text


def test_a_rank_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    before_connecting(monkeypatch, {1: lambda: time.sleep(2)})
    assert texts_of(first_call, 2) == ["well", "well"]


def test_a_rank_that_nccl_keeps_for_long_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    before_connecting(monkeypatch, {1: lambda: os.environ.update(NCCL_HOST_INIT_SECONDS="14")})
    assert texts_of(first_call, 2) == ["well", "well"]


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_an_end_by_another_thread(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The calls of all ranks end: that of rank 1, which comes later, for the reason of rank 0."""
    ended, ends = tmp_path / "ended", []

    def end() -> None:
        if how == "abort":
            dist.group.WORLD._get_backend(torch.device("cuda", 0)).abort()
        else:
            dist.destroy_process_group()

    def begin_to_end() -> None:
        ends.append(threading.Timer(0.3, end))
        ends[0].start()

    def body() -> str:
        text = first_call()
        for thread in ends:
            thread.join()
            ended.touch()
        return text

    before_connecting(monkeypatch, {0: begin_to_end, 1: lambda: wait_for(ended)})
    texts = texts_of(body, 2)
    assert "abort" in texts[0], texts[0]
    assert "rank 0 gave up" in texts[1], texts[1]


@contextlib.contextmanager
def ctrl_c() -> Iterator[None]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        yield


def test_ctrl_c_ends_a_communicator_that_connects() -> None:
    def body() -> None:
        with ctrl_c():
            zcomm.Communicator(0, 2, zcomm.Communicator.unique_id(), timeout=GROUP_SECONDS)

    run(body, 1, backend=None, seconds=IN_TIME)


def test_ctrl_c_ends_a_call_between_ranks_that_are_not_connected_yet(tmp_path: Path) -> None:
    """Ranks 0 and 3 are no peers of each other's hops; rank 3 does not call."""
    named, ended = tmp_path / "named", tmp_path / "ended"

    def body() -> None:
        rank = dist.get_rank()
        if rank == 0:
            named.with_suffix(".part").write_bytes(zcomm.Communicator.unique_id())
            named.with_suffix(".part").rename(named)
        wait_for(named)
        comm = zcomm.Communicator(rank, 4, named.read_bytes(), node_size=2, timeout=GROUP_SECONDS)
        if rank == 0:
            with ctrl_c():
                comm.send(CudaInterface(np.zeros(64, np.float32)), 3)
            ended.touch()
        wait_for(ended)
        comm.abort("the test is over")

    run(body, 4, seconds=IN_TIME)
