"""What `make gpu` has measured of a GPU, in the place of what cluster.py assumes.

The results are files beside the sources of the workshop. Where they are not there, or have nothing of a GPU, the
assumptions stay, and their sources say so.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zcomm_bench.planner.cluster import Cluster, Compute, Figure, Launch

BENCH = Path(__file__).parents[2]
RESULTS = BENCH / "results"
MICRO = 1e-6

Row = Mapping[str, Any]


def _reader() -> Any:
    """bench/results_file.py, which is no part of this distribution; None where it is not there."""
    path = BENCH / "results_file.py"
    if not path.exists():
        return None
    name = "zcomm_bench_results_file"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read(subject: str, gpu: str) -> tuple[Sequence[Row], str]:
    """The rows of a subject, and their source; no rows if it was not measured on this GPU."""
    reader = _reader()
    kinds = reader.load(subject, RESULTS) if reader is not None else {}
    for kind, measurements in kinds.items():
        one = measurements.get(subject)  # one that was finished
        if one is not None and (kind == gpu or kind.startswith(f"{gpu}-")):
            return one.records, f"measured on {one.machine}, {one.facts['date']}"
    return [], "assumed"


def _launch(rows: Sequence[Row], source: str, assumed: Launch) -> Launch:
    """Groups by a straight line through the times of 2 to 1022 messages."""
    times = {row["what"]: row["ready_us"] * MICRO for row in rows}
    groups = [(row["messages"], row["ready_us"] * MICRO) for row in rows if row["what"] == "non-blocking"]
    line = statistics.linear_regression(*zip(*groups, strict=True))
    return replace(
        assumed,
        kernel=times["kernel"],
        event=times["event"],
        group=max(line.intercept, 0.0),
        message=max(line.slope, 0.0),
        source=source,
    )


def _codec_share(rows: Sequence[Row], compute: Compute) -> float:
    """Of memory bandwidth: all bytes over all seconds."""
    rate = sum(row["moved_bytes"] for row in rows) / sum(row["median_us"] * MICRO for row in rows)
    return float(rate / compute.memory_bandwidth.value)


def _taken_share(rows: Sequence[Row]) -> float:
    """The time by which products took longer, over the codec's own. Streams of zcomm have high priority; rows without a
    format are copies."""
    codec = [row for row in rows if row["format"] and row["priority"] == "high"]
    slowdown = sum(row["slowed_ms"] - row["products_ms"] for row in codec)
    return float(max(slowdown, 0.0) / sum(row["alone_ms"] for row in codec))


def applied(cluster: Cluster, gpu: str) -> Cluster:
    """`cluster` with what was measured on `gpu`, a name of PROCESSORS, in the place of what was assumed."""
    compute, launch = cluster.compute, cluster.launch
    rows, source = read("nccl_host_cost", gpu)
    if rows:
        launch = _launch(rows, source, launch)
    rows, source = read("real_shapes", gpu)
    if rows:
        compute = replace(compute, codec_share=Figure(_codec_share(rows, compute), source))
    rows, source = read("beside_gemm", gpu)
    if rows:
        compute = replace(compute, taken_share=Figure(_taken_share(rows), source))
    return replace(cluster, compute=compute, launch=launch)
