"""Runs a function on several real processes that form a ``torch.distributed`` world.

Ranks are forked from this process, which has imported torch but uses no threads: a world starts in a fifth of a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zcomm
import zcomm.distributed.backend

GROUP_SECONDS = 20.0  # of a group's calls; no test waits for it unless something is broken
WORLD_SECONDS = 60.0
GRACE_SECONDS = 30.0  # for the other ranks, once one has failed: a busy machine needs some
LEAVE_SECONDS = 1.0  # for the other ranks to be done, too; a test may well wait for a rank to be gone

# A launcher around pytest must not decide the nodes, and the user's own settings must not decide the tests.
HIDDEN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")

# What groups, functional collectives and DTensor load when they are first used. Loaded once, before the fork: in each
# rank it takes longer than all the rest of a world's start.
LOADED_BY_RANKS = ("encodings.ascii", "encodings.idna", "torch._dynamo", "zcomm._deepspeed", "zcomm.fsdp.adoption")

_fork = multiprocessing.get_context("fork")
torch.set_num_threads(1)  # OpenMP's threads are not forked, and ranks would wait for them for ever


class WorldError(AssertionError):
    """Error of a world: the exception of each failed rank, or the place where it hung."""


@dataclass(frozen=True)
class Outcome:
    """End of a rank: a value, an exception, or neither if it was killed or stuck."""

    value: Any = None
    error: str | None = None  # "RuntimeError: text"
    trace: str = ""
    finished: bool = False
    stuck: bool = False
    exit_code: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class World:
    """World that ``run`` starts; the fields are those of ``init_process_group``."""

    size: int = 2
    backend: str | None = "zcomm"  # None: the function makes its own groups
    options: Any = None
    env: Mapping[str, str] = field(default_factory=dict)
    seconds: float = WORLD_SECONDS
    group_seconds: float = GROUP_SECONDS
    nodes: list[int] | None = None  # of each rank; None: as the host tells
    tcp: bool = False  # rank 0 serves the store, instead of a file that nobody has to serve
    launched: bool = False  # with torchrun's variables, for a function that makes its groups by env://


def run(function: Callable[[], Any], size: int = 2, **fields: Any) -> list[Any]:
    """``function()`` on each of ``size`` ranks of a world; returns their values in rank order.

    ``fields`` are those of :class:`World`. Raises WorldError that shows every rank that raised, died or hung.
    """
    outcomes = collect(function, size, **fields)
    if all(outcome.finished and outcome.error is None for outcome in outcomes):
        return [outcome.value for outcome in outcomes]
    report = []
    # Root causes first: other ranks fail only for want of a peer.
    for rank, outcome in sorted(enumerate(outcomes), key=lambda item: (item[1].stuck, item[1].seconds)):
        if outcome.finished and outcome.error is None:
            continue
        end = "is stuck" if outcome.stuck else "raised" if outcome.error else f"died with exit code {outcome.exit_code}"
        report.append(f"rank {rank} {end} after {outcome.seconds:.1f} s\n{outcome.trace}")
    raise WorldError("\n".join(report))


def collect(
    function: Callable[[], Any], size: int = 2, *, grace: float = GRACE_SECONDS, **fields: Any
) -> list[Outcome]:
    """Like :func:`run`, but returns how each rank ended. No rank outlives this call.

    ``grace``: the seconds that ranks get to end by themselves after the first one has failed.
    """
    for module in LOADED_BY_RANKS:
        importlib.import_module(module)
    world = World(size=size, **fields)
    with tempfile.TemporaryDirectory(prefix="zcomm-world-") as folder:
        started = time.monotonic()
        ranks = [
            _fork.Process(target=_rank_main, args=(function, rank, world, Path(folder)), daemon=True)
            for rank in range(size)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
            for process in ranks:
                process.start()
        ended: dict[int, float] = {}
        deadline = started + world.seconds
        failed = False
        while len(ended) < size and time.monotonic() < deadline:
            waiting = {process.sentinel: rank for rank, process in enumerate(ranks) if rank not in ended}
            for sentinel in multiprocessing.connection.wait(list(waiting), deadline - time.monotonic()):
                rank = waiting[sentinel]  # type: ignore[index]
                ranks[rank].join()
                ended[rank] = time.monotonic() - started
                if ranks[rank].exitcode != 0 and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + grace)
        stuck = [rank for rank in range(size) if rank not in ended]
        _end(ranks, stuck)
        seconds = time.monotonic() - started
        return [
            _outcome(Path(folder), rank, ranks[rank].exitcode, rank in stuck, ended.get(rank, seconds))
            for rank in range(size)
        ]


def _end(ranks: list[Any], stuck: list[int]) -> None:
    for rank in stuck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, signal.SIGUSR1)  # writes its stacks
    if stuck:
        time.sleep(0.3)
    for rank in stuck:
        ranks[rank].kill()
        ranks[rank].join()


def _outcome(folder: Path, rank: int, exit_code: int | None, stuck: bool, seconds: float) -> Outcome:
    result = folder / f"result{rank}"
    stacks = (folder / f"stacks{rank}").read_text() if (folder / f"stacks{rank}").exists() else ""
    if not stuck and result.exists():
        return Outcome(**pickle.loads(result.read_bytes()), finished=True, exit_code=exit_code, seconds=seconds)
    return Outcome(trace=stacks, stuck=stuck, exit_code=exit_code, seconds=seconds)


def _rank_main(function: Callable[[], Any], rank: int, world: World, folder: Path) -> None:
    gc.freeze()  # so that no gc.collect() looks through, and copies, all that this process had before the fork
    with open(folder / f"stacks{rank}", "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        torch.set_num_threads(1)
        # A test whose group could not be made leaves its number here, from which torch names later ones.
        dist.distributed_c10d._world.group_count = 0
        set_environment(world.env)
        agent = serve_launcher(folder, rank, world) if world.launched else None
        if world.nodes is not None:
            os.environ.update(GROUP_RANK=str(world.nodes[rank]), LOCAL_WORLD_SIZE="1")
        result: dict[str, Any] = {}
        try:
            if world.backend is not None:
                store = make_store(folder, rank, world)
                timeout = datetime.timedelta(seconds=world.group_seconds)
                dist.init_process_group(
                    world.backend, store=store, rank=rank, world_size=world.size, timeout=timeout,
                    pg_options=world.options,
                )  # fmt: skip
                # Gloo fails on a rank that still connects if another one leaves, be it by an error of the function's.
                store.set(f"connected {rank}", "")
                store.wait([f"connected {peer}" for peer in range(world.size)], timeout)
            result["value"] = function()
            _wait_for_others(folder, rank, world.size)
            if dist.is_initialized():
                dist.destroy_process_group()
            del agent
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        unfinished = folder / f"unfinished{rank}"
        unfinished.write_bytes(pickle.dumps(result))
        unfinished.rename(folder / f"result{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
        # Exits as a failed process, so that its connections close. Another test covers the interpreter's whole
        # shutdown.
        os._exit(1 if "error" in result else 0)


def _wait_for_others(folder: Path, rank: int, size: int) -> None:
    """Waits until all ranks are done: Gloo fails on a rank that still connects if another one leaves."""
    (folder / f"done{rank}").touch()
    deadline = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < deadline:
        if all((folder / f"done{peer}").exists() or (folder / f"result{peer}").exists() for peer in range(size)):
            return
        time.sleep(0.002)


def set_environment(env: Mapping[str, str]) -> None:
    """This process's environment for tests, with ``env`` on top."""
    for name in [*HIDDEN_VARIABLES, *(name for name in os.environ if name.startswith("ZCOMM_"))]:
        os.environ.pop(name, None)
    os.environ.update(env)
    dist.set_debug_level_from_env()


def make_store(folder: Path, rank: int, world: World) -> dist.Store:
    """The store of a world, in this rank."""
    if not world.tcp:
        return dist.FileStore(str(folder / "store"), world.size)
    port = folder / "port"
    timeout = datetime.timedelta(seconds=world.group_seconds)
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("localhost", int(port.read_text()), is_master=False, timeout=timeout)


def serve_launcher(folder: Path, rank: int, world: World) -> dist.Store:
    """Sets torchrun's variables, on a port that nobody else can take: rank 0 is the agent whose store env:// joins."""
    agent = make_store(folder, rank, dataclasses.replace(world, tcp=True))
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(agent.port), TORCHELASTIC_USE_AGENT_STORE="True")
    return agent


def sampling(every: int = 1) -> dict[str, str]:
    """An environment in which report() has samples."""
    return {"ZCOMM_SAMPLE_ERRORS_EVERY": str(every)}


def options(**fields: Any) -> Any:
    """Options that compress what a test calls, however small it is."""
    return zcomm.Options(**{"min_bytes": 1, "forms": "single,in_place", **fields})
