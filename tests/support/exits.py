"""Worlds whose ranks leave through a whole interpreter shutdown. A program: prints JSON, see :func:`main`.

It forks from one process that has imported torch, so that many scenarios cost one import.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
import zcomm.distributed.backend
from support.worlds import set_environment
from zcomm.distributed.single import all_gather_single

SECONDS = 60.0  # of a scenario, where a busy machine gives it a tenth of a core
NUM = 1 << 18


def call(async_op: bool = False) -> dist.Work | None:
    rank = dist.get_rank()
    whole = torch.ones(dist.get_world_size() * NUM)
    with zcomm.override(forms="in_place"):
        return all_gather_single(whole, whole[rank * NUM :][:NUM], async_op=async_op)


def destroyed() -> None:
    call()
    dist.destroy_process_group()


def never_destroyed() -> None:
    call()


def never_used() -> None:
    pass


def receives_alone() -> None:
    with zcomm.override(exchanges="int8:128"):
        dist.send(torch.ones(NUM), 0) if dist.get_rank() else dist.recv(torch.ones(NUM), 1)


def never_waited_for() -> None:
    for _ in range(5):
        call(async_op=True)


def callback_at_exit() -> None:
    for _ in range(5):
        work = call(async_op=True)
        assert work is not None
        work.get_future().then(lambda done: len(done.value()))


def one_raises() -> None:
    call()
    if dist.get_rank() == 1:
        raise LookupError("on purpose")
    call()


def one_raises_in_flight() -> None:
    call()
    if dist.get_rank() == 1:
        call(async_op=True)  # nobody answers it
        raise LookupError("on purpose")
    time.sleep(5)


def one_exits() -> None:
    call()
    if dist.get_rank() == 1:
        sys.exit(3)
    call()


def one_is_killed() -> None:
    call()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    call()


def caught() -> None:
    """A script that handles the failure ends like any other."""
    call()
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        call()
    except RuntimeError:
        return
    raise AssertionError("the lost peer was not noticed")


def aborted() -> None:
    call()
    if dist.get_rank() == 1:
        time.sleep(3)
        return
    threading.Timer(1.0, lambda: dist.distributed_c10d._abort_process_group()).start()
    try:
        call()
    except (RuntimeError, ValueError):  # this one if a busy machine begins the call after the abort
        return
    raise AssertionError("abort did not end the call")


def given_to_gloo() -> None:
    """Another backend takes zcomm.Options without a word."""
    dist.all_reduce(torch.ones(1))


def gloo_alone() -> None:
    """zcomm is imported, as wherever it is installed."""
    dist.all_reduce(torch.ones(1))


UNDER_GLOO = {given_to_gloo: True, gloo_alone: False}  # scenario -> whether it makes zcomm.Options


# Scenario -> the exit codes of its ranks, by rank.
SCENARIOS: dict[Callable[[], None], list[int]] = {
    destroyed: [0, 0],
    never_destroyed: [0, 0],
    never_used: [0, 0],
    receives_alone: [0, 0],
    given_to_gloo: [0, 0],
    gloo_alone: [0, 0],
    never_waited_for: [0, 0],
    callback_at_exit: [0, 0],
    one_raises: [1, 1, 1],
    one_raises_in_flight: [0, 1],
    one_exits: [1, 3],
    one_is_killed: [1, -signal.SIGKILL],
    caught: [0, 0],
    aborted: [0, 0],
}


def run_rank(scenario: Callable[[], None], rank: int, size: int, folder: Path) -> None:
    errors = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=2 * SECONDS)  # longer than a scenario may take
    store = dist.FileStore(str(folder / "store"), size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    options: Any = zcomm.Options() if UNDER_GLOO.get(scenario) else None
    backend = "gloo" if scenario in UNDER_GLOO else "zcomm"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options)
    scenario()


def wait_for(pids: list[int]) -> list[int | None]:
    """The exit code of each process; None if it had to be ended."""
    codes: list[int | None] = [None] * len(pids)
    deadline = time.monotonic() + SECONDS
    while None in codes and time.monotonic() < deadline:
        for rank, pid in enumerate(pids):
            if codes[rank] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.02)
    for rank, pid in enumerate(pids):
        if codes[rank] is None:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


def main() -> None:
    """Prints, for the scenarios named by the arguments (default: all), the exit code and the output of each rank."""
    set_environment({})
    results: dict[str, list[tuple[int | None, str]]] = {}
    for scenario, expected in SCENARIOS.items():
        if sys.argv[1:] and scenario.__name__ not in sys.argv[1:]:
            continue
        folder = Path(tempfile.mkdtemp(prefix="zcomm-exits-"))  # not a context manager: ranks leave through here, too
        pids = []
        for rank in range(len(expected)):
            pid = os.fork()
            if pid == 0:
                run_rank(scenario, rank, len(expected), folder)
                return  # and out, through the shutdown of the interpreter
            pids.append(pid)
        codes = wait_for(pids)
        outputs = [(folder / f"stderr{rank}").read_text() for rank in range(len(expected))]
        shutil.rmtree(folder)
        results[scenario.__name__] = list(zip(codes, outputs, strict=True))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
