"""Seconds of a training step for each choice of formats, with a band.

step = (1 - overlap) (compute + calls) + overlap max(compute + taken, calls)

`calls` are the seconds of all calls by themselves. Calls that hide behind computing take time from it: their codec's
kernels need memory and processors. `taken` is a share of the codec's seconds. On a GPU hidden calls may take longer, as
each kernel, and each group of NCCL, waits until a matrix product ends: that is an edge of the band.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce as fold

from zcomm import _core
from zcomm_bench.planner import collectives
from zcomm_bench.planner.cluster import Cluster, Figure
from zcomm_bench.planner.collectives import Cost
from zcomm_bench.planner.workload import DTYPE_BYTES, STATE_BYTES, Unit, Workload

OVERLAP = Figure(0.5)
# Of a matrix product, until a kernel beside it begins: bench/results/beside_gemm-*.jsonl.
WAIT_SHARE = 0.55
PRODUCTS = 5  # of a layer's forward pass; products of one input count as one


@dataclass(frozen=True)
class Option:
    """A choice that a user can make, and how to write it. `layout`: "all" shards over all ranks; "node" does, and keeps
    weights in the node from the forward to the backward pass; "hsdp" shards in each node, and reduces between nodes;
    "ddp" shards nothing."""

    name: str
    all_gather: str = "exact"
    reduce_scatter: str = "exact"
    secondary: bool = False
    wire: str = "compressed"  # of secondary shards
    layout: str = "all"
    all_reduce: str = "exact"  # of "ddp", and between the nodes of "hsdp"

    @property
    def is_exact(self) -> bool:
        return {self.all_gather, self.reduce_scatter, self.all_reduce} == {"exact"}

    @property
    def is_lossless(self) -> bool:
        """Weights are exact, by lossless differences."""
        return self.secondary and self.wire == "lossless"

    @property
    def paste(self) -> str:
        if self.layout == "ddp":  # the option would compress all all-reduces, of metrics, too
            hook = f'\nmodel.register_comm_hook(zcomm.ddp.CompressState("{self.all_reduce}"), zcomm.ddp.compress_hook)'
            return 'dist.init_process_group("zcomm")' + hook * (not self.is_exact)
        arguments = f'all_gather="{self.all_gather}", reduce_scatter="{self.reduce_scatter}"'
        if self.layout == "hsdp":
            arguments += f', all_reduce="{self.all_reduce}"'
        lines = [f'dist.init_process_group("zcomm", pg_options=zcomm.Options({arguments}))']
        if self.layout == "hsdp":
            lines.append('# mesh of fully_shard: dist.init_device_mesh("cuda", (nodes, GPUs of a node)), which is HSDP')
        if self.secondary:
            weights = ', weights="lossless"' if self.is_lossless else ""
            lines.append(f"zcomm.fsdp.compress(model{weights})")
        return "\n".join(lines)


OPTIONS = (
    Option("exact"),
    Option("weights", "int8:256"),
    Option("weights and gradients", "int8:256", "int8:128/int4:128"),
    Option("with secondary shards", "int8:256", "int8:128/int4:128", secondary=True),
    Option("exact weights by differences", "int8:256", "int8:128/int4:128", secondary=True, wire="lossless"),
)

# Layouts that users of several nodes have without compression, and those whose all-reduces may be compressed.
_DDP = (Option("exact, DDP", layout="ddp"), Option("DDP, gradients", layout="ddp", all_reduce="int8:128/int4:128"))
_OF_NODES = (
    Option("exact, reshard_after_forward=GPUs of a node", layout="node"),
    Option("exact, HSDP", layout="hsdp"),
    Option("HSDP, gradients between nodes", layout="hsdp", all_reduce="int8:128/int4:128"),
)


def options_of(cluster: Cluster) -> tuple[Option, ...]:
    """Return all choices that a cluster has."""
    return OPTIONS + _DDP + (_OF_NODES if cluster.nodes > 1 and cluster.ranks_per_node > 1 else ())


@dataclass(frozen=True)
class Prediction:
    """Of one option: costs of a whole step by collective, seconds, bytes of memory of a rank, and the step's band."""

    option: Option
    costs: dict[str, Cost]
    compute_seconds: float
    step_seconds: float
    memory_bytes: float
    fits: bool
    low: float
    high: float

    @property
    def exposed(self) -> float:
        """The share of the step that is not compute."""
        return max(0.0, 1 - self.compute_seconds / self.step_seconds)

    @property
    def inter_bytes(self) -> float:
        """Bytes that a node sends to the others in a step."""
        return sum(cost.inter_bytes for cost in self.costs.values())


def costs_of(option: Option, workload: Workload, cluster: Cluster, *, hidden: bool = False) -> dict[str, Cost]:
    """The collectives of one step, by themselves or ``hidden`` behind its computing."""
    totals: dict[str, Cost] = {}
    for unit in workload.units:
        flops = workload.flops_per_token * workload.tokens * unit.num_elements / workload.num_parameters
        wait = WAIT_SHARE * flops / PRODUCTS / cluster.compute.flops if hidden and cluster.launch.is_queued else 0.0
        for name, cost in _costs(option, workload, replace(cluster, product_wait=wait), unit):
            totals[name] = totals.get(name, Cost()) + cost
    return totals


def _costs(option: Option, workload: Workload, cluster: Cluster, unit: Unit) -> Iterator[tuple[str, Cost]]:
    gathers, reductions = workload.gathers(unit), workload.reductions * unit.count
    size, dtype = unit.num_elements, workload.gather_dtype
    if option.layout in ("hsdp", "ddp"):
        yield from _costs_of_replicas(option, workload, cluster, unit)
        return
    if option.layout == "node":
        yield "all_gather", collectives.exact(size, dtype, cluster) * unit.count
        yield "all_gather in nodes", collectives.exact(size, dtype, cluster.one_node) * (gathers - unit.count)
    elif option.all_gather == "exact":
        yield "all_gather", collectives.exact(size, dtype, cluster) * gathers
    elif option.is_lossless:
        first = collectives.gather_lossless(size, dtype, workload.bits_per_weight.value, cluster)
        yield "all_gather", first * unit.count
        repeated = collectives.gather_unchanged(size, dtype, cluster)
        yield "gather_secondary", repeated * (gathers - unit.count)
    elif option.secondary and cluster.nodes > 1:
        yield "all_gather", collectives.gather(size, dtype, option.all_gather, cluster) * unit.count
        repeated = collectives.secondary_gather(size, dtype, option.all_gather, cluster)
        yield "gather_secondary", repeated * (gathers - unit.count)
    else:
        yield "all_gather", collectives.gather(size, dtype, option.all_gather, cluster) * gathers
    dtype = workload.reduce_dtype
    if option.reduce_scatter == "exact":
        one = collectives.exact(size, dtype, cluster, cluster.exact_reduce_factor)
    else:
        one = collectives.reduce(size, dtype, option.reduce_scatter, cluster)
    yield "reduce_scatter", one * reductions


def _costs_of_replicas(option: Option, workload: Workload, cluster: Cluster, unit: Unit) -> Iterator[tuple[str, Cost]]:
    """DDP reduces whole gradients over all ranks. In HSDP every GPU of a node reduces its shard with its like on the
    other nodes, and they share the node's link."""
    size, dtype, reductions = unit.num_elements, workload.reduce_dtype, workload.reductions * unit.count
    reduced, num_alike, among = size, 1, cluster
    if option.layout == "hsdp":
        node = cluster.one_node
        yield "all_gather", collectives.exact(size, workload.gather_dtype, node) * workload.gathers(unit)
        yield "reduce_scatter", collectives.exact(size, dtype, node) * reductions
        reduced, num_alike, among = -(-size // cluster.ranks_per_node), cluster.ranks_per_node, cluster.of_one_rank
    if option.all_reduce == "exact":
        one = collectives.exact(reduced, dtype, among) * 2
    else:
        one = collectives.all_reduce(reduced, dtype, option.all_reduce, among)
    yield "all_reduce", replace(one, inter_bytes=one.inter_bytes * num_alike) * reductions


def combine(
    compute: float, cost: Cost, overlap: float, taken_share: float = 1.0, hidden_seconds: float | None = None
) -> float:
    """Seconds of a step: what hides behind what. ``hidden_seconds``: of calls beside computing; default: as alone."""
    hidden = max(compute + taken_share * cost.codec, cost.seconds if hidden_seconds is None else hidden_seconds)
    return overlap * hidden + (1 - overlap) * (compute + cost.seconds)


def memory_of(option: Option, workload: Workload, cluster: Cluster) -> float:
    """Bytes of a rank's sharded states, accumulated gradients and secondary shards, and of two gathered units.
    Activations are not counted."""
    parameters = workload.num_parameters
    largest = max(unit.num_elements for unit in workload.units)
    gathered = 2 * largest * (DTYPE_BYTES[workload.gather_dtype] + DTYPE_BYTES[workload.reduce_dtype])
    if option.layout == "ddp":
        return STATE_BYTES * parameters + workload.accumulated_bytes
    holders = cluster.ranks_per_node if option.layout == "hsdp" else cluster.ranks
    total = STATE_BYTES * parameters / holders + workload.accumulated_bytes + gathered
    if option.layout == "node":
        total += parameters * DTYPE_BYTES[workload.gather_dtype] / cluster.ranks_per_node
    if option.is_lossless:
        kept = (
            collectives.secondary_bytes(unit.num_elements, workload.gather_dtype, cluster) for unit in workload.units
        )
        total += sum(num_bytes * unit.count for num_bytes, unit in zip(kept, workload.units, strict=True))
    elif option.secondary:
        held = -(-parameters // cluster.ranks_per_node)
        total += _core.WireLayout(option.all_gather, workload.gather_dtype, held).num_bytes
    return total


def _seconds(option: Option, workload: Workload, cluster: Cluster, overlap: float, *, waits: bool = False) -> float:
    def total(hidden: bool) -> Cost:
        return fold(Cost.__add__, costs_of(option, workload, cluster, hidden=hidden).values(), Cost())

    compute, hidden_seconds = cluster.compute, total(hidden=True).seconds if waits else None
    return combine(workload.flops / compute.flops, total(False), overlap, compute.taken_share.value, hidden_seconds)


def _variants(workload: Workload, cluster: Cluster, known: Figure) -> Iterator[tuple[Workload, Cluster, float]]:
    """The same within what is not known: rates of links and compute 10 % off, and, where they were not measured or
    given, no or full overlap, hops of 5 to 15 us, and half or twice the bits of differences."""
    overlap = known.value
    for factor in (0.9, 1.1):
        inter = replace(cluster.inter, bandwidth=_scaled(cluster.inter.bandwidth, factor))
        yield workload, replace(cluster, inter=inter), overlap
        intra = replace(cluster.intra, bandwidth=_scaled(cluster.intra.bandwidth, factor))
        yield workload, replace(cluster, intra=intra), overlap
        compute = replace(cluster.compute, efficiency=_scaled(cluster.compute.efficiency, factor))
        yield workload, replace(cluster, compute=compute), overlap
    if cluster.inter.bulk_hop.source != "measured":
        for hop in (5e-6, 15e-6):
            yield workload, replace(cluster, inter=replace(cluster.inter, bulk_hop=Figure(hop))), overlap
    if workload.bits_per_weight.source != "given":
        for factor in (0.5, 2.0):
            yield replace(workload, bits_per_weight=_scaled(workload.bits_per_weight, factor)), cluster, overlap
    if known.source == "assumed":
        for edge in (0.0, 1.0):
            yield workload, cluster, edge


def _scaled(figure: Figure, factor: float) -> Figure:
    return Figure(figure.value * factor, figure.source)


def predict(option: Option, workload: Workload, cluster: Cluster, overlap: Figure = OVERLAP) -> Prediction:
    """The step with `option`. The band reruns the model at the edges of what is not known."""
    seconds = _seconds(option, workload, cluster, overlap.value)
    band = [_seconds(option, *variant) for variant in _variants(workload, cluster, overlap)]
    band.append(_seconds(option, workload, cluster, overlap.value, waits=True))
    memory = memory_of(option, workload, cluster)
    return Prediction(
        option,
        costs_of(option, workload, cluster),
        workload.flops / cluster.compute.flops,
        seconds,
        memory,
        memory <= cluster.compute.memory.value,
        min(seconds, *band),
        max(seconds, *band),
    )


def calibrate_step(workload: Workload, cluster: Cluster, exact_seconds: float, overlap: Figure = OVERLAP) -> Cluster:
    """`cluster` with the share of peak that explains a measured exact step of `exact_seconds`.

    Raises ValueError where no share between 1 % and 100 % does: then the links, not the compute, are misjudged."""

    def with_share(share: float) -> Cluster:
        return replace(cluster, compute=replace(cluster.compute, efficiency=Figure(share, "measured")))

    low, high = 0.01, 1.0
    slowest, fastest = (_seconds(OPTIONS[0], workload, with_share(share), overlap.value) for share in (low, high))
    if not fastest <= exact_seconds <= slowest:
        raise ValueError(
            f"step_seconds: expected between {fastest:.3g} and {slowest:.3g} with these links, got {exact_seconds:.3g}"
        )
    for _ in range(60):
        middle = (low + high) / 2
        if _seconds(OPTIONS[0], workload, with_share(middle), overlap.value) > exact_seconds:
            low = middle
        else:
            high = middle
    return with_share(high)
