"""What the planner predicts of the sweep and of the training steps, from what the sanity stage has measured: exact
calls, the codec by itself, computing by itself, and exact steps. No compressed call was made before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from statistics import median
from typing import Any

from zcomm_bench.planner import collectives, step
from zcomm_bench.planner.cluster import Cluster, Compute, Figure, calibrated, inter_link, intra_link
from zcomm_bench.planner.collectives import Cost
from zcomm_bench.planner.workload import DTYPE_BYTES, Workload, of_sizes
from zcomm_bench.prove.scale import BENCH_DTYPES, CALLS, FORMATS
from zcomm_bench.spec import shard_elements

EXACT, COMPRESSED = step.OPTIONS[0], step.OPTIONS[2]
RESTS_ON = "exact calls, the codec, computing and exact steps of the sanity stage"


def cluster_of(rates: Mapping[str, Any], compute: Compute | None = None) -> Cluster:
    """The cluster that `measure.rates` has found. What it cannot have, such as links inside nodes of one rank, is
    assumed and not used."""
    nothing = Figure(1.0)
    made = Cluster(
        rates["nodes"],
        rates["ranks_per_node"],
        intra_link("nvlink4"),
        inter_link("100gbit"),
        compute or Compute(nothing, nothing, nothing, nothing),
    )
    return calibrated(made, rates)


def exact_cost(collective: str, num_elements: int, dtype: str, cluster: Cluster) -> Cost:
    """NCCL and Gloo reduce all over a ring twice; Gloo's reduce-scatter is an all-reduce."""
    if collective == "all_reduce":
        return collectives.exact(num_elements, dtype, cluster, 2.0)
    factor = cluster.exact_reduce_factor if collective == "reduce_scatter" else 1.0
    return collectives.exact(num_elements, dtype, cluster, factor)


def compressed_cost(collective: str, num_elements: int, dtype: str, cluster: Cluster) -> Cost:
    make = {
        "all_gather": collectives.gather,
        "reduce_scatter": collectives.reduce,
        "all_reduce": collectives.all_reduce,
    }
    return make[collective](num_elements, dtype, FORMATS[collective], cluster)


def exact_bytes(collective: str, num_bytes: int, nodes: int, ranks: int, backend: str) -> float:
    """The fewest bytes that a node sends to the others in an exact call, or a rank in one node. Calls are rings, and
    Gloo's reduce-scatter is an all-reduce. NCCL may reduce all over trees of nodes, or in NVLink's switches. Switches
    between nodes that sum (SHARP) are not counted on."""
    if collective == "all_reduce" and backend == "nccl":
        return num_bytes * (2 * (nodes - 1) / nodes if nodes > 1 else (ranks - 1) / ranks)
    twice = collective == "all_reduce" or (collective == "reduce_scatter" and backend == "gloo")
    return num_bytes * (ranks - 1) / ranks * (2 if twice else 1)


def other_seconds(cost: Cost, cluster: Cluster) -> float:
    """What a compressed call waits for beside the bytes on the link that counts, one after the other: the codec, links
    inside nodes, and the start of each hop."""
    if cluster.nodes == 1:
        return cost.codec + cluster.intra.exchange.value
    inside = cost.intra_bytes / cluster.intra.rate + cluster.intra.exchange.value if cluster.ranks_per_node > 1 else 0.0
    return cost.codec + inside + cluster.inter.exchange.value


def of_call(collective: str, num_bytes: int, cluster: Cluster, backend: str) -> dict[str, Any]:
    """A row for the sweep: costs as the planner has them, in seconds and bytes, and bytes on the link that counts."""
    dtype = CALLS[collective]
    elements = num_bytes // DTYPE_BYTES[dtype]
    compressed = compressed_cost(collective, elements, dtype, cluster)
    return {
        "collective": collective,
        "bytes": num_bytes,
        "exact": asdict(exact_cost(collective, elements, dtype, cluster)),
        "compressed": asdict(compressed),
        "exact_link_bytes": exact_bytes(collective, num_bytes, cluster.nodes, cluster.ranks, backend),
        "compressed_link_bytes": compressed.inter_bytes if cluster.nodes > 1 else compressed.intra_bytes,
        "other_seconds": other_seconds(compressed, cluster),
    }


def of_step(measured: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """A row for one model. The overlap is the one that explains the exact steps; the optimizer has a share of the
    weights that it had alone."""
    workload = Workload(of_sizes(measured["units"]), flops_per_token=1.0, tokens=1, reduce_dtype="float32")
    compute = median(measured["compute"]) + median(measured["update"]) / cluster.ranks
    rate = Compute(Figure(workload.flops / compute, "measured"), Figure(1.0), Figure(1.0), Figure(1.0))
    rate = replace(rate, memory_bandwidth=cluster.compute.memory_bandwidth, codec_share=cluster.compute.codec_share)
    cluster = replace(cluster, compute=rate)
    calls = total(step.costs_of(EXACT, workload, cluster)).seconds
    exposed = median(measured["exact_steps"]) - max(compute, calls)
    overlap = min(1.0, max(0.0, 1 - exposed / min(compute, calls)))
    predicted = step.predict(COMPRESSED, workload, cluster, Figure(overlap, "measured"))
    return {
        "compute": compute,
        "exact_calls": calls,
        "overlap": overlap,
        "exact": median(measured["exact_steps"]),
        "compressed": predicted.step_seconds,
        "compressed_calls": total(predicted.costs).seconds,
    }


def reached(cell: Mapping[str, Any], rates: Mapping[str, Any], seconds: float) -> float:
    """Bytes per second on the link that counts, at least, of an exact call that took as long."""
    ranks = rates["nodes"] * rates["ranks_per_node"]
    return exact_bytes(cell["collective"], cell["bytes"], rates["nodes"], ranks, rates["backend"]) / seconds


def with_fastest_link(sanity: Mapping[str, Any]) -> dict[str, Any]:
    """The rates, where the link has that of the fastest exact collective, all-to-alls included: it carries as much."""
    rates, name = sanity["rates"], "inter" if sanity["rates"]["nodes"] > 1 else "intra"
    found = [reached(cell, rates, median(cell["samples"]["exact"])) for cell in sanity["cells"]]
    rate = max(rates[name]["bytes_per_second"], *found)
    return {**rates, name: {**rates[name], "bytes_per_second": rate}}


def whole_bytes(collective: str, size: int, ranks: int) -> int:
    """`size` as the benchmark rounds it."""
    dtype = CALLS[collective]
    return shard_elements(size, BENCH_DTYPES[dtype], ranks) * ranks * DTYPE_BYTES[dtype]


def total(costs: Mapping[str, Cost]) -> Cost:
    return reduce(Cost.__add__, costs.values(), Cost())


def make(sanity: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """Predictions for each collective in these sizes, rounded to whole shards, and for each model of the steps."""
    cluster = cluster_of(with_fastest_link(sanity))
    cells = [(name, whole_bytes(name, size, cluster.ranks)) for name in CALLS for size in sizes]
    link = cluster.inter if cluster.nodes > 1 else cluster.intra
    return {
        "rests_on": RESTS_ON,
        "link_bytes_per_second": link.rate,
        "link_is": "of a node to the others" if cluster.nodes > 1 else "of a rank inside its node",
        "calls": [of_call(name, num_bytes, cluster, sanity["rates"]["backend"]) for name, num_bytes in cells],
        "steps": [of_step(measured, cluster) for measured in sanity["steps"]],
    }
