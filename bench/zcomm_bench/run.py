"""Runs the benchmark of the collectives, and puts together what its ranks have measured.

`zcomm_bench.worker` is what every rank runs. Several backends run side by side in the same processes and take turns
call by call, so that a machine which gets slower makes all of them slower.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zcomm_bench.lab import gpus, network
from zcomm_bench.report_file import SCHEMA, machine
from zcomm_bench.spec import NO_LAB, REDUCTIONS, Spec, algbw, bus_factor

Update = Callable[[list[dict[str, Any]], str], object]


def run_benchmark(spec: Spec, on_update: Update = lambda records, progress: None) -> dict[str, Any]:
    """Run the benchmark and return what `save` writes.

    `on_update` gets the records so far and a line of progress whenever a size is done. Raises network.RankFailed.
    """
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    found = gpus.facts() if spec.device == "cuda" else {}
    shared = gpus.sharing(spec.num_ranks, found, spec.link) if found else ""
    note = ""
    for launch in range(spec.launches):

        def take(line: str, launch: int = launch) -> None:
            try:
                measured = json.loads(line)
            except ValueError:
                print(line, file=sys.stderr)
                return
            for row in measured:
                rows.setdefault((row["size"], row["backend"]), []).append(row)
            done = f"launch {launch + 1} of {spec.launches}, {measured[0]['size']} bytes"
            on_update([merge(spec, samples) for samples in rows.values()], done)

        note = launch_ranks(spec, ["collective", json.dumps(dataclasses.asdict(spec))], take) or note
    return {
        "schema": SCHEMA,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": {**machine(), **found},
        "note": "; ".join(text for text in (shared, note) if text),
        "config": dataclasses.asdict(spec),
        "results": [merge(spec, samples) for samples in rows.values()],
    }


def launch_ranks(spec: Spec, arguments: list[str], on_line: Callable[[str], object]) -> str:
    """Run the worker as every rank; returns what the network lab has to say."""
    # Without a lab all ranks share one host, whose own address is loopback; their nodes are virtual.
    nodes, rate = (f"1x{spec.num_ranks}", None) if spec.link == NO_LAB else (spec.nodes, spec.link)
    argv = [sys.executable, "-m", "zcomm_bench.worker", *arguments]
    # On GPUs plain loopback is just that: NCCL knows the machine by more than its network.
    isolate = spec.device == "cpu" or spec.link != NO_LAB
    return network.launch(argv, nodes=nodes, rate=rate, on_line=on_line, isolate=isolate).note


def measure_overhead(batch: int = 100) -> list[dict[str, Any]]:
    """Microseconds of processor time that the caller of an exact collective spends: gloo's, zcomm's, the difference.

    One element, in a group of one rank.
    """
    results: list[dict[str, Any]] = []
    spec = Spec("all_reduce", [4], link=NO_LAB, nodes="1x1")
    launch_ranks(spec, ["overhead", json.dumps({"batch": batch})], lambda line: results.extend(json.loads(line)))
    return results


def merge(spec: Spec, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of one size and backend out of those of its launches. Figures are medians over them, but for the
    fastest sample and the largest error."""

    def median(name: str) -> float | None:
        values = [sample[name] for sample in samples if sample[name] is not None]
        return statistics.median(values) if values else None

    first = samples[0]
    figures = {name: median(name) for name in FIGURES}
    figures["min_us"] = min(sample["min_us"] for sample in samples)
    errors = [sample["max_error"] for sample in samples if sample["max_error"] is not None]
    figures["max_error"] = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)
    seconds = (figures["median_us"] or 0.0) * 1e-6
    factor = bus_factor(spec.collective, spec.num_ranks)
    # A broadcast's last rank sends nothing, and bytes are a mean over ranks.
    sent = (spec.num_ranks - 1) / spec.num_ranks if spec.collective == "broadcast" else factor
    size, wire, link = first["size"], figures["wire_bytes"], figures["link_bytes"]
    rate = spec.link_rate
    return {
        "size": size,
        "count": first["count"],
        "type": spec.dtype,
        "redop": spec.op if spec.collective in REDUCTIONS else "none",
        "backend": first["backend"],
        "format": first["format"],
        "exact_reason": first["exact_reason"],
        **figures,
        "algbw": algbw(size, seconds),
        "busbw": algbw(size, seconds) * factor,
        "ratio": size * sent / wire if wire else None,
        "hops": _median_hops([sample["hops"] for sample in samples if sample["hops"]]),
        "link_busy": link / rate / seconds if link is not None and rate else None,
        "launch_medians_us": [sample["median_us"] for sample in samples],
    }


def _median_hops(samples: list[list[dict[str, float | None]]]) -> list[dict[str, float | None]] | None:
    if not samples:
        return None

    def median(hop: tuple[dict[str, float | None], ...], name: str) -> float | None:
        values = [value for sample in hop if (value := sample[name]) is not None]
        return statistics.median(values) if values else None

    return [{name: median(hop, name) for name in hop[0]} for hop in zip(*samples, strict=True)]


# What the ranks report for every size and backend; None where it is not known. Times and bytes are of one call.
FIGURES = {
    "min_us": "time of the fastest sample",
    "median_us": "time",
    "p90_us": "time that nine of ten samples keep below",
    "speedup": "median over the turns of (time of the first backend / time)",
    "wire_bytes": "payload that a rank sends on average, by the backend's own account",
    "link_bytes": "bytes that leave a node, by the counter of its interface, headers included",
    "codec_us": "time spent encoding and decoding; on a GPU, of the same passes with nothing beside them",
    "transfer_us": "time spent waiting for transfers; None on a GPU, where the host does not wait",
    "max_error": "largest difference from the float64 result, in units of that result's root mean square",
    "mean_error": "mean absolute difference, in the same units",
    "calls": "calls that make a sample",
}
