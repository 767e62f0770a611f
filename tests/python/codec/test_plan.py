"""Properties of plans in Python, compared with the bytes that calls send."""

from __future__ import annotations

import datetime
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from zcomm import _core

TIMEOUT = datetime.timedelta(seconds=60)
NUM = 1031
SEGMENTS = [(1000, "int8:64"), (31, "exact")]
REDUCED = [(1000, "int8:64/int4:32"), (31, "exact")]


def values_of(array: np.ndarray) -> tuple[int, int, str]:
    return array.ctypes.data, array.size, "float32"


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [0, 1, 2], [0, 0, 1, 1], [0, 0, 0, 1]], ids=str)
def test_a_plan_tells_what_a_call_sends(nodes: list[int]) -> None:
    size = len(nodes)
    topology = _core.Topology(nodes)
    communicators = _core.make_local_communicators(nodes, 1024)

    def calls(rank: int) -> list[tuple[int, int]]:
        whole = np.random.default_rng(rank).standard_normal((size, NUM), np.float32)
        out = np.empty(NUM, np.float32)
        slots = [values_of(slot) for slot in whole]
        own = communicators[rank]
        reduced = own.run(own.make_reduce_scatter(slots, REDUCED), slots, [values_of(out)], TIMEOUT)
        gathered = own.run(own.make_all_gather(slots, SEGMENTS), [slots[rank]], slots, TIMEOUT)
        all_reduced = own.run(own.make_all_reduce(values_of(out), "int8:32"), [], [values_of(out)], TIMEOUT)
        return [(stats.intra_node_bytes, stats.inter_node_bytes) for stats in (reduced, gathered, all_reduced)]

    with ThreadPoolExecutor(size) as pool:
        sent = list(pool.map(calls, range(size)))
    for rank in range(size):
        plans = [
            _core.ReducePlan(topology, rank, [NUM] * size, "float32", REDUCED, chunk_bytes=1024),
            _core.GatherPlan(topology, rank, [NUM] * size, "float32", SEGMENTS, chunk_bytes=1024),
            _core.AllReducePlan(topology, rank, NUM, "float32", "int8:32", chunk_bytes=1024),
        ]
        hops = [[(hop.intra_node, hop.inter_node) for hop in plan.bytes_by_hop] for plan in plans]
        assert [tuple(map(sum, zip(*each, strict=True))) for each in hops] == sent[rank]


def test_routes() -> None:
    topology = _core.Topology([0, 0, 1, 1])
    assert str(topology) == "2x2"
    (sends, receives), (forwards, sums) = topology.reduce_hops(1)
    assert sends == [(0, 0), (0, 2)] and receives == [(0, 1), (0, 3)]
    assert forwards == [(3, 3)] and sums == [(3, 1)]


def test_wrong_arguments_are_refused() -> None:
    topology = _core.Topology([0, 0])
    with pytest.raises(_core.ArgumentError, match="rank: expected 0 to 1, got 2"):
        _core.GatherPlan(topology, 2, [8, 8], "float32", [(8, "int8:32")])
    with pytest.raises(_core.ArgumentError, match="segments: expected the 8 elements of the longest slot, got 9"):
        _core.ReducePlan(topology, 0, [8, 8], "float32", [(9, "int8:32")])
