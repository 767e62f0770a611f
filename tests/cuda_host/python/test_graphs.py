"""CUDA graphs: a group that has been used can be captured, and replays with new values."""

from __future__ import annotations

import pytest
import torch
from support.cuda_world import Gather, ReduceScatter, gathered, host, run, values


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 1, 1]], ids=str)
def test_capture_and_replay(asynchronous: bool, nodes: list[int]) -> None:
    def body() -> None:
        gather, scatter = Gather(5000), ReduceScatter(5000)
        gather(async_op=True).wait()
        scatter(async_op=True).wait()
        host.synchronize()
        host.set_stream(7)
        host.begin_capture()
        for call in (gather, scatter):
            work = call(async_op=asynchronous)
            if work is not None:
                work.wait()
        graph = host.end_capture()
        gather.memory.zero_()
        for seed in (3, 4):
            gather.shard.copy_(values(5000, seed=seed))
            graph.replay()
            host.synchronize()
            assert torch.equal(gather.memory, gathered(5000, torch.float32, seed))
        replayed = scatter.memory.clone()
        scatter()
        host.synchronize()
        assert torch.equal(scatter.memory, replayed)

    run(body, len(nodes), nodes=nodes)


def test_a_group_is_not_connected_inside_a_capture() -> None:
    def body() -> None:
        gather = Gather(4096)
        host.set_stream(7)
        host.begin_capture()
        with pytest.raises(RuntimeError, match=r"before .*captur"):
            gather()
        host.end_capture()
        gather()  # and can be used afterwards
        gather.check()

    run(body, 2)
