"""Rendezvous of ranks in a store that holds the keys of earlier ranks."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import gather, mine
from support.worlds import options, run
from torch._C._distributed_c10d import _DistributedBackendOptions

import zcomm
from zcomm.distributed import backend, rendezvous
from zcomm.distributed.backend import create_backend
from zcomm.distributed.options import OPTION_NAMES

SOON = 2.0  # a timeout that a test waits for


def make_backend(store: Any, size: int, seconds: float) -> Any:
    """This rank's backend for ranks 0 to ``size`` - 1 of the world."""
    wanted = _DistributedBackendOptions()
    wanted.store, wanted.group_id = store, "again"
    wanted.group_rank, wanted.group_size = dist.get_rank(), size
    wanted.timeout = datetime.timedelta(seconds=seconds)
    return create_backend(wanted, zcomm.Options())


def test_ranks_whose_agents_count_restarts_differently_connect(tmp_path: Path) -> None:
    """An agent counts the failures of its own workers, and not those that it restarts for the sake of others."""

    def body() -> None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
        dist.init_process_group("zcomm", timeout=datetime.timedelta(seconds=20))
        gather(mine())

    run(body, backend=None, launched=True)


@pytest.mark.parametrize("tcp", [False, True], ids=["file store", "agent's store"])
@pytest.mark.parametrize("sizes", [(1, 2), (3, 2, 3), (2, 2)], ids=str)
def test_worlds_of_any_size_follow_each_other_in_a_store(tmp_path: Path, sizes: tuple[int, ...], tcp: bool) -> None:
    def body() -> None:
        rank = int(os.environ["RANK"])
        for size in sizes:
            if rank >= size:
                continue
            where: dict[str, Any] = {"rank": rank, "world_size": size}
            if not tcp:
                where["store"] = dist.FileStore(str(tmp_path / "store"), -1)
            dist.init_process_group("zcomm", timeout=datetime.timedelta(seconds=20), **where)
            dist.all_reduce(torch.ones(1))
            gather(mine())
            dist.destroy_process_group()

    run(body, max(sizes), backend=None, launched=True)


@pytest.mark.parametrize("tcp", [False, True], ids=["file store", "store on rank 0"])
@pytest.mark.parametrize("early", [0, 1])
def test_an_attempt_that_only_some_ranks_made_is_followed_by_another(early: int, tcp: bool) -> None:
    """The others came too late. The error names them, and all try again."""

    def body() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == early:
            with pytest.raises(RuntimeError, match=rf"ranks \[{1 - early}\] did not come"):
                make_backend(store, 2, SOON)
        dist.barrier()
        backend = make_backend(store, 2, 20)
        backend.allreduce([torch.ones(2)]).wait()
        backend.shutdown()

    run(body, tcp=tcp)


def test_a_first_compressed_call_that_failed_can_be_made_again() -> None:
    """Rank 0 gives up before rank 1 comes, and rank 1 while rank 0 does something else."""

    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=SOON), pg_options=options())
        for late in (False, True):
            if (rank == 1) == late:
                with pytest.raises(RuntimeError, match=rf"ranks \[{1 - rank}\] did not come"):
                    gather(mine(), group=group)
            dist.barrier()
        gather(mine(), group=group)
        assert zcomm.stats(group).all_gather.calls >= 1

    run(body)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through_a_call_that_waits(raised: type[BaseException]) -> None:
    """An interrupt is no error of the group, and the call can be repeated."""

    def body() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            number = signal.SIGINT if raised is KeyboardInterrupt else signal.SIGTERM
            with pytest.raises(raised):
                threading.Timer(0.5, lambda: os.kill(os.getpid(), number)).start()
                gather(mine())
            store.set("interrupted", "")
        store.wait(["interrupted"])
        gather(mine())

    run(body)


class CountingStore(dist.Store):
    """A rank's view of shared keys. Counts the bytes that it reads."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        super().__init__()
        self.keys, self.num_read = keys, 0

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self.keys[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.num_read += len(self.keys[key])
        return self.keys[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:  # type: ignore[override]
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)


def test_only_rank_0_reads_what_all_ranks_write() -> None:
    size, text, keys = 64, 300 * "x", dict[str, bytes]()
    stores = [CountingStore(keys) for _ in range(size)]
    meetings = [
        rendezvous._Meeting(store, rank, size, text, lambda texts: f"{len(texts)} texts")
        for rank, store in enumerate(stores)
    ]
    waiting = set(range(size))
    for _ in range(4):
        waiting = {rank for rank in waiting if not meetings[rank].poll()}
    assert not waiting
    assert {meeting.result()[1] for meeting in meetings} == {"64 texts"}
    assert stores[0].num_read > size * len(text)
    assert max(store.num_read for store in stores[1:]) < len(text)


def _ranks_fail(message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1, 2]))


@pytest.mark.parametrize("elder", [0, 1], ids=["rank 0 has less", "rank 1 has less"])
def test_options_that_only_some_ranks_have_are_a_difference(monkeypatch: pytest.MonkeyPatch, elder: int) -> None:
    """Installations of two commits, between which one option went and another came."""

    def body() -> None:
        name = "earlier" if dist.get_rank() == elder else "later"
        monkeypatch.setattr(zcomm.Options, name, 7, raising=False)
        monkeypatch.setattr(backend, "OPTION_NAMES", (*OPTION_NAMES, name))
        earlier, later = "earlier=7, no option later", "no option earlier, later=7"
        zero, one = (earlier, later) if elder == 0 else (later, earlier)
        _ranks_fail(f"ranks disagree on the options: rank 0 has {zero}, rank {max(elder, 1)} has {one}$")

    run(body, 3)


def test_ranks_of_another_protocol_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        monkeypatch.setattr(rendezvous, "PROTOCOL", protocol + dist.get_rank() // 2)
        one, two = (f"{zcomm.__version__}, protocol {number}" for number in (protocol, protocol + 1))
        _ranks_fail(f"ranks disagree on the version: rank 0 has {one}, rank 2 has {two}$")

    protocol = rendezvous.PROTOCOL
    run(body, 3)


def test_what_rank_0_cannot_compare_is_told_to_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        if dist.get_rank() == 2:
            monkeypatch.setattr(backend._node, "node_identity", lambda: 3)
        _ranks_fail("rank 0 cannot compare what ranks told it: TypeError: ")

    run(body, 3)
