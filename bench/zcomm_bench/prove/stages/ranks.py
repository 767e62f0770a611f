"""The ranks that run the stages: their device, groups, nodes, and what they say while they work."""

from __future__ import annotations

import functools
import gc
import os
import time
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm_bench import measure
from zcomm_bench.contenders import Contender, Zcomm
from zcomm_bench.lab import gpus
from zcomm_bench.prove import facts
from zcomm_bench.prove.scale import FORMATS, REDUCE, Scale

DEFAULTS = {**FORMATS, "exchanges": REDUCE}


class Hooks:
    """Where tests plant faults. The stages call these; a cluster's run has this class, which does nothing."""

    def before_exact(self) -> None:
        """Before each exact call that is timed."""

    def local_passes(self) -> int:
        """How many passes this rank makes where each makes one."""
        return 1

    def change_result(self, collective: str, result: torch.Tensor) -> None:
        """After a compressed call whose bits are compared."""

    def change_predictions(self, predictions: dict[str, Any]) -> None:
        """Before predictions are written."""


class Exact(Contender):
    """The real backend, "nccl" or "gloo", not zcomm's exact path."""

    def __init__(self, name: str, group: Any, hooks: Hooks) -> None:
        super().__init__(name, group)
        self._hooks = hooks

    def call(self, problem: Any) -> None:
        self._hooks.before_exact()
        super().call(problem)


class Ranks:
    """All ranks, seen from one. Groups are made when they are first asked for, by all ranks at once. `link`: bytes per
    second that a node's link should carry, if that was given."""

    def __init__(
        self, device: torch.device, scale: Scale, hooks: Hooks | None = None, link: float | None = None
    ) -> None:
        self.device, self.scale, self.hooks, self.link = device, scale, hooks or Hooks(), link
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.world = measure.world(device)
        self.exact_backend = "nccl" if device.type == "cuda" else "gloo"
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """A line of progress, from rank 0."""
        if self.rank == 0:
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            print(f"[{minutes:2d}:{seconds:02d}] {text}", flush=True)

    @functools.cached_property
    def exact(self) -> Exact:
        return self._exact("exact")

    @functools.cached_property
    def again(self) -> Exact:
        """One more like `exact`."""
        return self._exact("again")

    @functools.cached_property
    def compressed(self) -> Zcomm:
        return Zcomm("compressed", self.zcomm_group(min_bytes=1), "default")

    @functools.cached_property
    def auto(self) -> Zcomm:
        return Zcomm("auto", self.zcomm_group(compress="auto"), "default")

    def _exact(self, name: str) -> Exact:
        return Exact(name, dist.new_group(backend=self.exact_backend), self.hooks)

    def zcomm_group(self, **fields: Any) -> Any:
        """A group with the default formats, also for calls that are exact by default."""
        options = zcomm.Options(**{"forms": "single,in_place", "compress": "always", **DEFAULTS, **fields})
        return dist.new_group(backend="zcomm", pg_options=options)

    def slowest(self, seconds: list[list[float]]) -> list[list[float]]:
        """Samples by rows, each as its slowest rank has it."""
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()  # type: ignore[no-any-return]

    def of_all(self, own: Any) -> list[Any]:
        """What every rank has, by rank."""
        found = [None] * self.size
        dist.all_gather_object(found, own)
        return found

    def finish(self) -> None:
        """Wait for what this rank's GPU has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what large tensors and models took: models have circles of references."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def timed(self, call: Any) -> float:
        """Seconds of a call that all ranks start at once, on this rank."""
        self.finish()
        dist.barrier()
        start = time.perf_counter()
        call()
        self.finish()
        return time.perf_counter() - start


def own_device() -> torch.device:
    """Of this rank, made the current one: a GPU where there is one. Ranks share GPUs if a node has fewer."""
    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        return torch.device("cuda", gpus.place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), interface))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def start() -> tuple[torch.device, dict[str, Any]]:
    """Initialize the process group of this rank; returns its device and facts."""
    device = own_device()
    if device.type == "cpu":
        dist.init_process_group("gloo")
        return device, facts.of_rank("cpu", {})
    dist.init_process_group("cpu:gloo,cuda:nccl")
    properties: Any = torch.cuda.get_device_properties(device)
    return device, facts.of_rank("cuda", {**gpus.facts(), "uuid": str(properties.uuid)})
