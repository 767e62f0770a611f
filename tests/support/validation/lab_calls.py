"""Holds the model against reports of ``python -m zcomm_bench`` that were measured behind a limited link.

The share of line rate is calibrated on the exact all-gathers of the link's reports, the codec's rate on the largest
compressed call of each; the other compressed calls are then predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench import results_file
from zcomm._units import parse_nodes
from zcomm_bench.planner import collectives
from zcomm_bench.planner.cluster import ON_HOST, Cluster, Compute, Figure, Link, inter_link, intra_link
from zcomm_bench.planner.collectives import Cost
from zcomm_bench.planner.workload import DTYPE_BYTES

LEAST_BYTES = 1 << 20
CALIBRATION_BYTES = 4 << 20
RANKS_PER_CORE = 2  # the lab's ranks share cores, and their codecs take turns
_DTYPES = {"float": "float32", "bfloat16": "bfloat16", "half": "float16"}


@dataclass(frozen=True)
class Call:
    """A measured call and what the model says of it, in seconds and in bytes that a node sends."""

    report: str
    collective: str
    size: int
    seconds: float
    predicted: float
    link_bytes: float
    predicted_bytes: float
    hops_error: float | None  # of the bytes of a hop, at worst; None: the report does not have them

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def bytes_error(self) -> float:
        return self.predicted_bytes / self.link_bytes - 1


def _cluster(report: Mapping[str, Any], efficiency: float, codec_rate: float) -> Cluster:
    nodes, local = parse_nodes(report["config"]["nodes"])
    nothing = Figure(0.0, "given")
    inter = replace(inter_link(report["config"]["link"]), efficiency=Figure(efficiency, "measured"))
    return Cluster(
        nodes,
        local,
        intra=Link(intra_link("5GB/s").bandwidth, Figure(1.0), nothing, nothing, nothing),
        inter=Link(inter.bandwidth, inter.efficiency, nothing, nothing, nothing),
        compute=Compute(Figure(1.0), Figure(1.0), Figure(1.0), Figure(codec_rate), Figure(1.0)),
        exact_reduce_factor=2.0,
        launch=ON_HOST,
    )


def _cost(report: Mapping[str, Any], row: Mapping[str, Any], cluster: Cluster) -> Cost:
    dtype, size = _DTYPES[row["type"]], row["size"] // DTYPE_BYTES[_DTYPES[row["type"]]]
    kind, format = report["config"]["collective"], row["format"]
    if kind == "all_gather":
        return collectives.gather(size, dtype, format, cluster)
    if kind == "all_to_all":
        return collectives.all_to_all(size, dtype, format, cluster)
    reduced = collectives.reduce(size, dtype, format, cluster)
    if kind == "reduce_scatter":
        return reduced
    return reduced + collectives.gather(size, dtype, format.partition("/")[0], cluster)


def hops_error(report: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
    """The largest relative error of the bytes that a rank sends in a hop, intra-node or inter-node. None: the report is
    older than hops in it."""
    if row.get("hops") is None:
        return None
    dtype = _DTYPES[row["type"]]
    # Of bytes alone: no rate counts.
    cluster = _cluster({"config": {**report["config"], "link": "1gbit"}}, 1.0, 1.0)
    kind, num_elements = report["config"]["collective"], row["size"] // DTYPE_BYTES[dtype]
    if kind == "all_to_all":
        return None  # it has one hop
    planned = collectives.bytes_by_hop(kind, num_elements, dtype, row["format"], cluster)
    worst = 0.0
    for number, hop in enumerate(planned):
        counted = row["hops"][number] if number < len(row["hops"]) else {}  # those that sent nothing are left off
        for link in ("intra_node", "inter_node"):
            pair = (getattr(hop, link), counted.get(f"{link}_bytes", 0.0))
            worst = max(worst, (max(pair) - min(pair)) / max(*pair, 1))
    return worst


def collective_reports(folder: Path = results_file.RESULTS) -> dict[str, dict[str, Any]]:
    """The measurements of collectives, by name and kind of machine, in the form of a report of the benchmark."""
    found = {}
    for kind, measurements in results_file.load("collectives", folder).items():
        for name, one in measurements.items():
            config = {**one.facts, "options": {}}
            results = [{**row, "type": one.facts["dtype"]} for row in one.records]
            found[f"{name}-{kind}"] = {"schema": "zcomm-bench/1", "config": config, "results": results}
    return found


def _rows(report: Mapping[str, Any], backend: str, least: int) -> list[Mapping[str, Any]]:
    named = [row for row in report["results"] if row["backend"].partition("=")[0] == backend]
    return [row for row in named if row["size"] >= least]


def _efficiency(reports: Sequence[Mapping[str, Any]], link: str) -> float:
    """The share of line rate that exact all-gathers reach."""
    shares = [
        row["link_bytes"] / (inter_link(link).bandwidth.value * row["median_us"] * 1e-6)
        for report in reports
        if report["config"]["link"] == link and report["config"]["collective"] == "all_gather"
        for row in _rows(report, "gloo", CALIBRATION_BYTES)
    ]
    if not shares:
        raise ValueError(f"expected an exact all-gather of at least 4 MiB over {link} to calibrate on, got none")
    return float(median(shares))


def predict(reports: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """The compressed calls of at least 1 MiB in `reports` (name to content) that have a limited link. Broadcasts are
    left out: the model lets all ranks do the same at the same time."""
    limited = {
        name: report
        for name, report in reports.items()
        if report["config"]["link"] not in ("none", "unlimited") and report["config"]["collective"] != "broadcast"
    }
    calls = []
    for name, report in limited.items():
        link = report["config"]["link"]
        efficiency = _efficiency(list(limited.values()), link)
        rows = _rows(report, "zcomm", LEAST_BYTES)
        largest = max(rows, key=lambda row: row["size"])
        unit = _cost(report, largest, _cluster(report, efficiency, 1.0)).codec
        rate = unit / (RANKS_PER_CORE * largest["codec_us"] * 1e-6)
        cluster = _cluster(report, efficiency, rate)
        for row in rows:
            cost = _cost(report, row, cluster)
            measured = row["median_us"] * 1e-6
            kind = report["config"]["collective"]
            sent = row["link_bytes"], cost.inter_bytes, hops_error(report, row)
            calls.append(Call(name, kind, row["size"], measured, cost.seconds, *sent))
    return calls
