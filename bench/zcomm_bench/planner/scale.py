"""How the cost of a step grows with the number of nodes: ``python -m zcomm_bench plan --scale``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from zcomm._units import size_text, time_text
from zcomm_bench.planner import step
from zcomm_bench.planner.report import Plan

MAX_RANKS = 4096


@dataclass(frozen=True)
class Point:
    """The exact step and the one of `option`, at a number of nodes: seconds, and bytes that a node sends to others."""

    nodes: int
    ranks: int
    exact_seconds: float
    seconds: float
    exact_bytes: float
    bytes: float

    @property
    def speedup(self) -> float:
        return self.exact_seconds / self.seconds


def points(plan: Plan, option: step.Option, max_ranks: int = MAX_RANKS) -> Iterator[Point]:
    """1, 2, 4, ... nodes like the plan's, up to `max_ranks` ranks; the work of each rank stays the same."""
    nodes = 1
    while (ranks := nodes * plan.cluster.ranks_per_node) <= max_ranks:
        cluster = replace(plan.cluster, nodes=nodes)
        exact, other = (
            step.predict(each, plan.workload, cluster, plan.overlap) for each in (plan.exact.option, option)
        )
        yield Point(nodes, ranks, exact.step_seconds, other.step_seconds, exact.inter_bytes, other.inter_bytes)
        nodes *= 2


def to_json(plan: Plan) -> list[dict[str, Any]]:
    """The same rows for programs, for the option that the plan shows: seconds and bytes."""
    option = plan.shown.option
    return [{"option": option.name, **asdict(each), "speedup": each.speedup} for each in points(plan, option)]


def show(plan: Plan, console: Any) -> None:
    """Print a row per number of nodes, for the option that the plan shows."""
    from rich import box
    from rich.table import Table

    option = plan.shown.option
    table = Table(title=f"{plan.exact.option.name}, and {option.name}, as the cluster grows", box=box.SIMPLE_HEAD)
    for title in ("nodes", "ranks", "exact step", "step", "speed-up", "a node sends, exact", "a node sends"):
        table.add_column(title, justify="right")
    for each in points(plan, option):
        times = (time_text(each.exact_seconds), time_text(each.seconds), f"{each.speedup:.2f}x")
        sent = (size_text(each.exact_bytes), size_text(each.bytes))
        table.add_row(str(each.nodes), str(each.ranks), *times, *sent)
    console.print(table)
    console.print("Bytes are those of the collectives' plans. Times above 384 ranks were held against no measurement.")
