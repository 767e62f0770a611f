"""Every figure of a report, from its raw samples alone: `--verify` computes them again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from zcomm_bench.prove import prediction
from zcomm_bench.prove.bits import SAME_ON_ALL
from zcomm_bench.prove.intervals import Interval, of_median, of_ratios, turns

Report = Mapping[str, Any]
# A link is slow where all else needs at most this part of the time of the compressed bytes.
SLOW_SHARE = 0.1
LAST_LOSSES = 8


def of(report: Report) -> dict[str, Any]:
    """Of the stages that the report has. Plain numbers, as JSON has them."""
    made: dict[str, Any] = {"networks": [of_network(report, network) for network in networks_of(report)]}
    parts = {"noise": noise, "bits": bits, "beside": beside, "steps": steps, "drill": drill}
    for name, make in parts.items():
        if name in report:
            made[name] = make(report[name], report)
    if "sanity" in report:
        made["ranks"] = {name: slowest_rank(samples) for name, samples in report["sanity"]["local"].items()}
    return made


def networks_of(report: Report) -> list[Report]:
    """The network as it is, and those with fewer cards."""
    own = [{"name": "as it is", **report}] if "sanity" in report else []
    return own + list(report.get("networks", {}).get("measured", []))


def of_network(report: Report, network: Report) -> dict[str, Any]:
    predicted = {(row["collective"], row["bytes"]): row for row in network["predictions"]["calls"]}
    rate = network["predictions"]["link_bytes_per_second"]
    cells = network.get("sweep", {}).get("cells", [])
    return {
        "name": network["name"],
        "baseline": baseline(network),
        "cells": [of_cell(cell, predicted[cell["collective"], cell["bytes"]], rate) for cell in cells],
    }


def baseline(network: Report) -> list[dict[str, Any]]:
    """What exact calls of the sanity stage get through the link, and the share of what it should carry. NCCL's
    all-reduces are left out: whether they were rings or trees is not known."""
    rates, should = network["sanity"]["rates"], network["link"]["bytes_per_second"]
    rows = []
    for cell in network["sanity"]["cells"]:
        if cell["collective"] == "all_reduce" and rates["backend"] == "nccl":
            continue
        reached = prediction.reached(cell, rates, median(cell["samples"]["exact"]))
        share = None if should is None else reached / should
        rows.append({"collective": cell["collective"], "bytes_per_second": reached, "share": share})
    return rows


def of_cell(cell: Report, predicted: Report, rate: float) -> dict[str, Any]:
    """`slow_link`: bytes between nodes are nearly all that the compressed call waits for."""
    samples = cell["samples"]
    forth_and_back = {name: turns(found) for name, found in samples.items()}
    speedup = of_ratios(forth_and_back["exact"], forth_and_back["compressed"])
    byte_ratio = predicted["exact_link_bytes"] / predicted["compressed_link_bytes"]
    return {
        "collective": cell["collective"],
        "bytes": cell["bytes"],
        "seconds": {name: median(found) for name, found in samples.items()},
        "speedup": speedup.to_json(),
        "auto_over_exact": of_ratios(forth_and_back["auto"], forth_and_back["exact"]).to_json(),
        "compressed_calls": cell["compressed_calls"],
        "auto_compresses": cell["auto_compresses"],
        "byte_ratio": byte_ratio,
        "share_of_byte_ratio": scaled(speedup, 1 / byte_ratio),
        "slow_link": predicted["other_seconds"] <= SLOW_SHARE * predicted["compressed_link_bytes"] / rate,
        "error": error_of(predicted["compressed"]["seconds"], samples["compressed"]),
        "exact_error": error_of(predicted["exact"]["seconds"], samples["exact"]),
    }


def scaled(interval: Interval, factor: float) -> dict[str, float]:
    return Interval(interval.value * factor, interval.low * factor, interval.high * factor).to_json()


def error_of(predicted: float, samples: Sequence[float]) -> dict[str, float]:
    """Of a prediction, over the measured median: above 0 if that was faster than predicted."""
    measured = of_median(samples)
    return Interval(
        predicted / measured.value - 1, predicted / measured.high - 1, predicted / measured.low - 1
    ).to_json()


def noise(stage: Report, report: Report) -> list[dict[str, Any]]:
    """Exact over exact."""
    rows = []
    for cell in stage["cells"]:
        ratio = of_ratios(turns(cell["samples"]["again"]), turns(cell["samples"]["exact"]))
        rows.append({"collective": cell["collective"], "bytes": cell["bytes"], "ratio": ratio.to_json()})
    return rows


def slowest_rank(samples: Sequence[Sequence[float]]) -> dict[str, Any]:
    """By each rank's fastest sample: what else runs on a machine disturbs most samples, not all."""
    fastest = [min(own) for own in samples]
    rank = max(range(len(fastest)), key=fastest.__getitem__)
    return {"rank": rank, "over_median": fastest[rank] / median(fastest)}


def bits(stage: Report, report: Report) -> dict[str, Any]:
    """Calls whose results have other bits than the reference, or not the same on all ranks."""
    wrong = []
    for row in stage["rows"]:
        what = f"{row['collective']} of {row['dtype']} in {row['format']}"
        for rank, (crc, expected) in enumerate(zip(row["crc"], row["expected"], strict=True)):
            if crc != expected:
                wrong.append(f"{what}, rank {rank}: {row['first_wrong'][rank] or 'another CRC'}")
        if row["collective"] in SAME_ON_ALL and len(set(row["crc"])) > 1:
            wrong.append(f"{what}: ranks have different bits")
    not_compressed = [name for name, count in stage["compressed_calls"].items() if count == 0]
    return {"calls": len(stage["rows"]), "wrong": wrong, "not_compressed": not_compressed}


def beside(stage: Report, report: Report) -> list[dict[str, Any]]:
    """How many times as long the products and the call take beside each other, for each way."""
    rows = []
    for cell in stage["cells"]:
        row: dict[str, Any] = {"collective": cell["collective"], "bytes": cell["bytes"]}
        for way, samples in cell["samples"].items():
            columns = {name: [turn[place] for turn in samples] for place, name in enumerate(cell["columns"])}
            row[way] = {
                "product": of_ratios(columns["product_beside"], columns["product_alone"]).to_json(),
                "call": of_ratios(columns["call_beside"], columns["call_alone"]).to_json(),
                "call_seconds": median(columns["call_beside"]),
            }
        rows.append(row)
    return rows


def steps(stage: Report, report: Report) -> list[dict[str, Any]]:
    """Of each model: blocks in pairs, without the first step of each, which follows on the other copy."""
    rows = []
    for run, predicted in zip(stage["runs"], report["predictions"]["steps"], strict=True):
        size, counted = run["block"], {}
        for way, seconds in run["samples"].items():
            blocks = range(run["warmup"], len(seconds), size)
            counted[way] = [median(seconds[start + (size > 1) : start + size]) for start in blocks]
        last = {way: fmean(losses[-LAST_LOSSES:]) for way, losses in run["losses"].items()}
        rows.append(
            {
                "model": run["model"],
                "seconds": {way: median(found) for way, found in counted.items()},
                "over_exact": of_ratios(counted["compressed"], counted["exact"]).to_json(),
                "loss": last,
                "loss_over_exact": last["compressed"] / last["exact"],
                "compressed_calls": run["compressed_calls"],
                "error": error_of(predicted["compressed"], counted["compressed"]),
            }
        )
    return rows


def drill(stage: Report, report: Report) -> dict[str, Any]:
    """Which survivors did not end as they should: with an error in time that names the rank that was killed."""
    victim, wrong = stage["victim"], []
    for rank, end in enumerate(stage["ends"]):
        if rank == victim:
            continue
        if end["error"] is None:
            wrong.append(f"rank {rank} ended without an error")
        elif not re.search(rf"\brank {victim}\b", end["error"]):
            wrong.append(f"rank {rank} does not name rank {victim}: {end['error']}")
        elif end["seconds"] > stage["limit_seconds"]:
            wrong.append(f"rank {rank} took {end['seconds']:.1f} s")
    slowest = max(end["seconds"] for rank, end in enumerate(stage["ends"]) if rank != victim)
    return {"victim": victim, "wrong": wrong, "slowest_seconds": slowest}
