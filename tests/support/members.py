"""Processes that are members of a group whose members change, and the folder through which they tell each other."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from support.calls import data
from support.worlds import options, set_environment

OPTIONS: dict[str, Any] = {"all_reduce": "int8:64", "exchanges": "int8:64"}
SOON = datetime.timedelta(seconds=4)
FAILED = "failed"

fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Board:
    """Texts by name, in files, as no member may depend on another one's store."""

    folder: Path

    def write(self, name: str, text: str = "") -> None:
        unfinished = self.folder / f"{name} of {os.getpid()}"
        unfinished.write_text(text)
        unfinished.rename(self.folder / name)

    def find(self, name: str) -> str | None:
        return (self.folder / name).read_text() if (self.folder / name).exists() else None

    def read(self, name: str, seconds: float = 40.0) -> str:
        deadline = time.monotonic() + seconds
        while (text := self.find(name)) is None:
            assert time.monotonic() < deadline, f"nobody wrote {name!r}"
            time.sleep(0.002)
        return text

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("log *"))

    def meet(self, name: str, me: int, number: int) -> None:
        """Waits until as many processes are here."""
        self.write(f"{name} {me}")
        for each in range(number):
            self.read(f"{name} {each}")


def join(board: Board, name: object, seconds: float = 20.0, **fields: Any) -> str:
    """Makes this process a member, and tells its handle. No two members have a store in common."""
    creation: dict[str, Any] = {"enable_reconfigure": True}  # of torch 2.14
    dist.init_process_group(
        "zcomm", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=seconds),
        pg_options=options(**{**OPTIONS, **fields}), **creation,
    )  # fmt: skip
    world: Any = dist.group.WORLD
    handle: str = world.get_reconfigure_handle()
    board.write(f"handle {name}", handle)
    return handle


def reconfigure(number: int, handles: Any, timeout: datetime.timedelta | None = None) -> None:
    functions: Any = dist.distributed_c10d
    functions._reconfigure(uuid=number, handles=handles, timeout=timeout).wait()


@dataclass
class Crowd:
    """Processes that come and are killed. In a round some of them get the same values, and add up others."""

    board: Board
    members: dict[str, Any] = field(default_factory=dict)  # by handle
    rounds: int = 0
    made: int = 0

    def add(self) -> str:
        """Starts a member. Returns its handle."""
        self.made += 1
        process = fork.Process(target=_live, args=(self.board, self.made), daemon=True)
        process.start()
        handle = self.board.read(f"handle {self.made}")
        self.members[handle] = process
        return handle

    def kill(self, handle: str) -> None:
        process = self.members.pop(handle)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def begin(self, present: list[str], source: str) -> None:
        self.rounds += 1
        self.board.write(f"round {self.rounds}", json.dumps({"handles": present, "source": source}))

    def results(self, handles: list[str]) -> dict[str, str]:
        """What members have made of the round: their values' bytes, or FAILED."""
        names = {handle: handle.rpartition("/")[2] for handle in handles}
        return {handle: self.board.read(f"result {self.rounds} {name}") for handle, name in names.items()}

    def end(self) -> None:
        for handle in list(self.members):
            self.kill(handle)


def _live(board: Board, name: int) -> None:
    set_environment({"GROUP_RANK": str(name), "LOCAL_WORLD_SIZE": "1"})
    torch.set_num_threads(1)
    own = join(board, name)
    values = torch.zeros(5000)
    number = 1
    while True:
        text = board.find(f"round {number}")
        if text is None:
            time.sleep(0.002)
            continue
        told = json.loads(text)
        if own in told["handles"]:
            try:
                _add_up(values, number, **told)
                result = values.numpy().tobytes().hex()
            except Exception as error:
                result = f"{FAILED}: {error}"
            board.write(f"result {number} {own.rpartition('/')[2]}", result)
        number += 1


def _add_up(values: torch.Tensor, number: int, handles: list[str], source: str) -> None:
    reconfigure(number, handles, SOON)
    with zcomm.exact():
        dist.broadcast(values, handles.index(source))
    for call in range(3):
        term = data(dist.get_rank(), len(values), seed=10 * number + call)
        dist.all_reduce(term)
        values += term
