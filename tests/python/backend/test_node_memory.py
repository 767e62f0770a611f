"""Memory that the ranks of a node share: used where all can, never in part, and gone with its processes."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import resource
import select
import signal
import stat
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, gather, gather_in_place, logged, mine, scatter
from support.expected import assert_same_bits
from support.worlds import collect, options, run

import zcomm
from zcomm.distributed import backend, environment

ALL = options(all_reduce="int8:64/int4:64")


def shared_names() -> list[str]:
    """Names of zcomm's shared memory on this machine. Other programs make some, too, and so does another test run's
    stand-in for NCCL."""
    return sorted(name for name in os.listdir("/dev/shm") if "zcomm" in name and not name.startswith("zcomm-nccl-"))


def results() -> list[torch.Tensor]:
    """Of calls of many sizes, on this rank."""
    size, all_of_them = dist.get_world_size(), []
    for num in (1, 100, NUM, 40 * NUM + 7):
        whole = mine(num)
        all_of_them.append(gather(whole))
        all_of_them.append(scatter(mine(num * size)))
        reduced = mine(num)
        dist.all_reduce(reduced)
        all_of_them.append(reduced)
        for dtype in (torch.bfloat16, torch.float16):
            all_of_them.append(scatter(mine(num * size, dtype)))
    return all_of_them


@pytest.mark.parametrize("nodes", [[0, 0], [0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], ids=str)
def test_calls_have_the_bits_that_they_have_over_gloo(nodes: list[int]) -> None:
    def body() -> tuple[str, list[torch.Tensor]]:
        found, told = results(), zcomm.stats().node_memory
        assert ("share no memory" in str(zcomm.stats())) == told.startswith("rank ")  # being alone is no fault
        return told, found

    shared = run(body, len(nodes), nodes=nodes, options=ALL)
    over_gloo = run(body, len(nodes), nodes=nodes, options=ALL, env={"ZCOMM_NODE_MEMORY": "off"})
    for rank, ((told, one), (why_not, other)) in enumerate(zip(shared, over_gloo, strict=True)):
        alone = nodes.count(nodes[rank]) == 1
        off = f"rank {nodes.index(nodes[rank])}: ZCOMM_NODE_MEMORY=off"
        assert told == ("one rank in this node" if alone else "shared")
        assert why_not == ("one rank in this node" if alone else off)
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


def test_ranks_that_could_share_but_do_not_warn_once_in_a_node() -> None:
    def body() -> list[str]:
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        lines = logged()
        gather(mine())
        gather(mine())
        return lines

    told = run(body, 4, nodes=[0, 0, 1, 1], options=options())
    assert told[1:] == [[], [], []]
    assert told[0] == [
        "group '0': ranks of the node of rank 0 send over Gloo, as they share no memory: rank 1: ftruncate: File too "
        "large; ZCOMM_NODE_MEMORY=off accepts that"
    ]
    assert run(body, 2, nodes=[0, 0], options=options(), env={"ZCOMM_NODE_MEMORY": "off"}) == [[], []]


class Killing(dist.Store):
    """A store whose process is killed when it writes a key: before it is written, or after."""

    def __init__(self, store: Any, key: str, after: bool) -> None:
        super().__init__()
        self._store, self._key, self._after = store, key, after

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if key != self._key or self._after:
            self._store.set(key, value)
        if key == self._key:
            os.kill(os.getpid(), signal.SIGKILL)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))


class Late(Killing):
    """A store whose process reads what rank 1 tells when that rank has ended."""

    def get(self, key: str) -> bytes:
        text = super().get(key)
        if key == "memory/1":
            with contextlib.suppress(ProcessLookupError):
                select.select([os.pidfd_open(int(text.split()[2]))], [], [])
        return text


def meet(change: Callable[[Any], Any] = lambda store: store, **fields: Any) -> Any:
    """A gather of a new group: ``change`` gives the store of its ranks when they have connected, to share memory."""
    make = backend._Group._make_transport_group
    kept = []  # the Python half of the store

    def changed(group: Any, each_way: int) -> tuple[Any, int, Any]:
        made, num_connections, store = make(group, each_way)
        all_ranks = dist.distributed_c10d._get_default_store()
        all_ranks.set(f"made {dist.get_rank()}", "")
        all_ranks.wait([f"made {rank}" for rank in range(dist.get_world_size())])  # Gloo fails on a rank that connects
        kept.append(change(store))
        return made, num_connections, kept[0]

    backend._Group._make_transport_group = changed  # type: ignore[method-assign, assignment]
    group = dist.new_group(timeout=timedelta(seconds=6), pg_options=options())
    return gather_in_place(torch.empty(dist.get_world_size() * NUM), group=group, **fields)


def survive(call: Callable[[], Any]) -> str:
    """The error of a call, after which nothing is left of the group's memory."""
    told = ""
    try:
        call()
    except RuntimeError as error:
        told = str(error)
    dist.destroy_process_group()
    gc.collect()
    assert "memfd:zcomm" not in Path("/proc/self/maps").read_text()
    assert not [name for name in os.listdir("/proc/self/fd") if "memfd" in link(name)]
    return told


def check_survivors(body: Callable[[], str], expected: str) -> None:
    """Rank 1 of three is killed; the others must end with an error that names it, and leave nothing in the system."""
    names = shared_names()
    outcomes = collect(body, 3, nodes=[0, 0, 0], options=ALL, grace=30)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].finished and outcomes[rank].error is None, outcomes[rank]
        assert expected in outcomes[rank].value
    assert shared_names() == names


@pytest.mark.parametrize(
    ("key", "after", "expected"),
    [
        ("memory/1", False, "rank 1 did not tell within 6000 ms how it shares memory"),
        ("memory works/1", False, "lost rank 1: its process has ended"),
        ("memory works/1", True, "lost rank 1"),
    ],
    ids=["before it tells", "before it agrees", "before its first message"],
)
def test_a_rank_that_is_killed_while_ranks_meet_is_named(key: str, after: bool, expected: str) -> None:
    def body() -> str:
        kills = dist.get_rank() == 1
        return survive(lambda: meet((lambda store: Killing(store, key, after)) if kills else (lambda store: store)))

    check_survivors(body, expected)


def test_a_rank_that_is_killed_before_others_open_its_memory_is_named() -> None:
    """Rank 0 finds rank 1 ended, and may itself have ended before rank 2 hears from it."""

    def body() -> str:
        stores = [
            lambda store: Late(store, "", False),
            lambda store: Killing(store, "memory works/1", False),
            lambda store: store,
        ]
        return survive(lambda: meet(stores[dist.get_rank()]))

    check_survivors(body, "lost rank 1: its process has ended")


def sends(num: int) -> None:
    """Of more than an outbox holds."""
    gather(torch.ones(4 * num))


def reduces(num: int) -> None:
    """Of many chunks, which a rank reads where their senders put them."""
    scatter(torch.ones(num * dist.get_world_size()))


@pytest.mark.parametrize("call", [sends, reduces])
def test_a_rank_that_is_killed_in_a_call_is_named(call: Callable[[int], None]) -> None:
    """It waits for rank 0, with an outbox that is full, or while it holds what rank 2 has sent."""

    def body() -> str:
        gather(mine())
        processes: list[Any] = [None] * 3
        dist.all_gather_object(processes, os.getpid())
        if dist.get_rank() == 1:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        elif dist.get_rank() == 0:
            select.select([os.pidfd_open(processes[1])], [], [])
        return survive(lambda: call(64 * NUM))

    check_survivors(body, "lost rank 1")


def test_a_rank_that_is_killed_while_it_releases_its_memory_fails_nobody() -> None:
    def body() -> str:
        gather(mine())
        if dist.get_rank() == 1:
            threading.Timer(random.uniform(0, 2e-3), lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        return survive(lambda: None)

    names = shared_names()
    outcomes = collect(body, 3, nodes=[0, 0, 0], options=ALL, grace=30)
    assert [outcomes[rank].value for rank in (0, 2)] == ["", ""]
    assert shared_names() == names


class Slow(Killing):
    """A store in which the calls of ranks cannot be read before a time."""

    until = 0.0

    def get(self, key: str) -> bytes:
        if key.startswith("calls/"):
            time.sleep(max(0, Slow.until - time.monotonic()))
        return super().get(key)

    def clone(self) -> Slow:
        return self


def test_ranks_that_call_different_things_are_told_both_by_a_slow_store() -> None:
    """Their watches of calls look too late: a rank that finds another call's message asks before it raises."""

    def body() -> None:
        meet(lambda store: Slow(store, "", False))
        group = list(dist.distributed_c10d._world.pg_map)[-1]
        Slow.until = time.monotonic() + 3.3  # the watches ask before, and look for the answer after 3 s
        with pytest.raises(RuntimeError) as raised:
            gather_in_place(torch.empty(2 * NUM * (1 + dist.get_rank())), group=group)
        assert "called different things" in str(raised.value)
        assert f"{NUM}]" in str(raised.value) and f"{2 * NUM}]" in str(raised.value), raised.value

    run(body, 2, nodes=[0, 0])


def test_an_abort_ends_the_wait_for_a_rank_that_does_not_tell() -> None:
    def body() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            meet(lambda _: (store.set("here", ""), store.wait(["over"]), os._exit(0)))
        work = meet(async_op=True)
        store.wait(["here"])
        group = list(dist.distributed_c10d._world.pg_map)[-1]
        group._get_backend(torch.device("cpu")).abort()
        with pytest.raises(RuntimeError, match="aborted while rank 1 was to tell"):
            work.wait()
        store.set("over", "")

    outcomes = collect(body, 2, nodes=[0, 0], options=options())
    assert outcomes[0].finished and outcomes[0].error is None, outcomes[0]


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

    outcomes = collect(body, 3, nodes=[0, 0, 0], options=options(exchanges="int8:64"), grace=20)
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

    told = run(body, 3, nodes=[0, 0, 0], options=options(exchanges="int8:64", all_reduce="int8:64"))
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


class Looking(Killing):
    """A store that looks at the file of this process's outbox while it tells of it."""

    def __init__(self, store: Any, found: list[tuple[int, int]]) -> None:
        super().__init__(store, "", False)
        self._found = found

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        if key == f"memory/{dist.get_rank()}":
            file = int(value.split()[3])
            self._found.append((stat.S_IMODE(os.fstat(file).st_mode), fcntl.fcntl(file, fcntl.F_GET_SEALS)))
        super().set(key, value)


def test_an_outbox_is_its_users_alone_and_keeps_its_size() -> None:
    """A peer that made it shorter would end this process with SIGBUS."""

    def body() -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        meet(lambda store: Looking(store, found))
        return found

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert run(body, nodes=[0, 0], options=ALL) == [[(0o600, seals)]] * 2
