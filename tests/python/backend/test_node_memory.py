"""Memory that the ranks of a node share: used where all can, never in part, and gone with its processes."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, gather, mine, scatter
from support.expected import assert_same_bits
from support.worlds import collect, options, run

import zcomm
from zcomm.distributed import environment

ALL = options(all_reduce="int8:64/int4:64", direct="always")


def results() -> list[torch.Tensor]:
    """Of calls of many sizes, on this rank."""
    size, all_of_them = dist.get_world_size(), []
    for num in (1, 100, NUM, 40 * NUM):
        whole = mine(num)
        all_of_them.append(gather(whole))
        all_of_them.append(scatter(mine(num * size)))
        reduced = mine(num)
        dist.all_reduce(reduced)
        all_of_them.append(reduced)
        with zcomm.override(reduce_scatter="exact"):
            all_of_them.append(scatter(mine(num * size)))
    return all_of_them


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], ids=str)
def test_calls_have_the_bits_that_they_have_over_gloo(nodes: list[int]) -> None:
    def body() -> tuple[str, list[torch.Tensor]]:
        found = results()
        return zcomm.stats().node_memory, found

    shared = run(body, len(nodes), nodes=nodes, options=ALL)
    over_gloo = run(body, len(nodes), nodes=nodes, options=ALL, env={"ZCOMM_NODE_MEMORY": "off"})
    for rank, ((told, one), (why_not, other)) in enumerate(zip(shared, over_gloo, strict=True)):
        alone = nodes.count(nodes[rank]) == 1
        assert told == ("one rank in this node" if alone else "shared")
        assert why_not == (
            "one rank in this node" if alone else f"rank {nodes.index(nodes[rank])}: ZCOMM_NODE_MEMORY=off"
        )
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b, f"rank {rank}")


def test_if_one_rank_cannot_all_of_its_node_stay_with_gloo_and_say_why() -> None:
    def body() -> str:
        if dist.get_rank() == 1:
            os.environ["ZCOMM_NODE_MEMORY"] = "off"
        gather(mine())
        line = "ranks of this node share no memory: rank 1: ZCOMM_NODE_MEMORY=off"
        assert (line in str(zcomm.stats())) == (dist.get_rank() < 2)
        return zcomm.stats().node_memory

    told = run(body, 4, nodes=[0, 0, 1, 1], options=options())
    assert told == ["rank 1: ZCOMM_NODE_MEMORY=off"] * 2 + ["shared"] * 2


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes "0" wants it off, and would not get it."""
    monkeypatch.setenv("ZCOMM_NODE_MEMORY", "0")
    with pytest.raises(ValueError, match="ZCOMM_NODE_MEMORY: expected 'off' or nothing, got '0'"):
        environment.check_node_memory()


def test_a_killed_rank_leaves_nothing_and_is_named() -> None:
    """The memory has no name, so there is nothing to clean up."""
    names = sorted(os.listdir("/dev/shm"))

    def body() -> None:
        gather(mine())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            gather(torch.ones(8 * NUM))

    outcomes = collect(body, 3, nodes=[0, 0, 0], options=options(), grace=20)
    for rank in (0, 2):
        assert not outcomes[rank].stuck
        assert "rank 1" in str(outcomes[rank].error) and "lost" in str(outcomes[rank].error)
    assert sorted(os.listdir("/dev/shm")) == names


def test_a_rank_that_has_sent_all_and_ends_does_not_fail_the_others() -> None:
    """Its messages are in memory that outlives it."""

    def body() -> None:
        rank, x = dist.get_rank(), torch.ones(4096)
        gather(mine())
        if rank == 0:
            time.sleep(1.5)
        dist.gather(x, [torch.zeros(4096) for _ in range(3)] if rank == 2 else None, dst=2)
        if rank != 2:
            os._exit(0)

    outcomes = collect(body, 3, nodes=[0, 0, 0], options=options(gather="int8:64"), grace=20)
    assert outcomes[2].finished and outcomes[2].error is None, outcomes[2]
    assert [outcome.exit_code for outcome in outcomes[:2]] == [0, 0]


def test_a_different_call_is_found_though_its_sender_is_many_calls_ahead() -> None:
    """A sender does not wait for its receivers, so ranks may have no call in common that they could compare."""

    def body() -> str:
        x = torch.ones(4096)
        dist.broadcast(x, 0)
        with pytest.raises(RuntimeError) as caught:
            if dist.get_rank() == 1:
                dist.broadcast(torch.ones(8192), 0)
            for _ in range(10):
                dist.broadcast(x, 0)
            dist.all_reduce(x)
            dist.all_reduce(x)
        return str(caught.value)

    told = run(body, 3, nodes=[0, 0, 0], options=options(broadcast="int8:64", all_reduce="int8:64"))
    assert "called different things" in told[1]


def test_groups_of_a_process_have_memory_of_their_own_until_they_end() -> None:
    def body() -> None:
        mapped = lambda: Path("/proc/self/maps").read_text().count("memfd:zcomm")  # noqa: E731
        size = dist.get_world_size()
        gather(mine())
        assert mapped() == size
        other = dist.new_group()
        whole = torch.empty(size * NUM)
        own = whole[dist.get_rank() * NUM :][:NUM]
        own.copy_(data(dist.get_rank(), NUM))
        dist.all_gather_single(whole, own, group=other)
        assert mapped() == 2 * size
        dist.destroy_process_group(other)
        del other
        gc.collect()
        assert mapped() == size
        assert not [name for name in os.listdir("/proc/self/fd") if "memfd" in link(name)]

    run(body, 3, nodes=[0, 0, 0], options=options())


def link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


@pytest.mark.slow
def test_many_ranks_of_one_host() -> None:
    def body() -> None:
        size = dist.get_world_size()
        whole = gather(mine())
        assert whole.numel() == size * NUM
        assert zcomm.stats().node_memory == "shared"

    run(body, 48, nodes=[0] * 48, options=options())
