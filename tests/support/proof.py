"""Reports of ``zcomm_bench prove`` without a measurement: samples are what the planner predicts of a cluster, give or
take half a per cent, so every claim passes. Tests plant faults into them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from zcomm_bench.prove import bits, facts, prediction, report
from zcomm_bench.prove.scale import CALLS, Model, Scale

Raw = dict[str, Any]
NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE
SIZES = (1 << 16, 4 << 20)
LINK = 12.5e6  # bytes per second of a node
TINY = Scale(
    sizes=(3 << 14, 1 << 20),  # the first is below the default min_bytes
    noise_sizes=(1 << 16,),
    beside_bytes=1 << 16,
    cell_seconds=0.2,
    turns=4,
    bits_elements=515,
    matrix=64,
    models=(Model(64, 1, 16, 1, 64),),
    blocks=6,
    block_steps=2,
    drill_seconds=60.0,
)
RATES = {
    "nodes": NODES,
    "ranks_per_node": PER_NODE,
    "backend": "gloo",
    "intra": {"bytes_per_second": 1e11, "exchange_seconds": 1e-6, "hop_seconds": 1e-6},
    "inter": {"bytes_per_second": LINK, "exchange_seconds": 1e-6, "hop_seconds": 1e-6},
    "exact_reduce_factor": 2.0,
    "codec_bytes_per_second": 1e11,
}


def jittered(seconds: float, count: int = 12) -> list[float]:
    """As many samples around `seconds`, the same in every run."""
    noise = np.random.RandomState(round(seconds * 1e9) % (1 << 31)).uniform(-0.005, 0.005, count)
    return [float(seconds * (1 + each)) for each in noise]


def slower(samples: list[float], factor: float) -> list[float]:
    return [factor * each for each in samples]


def raw() -> Raw:
    """A whole report's samples; every fault is a change of them."""
    own = {**facts.of_rank("cpu", {}), "variables": {}}
    made: Raw = {
        "schema": report.SCHEMA,
        "rehearsal": "on CPUs",
        "environment": {"nodes": NODES, "ranks_per_node": PER_NODE, "node_of": [0, 0, 1, 1], "ranks": [own] * RANKS},
        "link": {"bytes_per_second": LINK, "source": "given by --link"},
        "scale": asdict(replace(TINY, sizes=SIZES)),
    }
    made["sanity"] = sanity()
    made["predictions"] = prediction.make(made["sanity"], SIZES)
    made["noise"] = {"cells": [noise("all_gather"), noise("reduce_scatter")]}
    made["bits"] = copy.deepcopy(bits_of())
    made["sweep"] = {"cells": [cell(row) for row in made["predictions"]["calls"]]}
    made["steps"] = {"runs": [steps(made["predictions"]["steps"][0])]}
    made["networks"] = {"measured": [], "not_run": "on CPUs Gloo has one card"}
    return made


def sanity() -> dict[str, Any]:
    cluster = prediction.cluster_of(RATES)
    cells = []
    for collective in CALLS:
        exact = prediction.of_call(collective, SIZES[-1], cluster, "gloo")["exact"]["seconds"]
        cells.append(
            {"collective": collective, "bytes": SIZES[-1], "calls": {"exact": 1}, "samples": {"exact": jittered(exact)}}
        )
    trained = {"compute": jittered(0.05), "update": jittered(0.004), "units": [("block 0", 200_000), ("root", 60_000)]}
    local = {name: [jittered(0.002 + rank * 1e-6) for rank in range(RANKS)] for name in ("matrix", "codec")}
    return {"rates": RATES, "local": local, "cells": cells, "steps": [{**trained, "exact_steps": jittered(0.3)}]}


def noise(collective: str) -> dict[str, Any]:
    samples = {"exact": jittered(0.004), "again": jittered(0.00401)}
    return {"collective": collective, "bytes": 1 << 16, "calls": {"exact": 2, "again": 2}, "samples": samples}


def cell(predicted: Raw) -> Raw:
    """Of the sweep: "auto" takes what is faster."""
    seconds = {way: predicted[way]["seconds"] for way in ("exact", "compressed")}
    seconds["auto"] = min(seconds.values()) * 1.001
    return {
        "collective": predicted["collective"],
        "bytes": predicted["bytes"],
        "calls": dict.fromkeys(seconds, 1),
        "samples": {way: jittered(each) for way, each in seconds.items()},
        "compressed_calls": 14,
        "auto_compresses": seconds["compressed"] < seconds["exact"],
    }


def steps(predicted: Raw) -> Raw:
    losses = [5 - number / 10 for number in range(12)]
    return {
        "model": asdict(TINY.models[0]),
        "warmup": 0,
        "block": 2,
        "samples": {way: jittered(predicted[way]) for way in ("exact", "compressed")},
        "losses": {"exact": losses, "compressed": [loss * 1.001 for loss in losses]},
        "compressed_calls": {"all_gather": 48, "reduce_scatter": 24},
    }


@functools.cache
def bits_of() -> dict[str, Any]:
    rows = []
    for case in bits.cases(TINY.bits_elements):
        crcs = [case.crc(rank, [0, 0, 1, 1]) for rank in range(RANKS)]
        rows.append({**vars(case), "crc": crcs, "expected": list(crcs), "first_wrong": [None] * RANKS})
    about = {"collective": "weights", "dtype": "bfloat16", "format": "lossless, step 1"}
    rows.append({**about, "crc": [7] * RANKS, "expected": [7] * RANKS, "first_wrong": [None] * RANKS})
    return {"rows": rows, "compressed_calls": dict.fromkeys({row["collective"] for row in rows}, 3)}


def judged(fault: Callable[[Raw], object] = lambda made: None) -> Raw:
    """The report after a fault was planted into its samples."""
    made = raw()
    fault(made)
    return report.judged(made)


def verdicts(made: Raw) -> dict[str, str]:
    return {row["claim"]: row["verdict"] for row in made["verdicts"]}


def why(made: Raw, claim: str) -> str:
    return next(row["why"] for row in made["verdicts"] if row["claim"] == claim)
