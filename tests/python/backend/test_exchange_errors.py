"""Exchanges that are refused, that ranks make differently, or that lose a rank."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data
from support.worlds import collect, run

import zcomm

NODES = [0, 0, 1]
INTRA, INTER = "int8:128", "int4:64"
OPTIONS = zcomm.Options(exchanges=f"{INTRA}/{INTER}")

BAD_CALLS: list[tuple[str, Any]] = [
    (
        "input_split_sizes: expected a sum of the 8 rows of input, got 7",
        lambda: dist.all_to_all_single(torch.empty(8, 4), torch.ones(8, 4), [4, 4], [3, 4]),
    ),
    (
        "output_split_sizes: expected one for each of 2 ranks, got 3",
        lambda: dist.all_to_all_single(torch.empty(8), torch.ones(8), [4, 4, 0], [4, 4]),
    ),
    ("input: expected a multiple of 2 rows, got 7", lambda: dist.all_to_all_single(torch.empty(8), torch.ones(7))),
    ("output: expected dtype Float", lambda: _all_to_all_of_two_dtypes()),
    (
        "tensors: expected contiguous ones on one device, as all_to_all is compressed",
        lambda: dist.all_to_all(list(torch.empty(NUM, 2).t()), [torch.ones(NUM), torch.ones(NUM)]),
    ),
    (
        "tensors: expected contiguous ones on one device, as gather is compressed",
        lambda: dist.gather(torch.ones(16384), list(torch.empty(16384, 2).t()), dst=dist.get_rank()),
    ),
    (
        "tensors: expected contiguous ones on one device, as broadcast is compressed",
        lambda: dist.broadcast(torch.ones(NUM, 2).t(), 0),
    ),
    ("outputs: expected memory apart from the inputs", lambda: _all_to_all_in_place()),
    (
        "scatter_list: expected tensors of 16384 Float",
        lambda: dist.scatter(torch.empty(16384), [torch.ones(16384), torch.ones(5)], src=dist.get_rank()),
    ),
    (
        "gather_list: expected a tensor for each of 2 ranks, got 1",
        lambda: dist.gather(torch.ones(16384), [torch.empty(16384)], dst=dist.get_rank()),
    ),
]


def _all_to_all_of_two_dtypes() -> None:
    assert dist.group.WORLD is not None
    dist.group.WORLD.alltoall_base(torch.empty(8).bfloat16(), torch.ones(8), [], [])  # torch's own check comes earlier


def _all_to_all_in_place() -> None:
    tensor = torch.ones(2 * NUM)
    dist.all_to_all_single(tensor, tensor)


def test_bad_calls_are_refused_on_every_rank_before_a_byte_moves() -> None:
    def body() -> None:
        for text, call in BAD_CALLS:
            with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
                call()
        stats = zcomm.stats()
        assert stats.all_to_all.wire_bytes + stats.gather.wire_bytes + stats.scatter.wire_bytes == 0
        output = torch.empty(2 * NUM)
        dist.all_to_all_single(output, data(dist.get_rank(), 2 * NUM))  # the group still works
        assert zcomm.stats().all_to_all.wire_bytes > 0

    run(body, options=OPTIONS)


def test_ranks_that_differ_in_format_learn_so() -> None:
    def body() -> None:
        with zcomm.override(exchanges=INTRA if dist.get_rank() == 0 else INTER):
            dist.all_to_all_single(torch.empty(2 * NUM), torch.ones(2 * NUM))

    for outcome in collect(body, 2, options=OPTIONS):
        assert outcome.error is not None
        assert f"all_to_all float32 {INTRA}" in outcome.error
        assert f"all_to_all float32 {INTER}" in outcome.error
        assert outcome.seconds < 15


def test_ranks_that_differ_in_lengths_learn_so() -> None:
    """The receiver expects other lengths than the sender sends: no rank goes on with part of its values. Rank 0 has all
    of its own, and learns of it in its next call if its messages did not wait for their receiver."""

    def body() -> None:
        more = 100 * dist.get_rank()
        output = torch.empty(2 * NUM + more)
        dist.all_to_all_single(output, torch.ones(2 * NUM), [NUM + more, NUM], [NUM, NUM])
        assert dist.get_rank() == 0 and bool((output == 1).all())
        dist.all_to_all_single(output, torch.ones(2 * NUM))

    for outcome in collect(body, 2, options=OPTIONS, group_seconds=3):
        assert outcome.error is not None


@pytest.mark.promise(9)
@pytest.mark.parametrize("collective", ["all_to_all", "gather", "scatter", "broadcast"])
def test_a_killed_peer_is_noticed(collective: str) -> None:
    """SIGKILL in the middle of an exchange: every other rank raises soon, whatever it waits for."""

    def body() -> None:
        rank, whole = dist.get_rank(), torch.ones(3 * NUM)
        parts = list(whole.split(NUM))
        calls = {
            "all_to_all": lambda: dist.all_to_all_single(torch.empty(3 * NUM), whole),
            "gather": lambda: dist.gather(parts[0], parts if rank == 0 else None),
            "scatter": lambda: dist.scatter(parts[0].clone(), parts if rank == 0 else None),
            "broadcast": lambda: dist.broadcast(whole, 0),
        }
        calls[collective]()
        if rank == 1:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        while True:
            calls[collective]()

    outcomes = collect(body, 3, options=OPTIONS, nodes=NODES, grace=15)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.stuck and "lost rank" in (outcome.error or ""), outcome
