"""Calls by themselves, exact and compressed turn by turn: noise, and the sweep over sizes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import zcomm
from zcomm_bench.contenders import Contender
from zcomm_bench.lab.network import interface_tx_bytes, parse_limit
from zcomm_bench.prove.intervals import LEAST_SAMPLES
from zcomm_bench.prove.scale import BENCH_DTYPES, CALLS, NOISE_CALLS
from zcomm_bench.prove.stages.ranks import Ranks
from zcomm_bench.spec import NO_LAB, Spec
from zcomm_bench.worker import Bench

WARMUP = 2


def cell(ranks: Ranks, collective: str, num_bytes: int, ways: list[Contender]) -> dict[str, Any]:
    """Samples of each way in seconds per call, of the slowest rank. Every turn goes through the ways forth and back
    (ABBA), so that a drift of the machine meets them alike: samples of even place are forth, odd ones back."""
    spec = Spec(
        collective,
        [num_bytes],
        backends=[ranks.exact_backend],
        dtype=BENCH_DTYPES[CALLS[collective]],
        iters=ranks.scale.turns,
        warmup=WARMUP,
        check=False,
        link=limit_of(ranks.link),
        nodes=f"{ranks.world.nodes}x{ranks.world.ranks_per_node}",
        device=ranks.device.type,
        seconds=ranks.scale.cell_seconds / 2,  # of each direction
    )
    bench = Bench(spec, ranks.device, ways)
    problem = bench.make_problem(spec.shards[0])
    calls, turns = bench.warm_up(problem)
    turns = max(turns, LEAST_SAMPLES)
    seconds: list[list[float]] = [[] for _ in ways]
    gc.collect()
    gc.disable()
    for _ in range(turns):
        for index in (*range(len(ways)), *reversed(range(len(ways)))):
            seconds[index].append(bench.sample(problem, ways[index], calls[index])[0])
    gc.enable()
    names = [way.name for way in ways]
    return {
        "collective": collective,
        "bytes": problem.whole.nbytes,
        "calls": dict(zip(names, calls, strict=True)),
        "samples": dict(zip(names, ranks.slowest(seconds), strict=True)),
    }


def limit_of(rate: float | None) -> str:
    """A link as the benchmark reads it: behind one with a limit a sample has many calls, so bursts count little. Only
    where its interface can be counted."""
    text = f"{(rate or 0) * 8:.0f}bit"
    try:
        parse_limit(text)
        interface_tx_bytes(Path("/proc/self/net/dev").read_text(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
    except ValueError:
        return NO_LAB
    return text


def noise(ranks: Ranks) -> dict[str, Any]:
    """Exact against exact: two groups of the same backend."""
    cells = []
    for num_bytes in ranks.scale.noise_sizes:
        for collective in NOISE_CALLS:
            ranks.say(f"noise: {collective} of {num_bytes} bytes, exact against exact")
            cells.append(cell(ranks, collective, num_bytes, [ranks.exact, ranks.again]))
    return {"cells": cells}


def sweep(ranks: Ranks) -> dict[str, Any]:
    """Exact, compressed and compress="auto" over sizes."""
    return {"cells": [of_sweep(ranks, collective, size) for collective in CALLS for size in ranks.scale.sizes]}


def of_sweep(ranks: Ranks, collective: str, num_bytes: int) -> dict[str, Any]:
    """One size of it, and what "auto" has decided: None where it has nothing to decide."""
    ranks.say(f"sweep: {collective} of {num_bytes} bytes, exact, compressed and auto")
    before = compressed_calls(ranks, collective)
    made = cell(ranks, collective, num_bytes, [ranks.exact, ranks.compressed, ranks.auto])
    made["compressed_calls"] = compressed_calls(ranks, collective) - before
    made["auto_compresses"] = None
    for decision in zcomm.stats(ranks.auto.group).decisions:
        least = decision.least_bytes
        if decision.collective == collective and least <= made["bytes"] < 2 * least:
            made["auto_compresses"] = decision.compressed
    ranks.release()
    return made


def compressed_calls(ranks: Ranks, collective: str) -> int:
    """So far, of the way that compresses always."""
    calls: int = getattr(zcomm.stats(ranks.compressed.group), collective).calls
    return calls
