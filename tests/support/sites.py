"""Processes that are sites of a training, and the meeting point at which they meet."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zcomm
from support import outer
from support.members import Board, fork
from support.outer import inner_step
from support.training import make_model
from support.worlds import set_environment
from zcomm._meeting import MeetingPoint
from zcomm.outer.agreement import mark_of

EVERY = 4
#: Makes a site's model and OuterStep.
Make = Callable[[zcomm.outer.Sites], tuple[nn.Module, zcomm.outer.OuterStep]]


def make(sites: zcomm.outer.Sites, seed: int = 0, **arguments: Any) -> tuple[nn.Module, zcomm.outer.OuterStep]:
    model = make_model()
    if seed:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    return model, outer.outer_step(model, **{"every": EVERY, "fragments": 2, "delay": 1, **arguments}, sites=sites)


@dataclass
class Sites:
    """Sites by name, and the meeting point. ``steps``: inner steps after which a site ends by itself, unless finish()
    lets all end."""

    board: Board
    steps: int = 10**6
    pause: float = 0.0  # seconds of an inner step
    timeout: float = 10.0
    patience: float = 5.0
    least: int = 1
    processes: dict[str, Any] = field(default_factory=dict)
    point: Any = None
    port: int = 0

    def __enter__(self) -> Sites:
        self.meet()
        return self

    def __exit__(self, *_: object) -> None:
        self.point.kill()
        for process in self.processes.values():
            process.kill()

    def meet(self) -> None:
        """Starts the meeting point; again, at the same port."""
        if self.point is not None:
            self.point.kill()
            self.point.join()
        self.point = fork.Process(target=_serve, args=(self.board, self.port, self.least, self.patience), daemon=True)
        self.point.start()
        self.port = int(self.board.read("port"))

    def start(self, name: str, make: Make = make) -> None:
        self.processes[name] = fork.Process(target=_train, args=(self, name, make), daemon=True)
        self.processes[name].start()

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def events(self, name: str) -> list[dict[str, Any]]:
        """What a site has told, after each outer step of a fragment."""
        lines = (self.board.find(f"log {name}") or "").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, name: str, condition: Callable[[dict[str, Any]], bool], seconds: float = 40.0) -> dict[str, Any]:
        """Waits until a site tells what meets the condition."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in self.events(name):
                if condition(event):
                    return event
            time.sleep(0.02)
        raise AssertionError(f"site {name}: {self.events(name)[-3:]}, {self.error(name)}")

    def error(self, name: str) -> str:
        return self.board.find(f"error {name}") or ""

    def join(self, name: str, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Waits until a site has ended, and returns its events."""
        self.processes[name].join(seconds)
        assert self.processes[name].exitcode == 0, self.error(name) or f"site {name}: {self.events(name)[-3:]}"
        return self.events(name)

    def finish(self, *names: str) -> dict[str, list[dict[str, Any]]]:
        """Lets all sites end soon, and returns the events of these."""
        reached = max(event["inner_steps"] for name in names for event in self.events(name))
        self.board.write("end", str(reached + 100))
        return {name: self.join(name) for name in names}


def _serve(board: Board, port: int, least: int, patience: float) -> None:
    set_environment({})
    deadline = time.monotonic() + 20
    while True:
        try:
            point = MeetingPoint(port, least, patience)
            break
        except RuntimeError:  # the port of one that was killed is still in use
            assert time.monotonic() < deadline
            time.sleep(0.1)
    board.write("port", str(point.port))
    point.serve()


def _train(run: Sites, name: str, make: Make) -> None:
    set_environment({"GROUP_RANK": str(1 + ord(name[0])), "LOCAL_WORLD_SIZE": "1"})
    torch.set_num_threads(1)
    logging.getLogger("zcomm").setLevel(logging.ERROR)
    try:
        sites = zcomm.outer.Sites(f"localhost:{run.port}", name=name, timeout=run.timeout)
        model, outer_step = make(sites)
        with open(run.board.folder / f"log {name}", "a") as log:
            tell(log, outer_step)
            while (steps := outer_step.stats().inner_steps) < int(run.board.find("end") or run.steps):
                inner_step(model, ord(name[0]), steps)
                before = [fragment.stepped_at for fragment in outer_step._fragments]
                outer_step.step()
                if [fragment.stepped_at for fragment in outer_step._fragments] != before:
                    tell(log, outer_step)
                time.sleep(run.pause)
            outer_step.synchronize()
            tell(log, outer_step, outer.flat(model))
        sites.close()
        os._exit(0)
    except BaseException:
        run.board.write(f"error {name}", traceback.format_exc())
        os._exit(1)


def tell(log: Any, outer_step: zcomm.outer.OuterStep, model: torch.Tensor | None = None) -> None:
    stats, sites = outer_step.stats(), outer_step._sites
    backend: Any = zcomm.distributed.groups.backend_of(outer_step._group)
    assert sites is not None
    told = {
        "membership": sites._joined,
        "sites": backend.size(),
        "rank": backend.rank(),
        "inner_steps": stats.inner_steps,
        "stepped_at": [fragment.stepped_at for fragment in outer_step._fragments],
        "values": mark_of([fragment.values for fragment in outer_step._fragments]),
        "sent": stats.sent_bytes,
        "exact": stats.exact_bytes,
        "model": mark_of(model) if model is not None else None,
    }
    log.write(json.dumps(told) + "\n")
    log.flush()


def assert_equal_values(logs: dict[str, list[dict[str, Any]]]) -> int:
    """Values after the same outer steps of one membership have the same bits. Returns how many were compared."""
    seen: dict[str, tuple[str, int]] = {}
    compared = 0
    for name, events in logs.items():
        for event in events:
            key = f"{event['membership']} {event['inner_steps']} {event['stepped_at']}"
            other, values = seen.setdefault(key, (name, event["values"]))
            assert values == event["values"], f"sites {other} and {name} differ: {event}"
            compared += other != name
    return compared
