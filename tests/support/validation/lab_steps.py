"""Holds the model against training steps that were measured in network namespaces (lab_steps.json).

Calibrated are the seconds of a step without a limited link, exact and compressed, and the overlap on the exact step
behind 1 Gbit/s. The other steps are then predicted, and the bytes of all. Steps have one micro-batch. Those
that differ in how weights are sent have a calibration of their own: compute and overlap, by a step with exact weights
behind each of two links.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zcomm._units import parse_nodes
from zcomm_bench.planner.cluster import ON_HOST, Cluster, Figure, inter_link, intra_link, processor
from zcomm_bench.planner.collectives import Cost
from zcomm_bench.planner.step import OPTIONS, Option, combine, costs_of
from zcomm_bench.planner.workload import BITS_PER_WEIGHT, Workload, of_sizes

UNLIMITED = "unlimited"
OVERLAP_LINK = "1gbit"
SLOW_LINK = "100mbit"
EXACT_WEIGHTS = Option("compressed gradients", reduce_scatter="int8:128/int4:128")


@dataclass(frozen=True)
class Step:
    """A measured step, and what the model says of it: seconds, and bytes that leave all nodes. `predicted` is None for
    a step that calibrates it."""

    link: str
    option: str
    seconds: float
    predicted: float | None
    inter_node_bytes: float
    predicted_bytes: float

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.seconds - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.inter_node_bytes - 1


def load() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return content


def _cluster(content: Mapping[str, Any], link: str) -> Cluster:
    nodes, local = parse_nodes(content["nodes"])
    inter = inter_link("1tbit" if link == UNLIMITED else link)
    inter = replace(inter, efficiency=Figure(content["link_share"].get(link, 1.0), "measured"))
    return Cluster(nodes, local, intra_link("5GB/s"), inter, processor("v100"), exact_reduce_factor=2.0, launch=ON_HOST)


def _cost(content: Mapping[str, Any], row: Mapping[str, Any]) -> Cost:
    """Of the links alone: what the codec and latency take is in the step that calibrates the compute."""
    bits = Figure(row["bits_per_weight"], "given") if "bits_per_weight" in row else BITS_PER_WEIGHT
    units = [(name, size) for name, size, count in content["units"] for _ in range(count)]
    work = Workload(of_sizes(units), 1.0, 1, reduce_dtype="float32", bits_per_weight=bits)
    costs = costs_of(_option(row["option"]), work, _cluster(content, row["link"])).values()
    wire = sum(cost.wire for cost in costs)
    return Cost(seconds=wire, wire=wire, inter_bytes=sum(cost.inter_bytes for cost in costs))


def _option(name: str) -> Option:
    return next(option for option in (*OPTIONS, EXACT_WEIGHTS) if option.name == name)


def predict(content: Mapping[str, Any]) -> list[Step]:
    """The rows of `content`, as `load` returns it."""
    rows = content["rows"]

    def seconds_of(link: str, is_exact: bool) -> float:
        found = next(row for row in rows if row["link"] == link and (row["option"] == "exact") == is_exact)
        return 1 / float(found["steps_per_second"])

    compute = {is_exact: seconds_of(UNLIMITED, is_exact) for is_exact in (True, False)}
    wire = _cost(content, {"link": OVERLAP_LINK, "option": "exact"}).wire
    exposed = seconds_of(OVERLAP_LINK, True) - max(compute[True], wire)
    overlap = 1 - exposed / min(compute[True], wire)
    nodes = _cluster(content, UNLIMITED).nodes
    steps = []
    for row in rows:
        is_exact = row["option"] == "exact"
        cost = _cost(content, row)
        calibrates = row["link"] == UNLIMITED or (is_exact and row["link"] == OVERLAP_LINK)
        predicted = None if calibrates else combine(compute[is_exact], cost, overlap)
        measured = 1 / row["steps_per_second"]
        sent = cost.inter_bytes * nodes
        steps.append(Step(row["link"], row["option"], measured, predicted, row["inter_node_bytes"], sent))
    return steps


def predict_weights(content: Mapping[str, Any]) -> list[Step]:
    """The rows that differ in how weights are sent."""
    rows = content["weights_rows"]
    fast, slow = (
        next(row for row in rows if row["link"] == link and row["option"] == EXACT_WEIGHTS.name)
        for link in (OVERLAP_LINK, SLOW_LINK)
    )
    wire = _cost(content, fast).wire
    # fast = compute + exposed wire; slow = its wire + exposed compute: the compute hides behind it
    hidden = slow["seconds"] - _cost(content, slow).wire
    exposed = (fast["seconds"] - math.sqrt(fast["seconds"] ** 2 - 4 * wire * hidden)) / (2 * wire)
    compute = fast["seconds"] - exposed * wire
    steps = []
    for row in rows:
        cost = _cost(content, row)
        predicted = None if row is fast or row is slow else combine(compute, cost, 1 - exposed)
        sent = cost.inter_bytes * _cluster(content, UNLIMITED).nodes
        steps.append(Step(row["link"], row["option"], row["seconds"], predicted, row["inter_node_bytes"], sent))
    return steps
