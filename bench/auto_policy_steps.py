"""Whether policy="auto" chooses the faster of exact and compressed calls for whole training steps.

python bench/auto_policy_steps.py                        2 nodes of a rank on this machine, over loopback
python bench/auto_policy_steps.py --rate 100mbit         the nodes behind links of 100 Mbit/s, in network namespaces

A step computes layers and reduce-scatters the gradients of each while it computes the next. "bare" layers compute
nothing, so that the step waits for its calls; "hidden" calls take less time than the computing. Three groups of the
same ranks take turns, after the trial of the third: one is exact, one compresses, one decides by policy="auto". The
times are medians over steps, each the time of the slowest rank. The column "ratio" is the time of the faster of the
first two, divided by that of the third: 1 is the best possible value.
"""

import json
import os
import statistics
import sys
import time
import warnings
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import zcomm
from zcomm.distributed.single import reduce_scatter_single
from zcomm_bench.lab import network

WAYS = {"exact": {"reduce_scatter": "exact"}, "compressed": {}, "auto": {"policy": "auto"}}
LAYERS = 4
MODELS = {"bare": 0.0, "hidden": 1.5}  # seconds of computing for each second of exact calls
MOST_STEPS_OF_TRIAL = 200
TURNS = 15
STEPS_OF_TURN = 3  # the first is not counted


class Model:
    """Layers whose gradients have ``num_bytes`` each."""

    def __init__(self, num_bytes: int) -> None:
        self.num_products = 0  # of matrices, for each layer
        self._matrix = torch.randn(192, 192)
        self._gradients = [torch.randn(num_bytes // 4) for _ in range(LAYERS)]
        self._shards = [whole[: whole.numel() // dist.get_world_size()].clone() for whole in self._gradients]
        weight = torch.zeros(1, requires_grad=True)
        weight.grad = torch.ones(1)
        self._optimizer = torch.optim.SGD([weight], lr=0.0)

    def compute(self) -> None:
        for _ in range(self.num_products):
            self._matrix @ self._matrix

    def step(self, group: Any) -> float:
        """Seconds, of the slowest rank."""
        dist.barrier()
        started = time.perf_counter()
        works = []
        for shard, whole in zip(self._shards, self._gradients, strict=True):
            self.compute()
            works.append(reduce_scatter_single(shard, whole, group=group, async_op=True))
        for work in works:
            work.wait()
        self._optimizer.step()
        return slowest(time.perf_counter() - started)

    def compute_for(self, seconds: float) -> None:
        """Let layers compute that long together."""
        self.num_products = 200
        started = time.perf_counter()
        self.compute()
        taken = slowest(time.perf_counter() - started)
        self.num_products = round(200 * seconds / taken / LAYERS)


def slowest(seconds: float) -> float:
    taken = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(name: str, num_bytes: int) -> dict[str, Any]:
    """A row of the table, the same on all ranks."""
    groups = {way: dist.new_group(pg_options=zcomm.Options(min_bytes=1, **fields)) for way, fields in WAYS.items()}
    model = Model(num_bytes)
    exact = statistics.median(model.step(groups["exact"]) for _ in range(5))
    model.compute_for(MODELS[name] * exact)
    for _ in range(MOST_STEPS_OF_TRIAL):
        model.step(groups["auto"])
        if zcomm.stats(groups["auto"]).by_steps is not None:
            break
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way, group in groups.items():
            times[way] += [model.step(group) for _ in range(STEPS_OF_TURN)][1:]
    medians = {way: statistics.median(each) for way, each in times.items()}
    decision = zcomm.stats(groups["auto"]).by_steps
    by_calls = zcomm.stats(groups["auto"]).decisions[0]
    return {
        "model": name,
        **medians,
        "compressed_it": decision is not None and decision.compressed,
        "by_calls": by_calls.exact_seconds >= 1.03 * by_calls.compressed_seconds,
        "steps": decision.steps if decision is not None else 0,
        "ratio": min(medians["exact"], medians["compressed"]) / medians["auto"],
    }


def measure_rank(num_bytes: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for these calls
    dist.init_process_group("zcomm")
    for name in MODELS:
        row = measure(name, num_bytes)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main(
    layer_kib: Annotated[int, typer.Option(help="KiB of a layer's gradients")] = 256,
    nodes: Annotated[str, typer.Option(help="NODESxRANKS")] = "2x1",
    rate: Annotated[str | None, typer.Option(help="of a node's link, such as 100mbit; default: no limit")] = None,
    launches: Annotated[int, typer.Option(help="of all ranks; each is a trial of both models")] = 10,
) -> None:
    if "RANK" in os.environ:
        measure_rank(layer_kib * 1024)
        return
    rows: list[dict[str, Any]] = []
    argv = [sys.executable, __file__, "--layer-kib", str(layer_kib)]
    for _ in range(launches):
        launched = network.launch(argv, nodes=nodes, rate=rate, on_line=lambda line: rows.append(json.loads(line)))
    isa = os.environ.get("ZCOMM_ISA", zcomm.codec.cpu_isas()[-1])
    table = Table(title=f"{nodes}, {rate or 'no limit'}, {isa} {launched.note}")
    for name in ("model", "exact ms", "compressed ms", "auto ms", "chose", "by calls", "steps", "ratio"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        names = {True: "compressed", False: "exact"}
        cells = [f"{row[way] * 1e3:.3g}" for way in WAYS]
        chosen = [names[row["compressed_it"]], names[row["by_calls"]]]
        table.add_row(row["model"], *cells, *chosen, str(row["steps"]), f"{row['ratio']:.2f}")
    Console().print(table)
    good = sum(row["ratio"] >= 0.98 for row in rows)
    print(f"{good} of {len(rows)} are at most 2 % slower than the faster way")


if __name__ == "__main__":
    typer.run(main)
