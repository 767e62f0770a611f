"""Failures in the middle of calls of one and of many chunks, in one hop and in two, eager and in a graph. All ranks
that are left end by themselves, with an error that names a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from support import gpu_world
from support.gpu_world import DEVICE, GPU, SOON, Gather, fails, synchronize
from support.worlds import options

pytestmark = [pytest.mark.cuda_only, pytest.mark.stand_in]

IN_TIME = 40.0
BLOCK, MOST_CHUNKS = 256, 64
NUM = BLOCK * MOST_CHUNKS  # of float32

shape = pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 1, 1]], ids=["2x1", "2x2"])
chunks = pytest.mark.parametrize(
    "chunks", [pytest.param(1, marks=pytest.mark.slow), 8, pytest.param(64, marks=pytest.mark.slow)]
)
way = pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])


def outcomes(body: Callable[[], Any], chunks: int, nodes: list[int], seconds: float) -> list[Any]:
    return gpu_world.collect(
        body,
        len(nodes),
        nodes=nodes,
        grace=IN_TIME,
        group_seconds=seconds,
        env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        options=options(chunk_bytes=NUM * 4 // chunks),
    )


def ready(is_graph: bool) -> tuple[Gather, Callable[[], Any]]:
    """A gather that has been used, and a way to call it: eager, or by a replay. All ranks are here."""
    gather = Gather(NUM)
    gather()
    gather.check()
    call = GPU.captured(gather).replay if is_graph else gather
    synchronize()
    dist.barrier()
    return gather, call


def attempt(*calls: Callable[[], object]) -> str:
    """The error of the first that raises: any may, as soon as the failure is known."""
    try:
        for call in calls:
            call()
    except RuntimeError as error:
        return str(error)
    return ""


@chunks
@shape
@way
def test_a_peer_is_killed(chunks: int, nodes: list[int], is_graph: bool) -> None:
    def body() -> str:
        gather, call = ready(is_graph)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        text = attempt(call, gather, synchronize)  # a replay has no deadline of its own
        del call  # an abort waits for graphs
        return text or fails(gather)

    ended = outcomes(body, chunks, nodes, SOON)
    assert ended[1].exit_code == -signal.SIGKILL
    for rank in set(range(len(nodes))) - {1}:
        assert ended[rank].finished and ended[rank].error is None, ended[rank].trace
        assert "rank" in ended[rank].value, ended[rank].value


@chunks
@shape
def test_a_peer_is_late(chunks: int, nodes: list[int]) -> None:
    """All calls end with the timeout."""

    def body() -> str:
        gather, call = ready(False)
        if dist.get_rank() == 1:
            time.sleep(SOON + 2)
            return fails(gather)
        return attempt(call, synchronize) or fails(gather)  # the watchdog ends the wait

    ended = outcomes(body, chunks, nodes, SOON)
    for one in ended:
        assert one.finished and one.error is None, one.trace
    assert any("all_gather" in one.value and f"{SOON * 1000:.0f} ms" in one.value for one in ended), ended


@chunks
@shape
def test_a_replay_waits_for_a_peer_that_is_late(chunks: int, nodes: list[int]) -> None:
    """Beyond the group's timeout, and has the right values then."""

    def body() -> None:
        gather, replay = ready(True)
        gather.set(3)
        if dist.get_rank() == 1:
            synchronize()
            time.sleep(SOON + 2)
        replay()
        gather.check()
        gather.set(4)
        gather()
        gather.check()

    for one in outcomes(body, chunks, nodes, SOON):
        assert one.finished and one.error is None, one.trace


@chunks
@shape
@way
def test_a_thread_aborts(chunks: int, nodes: list[int], is_graph: bool) -> None:
    """Long before the timeout, while the streams of this rank and of others wait for a peer."""

    def body() -> str:
        gather, call = ready(is_graph)
        start = time.monotonic()
        text = ""
        if dist.get_rank() == 0:
            threading.Timer(1.0, dist.group.WORLD._get_backend(DEVICE).abort).start()  # type: ignore[union-attr]
        if dist.get_rank() == 1:
            time.sleep(3)
        else:
            text = attempt(call, synchronize)
        del call
        text = text or fails(gather)
        assert time.monotonic() - start < IN_TIME
        return text

    ended = outcomes(body, chunks, nodes, 2 * IN_TIME)
    for one in ended:
        assert one.finished and one.error is None, one.trace
    assert "shut down" in ended[0].value or "abort" in ended[0].value, ended[0].value
    for one in ended[1:]:
        assert "rank 0" in one.value or "abort" in one.value, one.value
