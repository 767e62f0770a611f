"""Seconds and bytes of one collective: the exact ring of NCCL and Gloo, and zcomm's one or two hops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zcomm import _core
from zcomm_bench.planner.cluster import Cluster
from zcomm_bench.planner.workload import DTYPE_BYTES

EXACT_START = 20e-6  # of NCCL's own collectives, in seconds
KERNELS_OF_LOSSLESS = 3  # of a chunk: two passes of the encoder, one of the decoder
SMALL_MESSAGE_SHARE = 0.5  # of a link's rate, with NCCL's protocols for small messages


@dataclass(frozen=True)
class Cost:
    """Of one collective: seconds of the call by itself; seconds that its bytes need on the links, and that the codec
    needs, parts of which overlap; bytes that a rank sends inside its node, and bytes that a node sends to the others.
    """

    seconds: float = 0.0
    wire: float = 0.0
    codec: float = 0.0
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, count: float) -> Cost:
        return Cost(*(getattr(self, name) * count for name in self.__dataclass_fields__))


def shard(num_elements: int, cluster: Cluster) -> int:
    """Elements of a rank's shard, padded as FSDP2 pads it."""
    return -(-num_elements // cluster.ranks)


def exact(num_elements: int, dtype: str, cluster: Cluster, factor: float = 1.0) -> Cost:
    """An all-gather or reduce-scatter by rings over all ranks: every link carries (ranks - 1) / ranks of the whole.
    NCCL has a protocol for small messages, of short steps and half the rate, and takes the faster way."""
    ranks, nodes = cluster.ranks, cluster.nodes
    sent = shard(num_elements, cluster) * DTYPE_BYTES[dtype] * (ranks - 1) * factor
    intra_bytes, inter_bytes = (sent if ranks > nodes else 0.0), (sent if nodes > 1 else 0.0)
    wire = max(intra_bytes / cluster.intra.rate, inter_bytes / cluster.inter.rate)
    outer = cluster.inter if nodes > 1 else cluster.intra
    large = (ranks - 1) * outer.bulk_hop.value + wire
    small = (ranks - nodes) * cluster.intra.hop.value + wire / SMALL_MESSAGE_SHARE
    if nodes > 1:
        small += (nodes - 1) * cluster.inter.hop.value
    start = EXACT_START + cluster.product_wait if cluster.launch.is_queued else 0.0
    return Cost(start + min(large, small), wire, 0.0, intra_bytes, inter_bytes)


def timed(trace: Sequence[_core.TraceStep], cluster: Cluster, peers: int | None = None) -> Cost:
    """A compressed call, by the steps of a rank; all ranks do the same at the same time. `peers`: ranks of other nodes
    that a rank sends to; None: one of each node.

    There are clocks of the thread, of the processor, and of each link. On a GPU the thread queues work: a kernel starts
    when it is queued and the one before it has ended, and NCCL runs one group at a time. Beside matrix products a group
    waits for the end of one, and so do kernels, together if they run side by side.
    """
    launch, kind = cluster.launch, _core.TraceStep.Kind
    rate_between = cluster.rate_between(peers or cluster.nodes - 1)
    thread = processor = intra_free = inter_free = wire = codec = 0.0
    intra_bytes = inter_bytes = 0
    ends: list[float] = []
    has_waited = False  # for a product, with kernels that run beside the next one
    for step in trace:
        if step.kind == kind.CODEC:
            seconds = step.number * launch.start + step.num_bytes / cluster.compute.codec_rate
            thread += step.number * launch.kernel
            codec += seconds
            processor = max(processor, thread) + seconds
            if not (has_waited and step.is_beside):
                processor += cluster.product_wait
            has_waited = step.is_beside
        elif step.kind == kind.WAIT:
            thread += launch.event
            has_waited = has_waited and processor >= ends[step.number]
            processor = max(processor, ends[step.number])
        elif step.number == 0:
            ends.append(0.0)
        else:
            thread += 2 * launch.event + launch.group + step.number * launch.message
            if step.sent.intra_node and cluster.nodes > 1:
                thread += 2 * launch.event + launch.kernel  # the node's stream and its kernel
            queued = max(thread, processor) + cluster.product_wait
            has_waited = False
            intra, inter = step.sent.intra_node, step.sent.inter_node * cluster.ranks_per_node
            start = (cluster.inter if inter else cluster.intra).start_seconds(step.number)
            start += step.num_ring_steps * cluster.intra.hop.value
            parts = (intra / cluster.rate_inside if intra else 0.0), (inter / rate_between if inter else 0.0)
            if launch.is_queued:
                intra_free = inter_free = max(queued, intra_free) + start + max(parts)
            else:
                intra_free, inter_free = (
                    max(queued, free) + start + part if part else free
                    for free, part in zip((intra_free, inter_free), parts, strict=True)
                )
            ends.append(max(intra_free if parts[0] else queued, inter_free if parts[1] else queued))
            wire += max(parts)
            intra_bytes += intra
            inter_bytes += inter
        if not launch.is_queued:
            thread = processor
    return Cost(max(thread, processor), wire, codec, intra_bytes, inter_bytes)


Timing = Callable[[Sequence[_core.TraceStep], Cluster], Cost]


@lru_cache
def _topology(nodes: int, ranks_per_node: int) -> _core.Topology:
    return _core.Topology([node for node in range(nodes) for _ in range(ranks_per_node)])


Shape = tuple[int, str, int, int, int]  # elements of a shard, dtype, nodes, ranks per node, bytes of a chunk


def _shape(num_elements: int, dtype: str, cluster: Cluster) -> Shape:
    length = shard(num_elements, cluster)
    return length, dtype, cluster.nodes, cluster.ranks_per_node, cluster.bytes_of_chunk


@lru_cache
def _gather_plan(shape: Shape, format: str) -> _core.GatherPlan:
    length, dtype, nodes, ranks_per_node, chunk_bytes = shape
    lengths = [length] * (nodes * ranks_per_node)
    segments = [(length, format)]
    topology = _topology(nodes, ranks_per_node)
    return _core.GatherPlan(topology, 0, lengths, dtype, segments, chunk_bytes=chunk_bytes)


@lru_cache
def _lossless_plan(shape: Shape) -> _core.LosslessPlan:
    length, dtype, nodes, ranks_per_node, chunk_bytes = shape
    lengths = [length] * (nodes * ranks_per_node)
    return _core.LosslessPlan(_topology(nodes, ranks_per_node), 0, lengths, dtype, chunk_bytes=chunk_bytes)


@lru_cache
def _reduce_plan(shape: Shape, formats: str) -> _core.ReducePlan:
    length, dtype, nodes, ranks_per_node, chunk_bytes = shape
    lengths = [length] * (nodes * ranks_per_node)
    segments = [(length, formats)]
    topology = _topology(nodes, ranks_per_node)
    return _core.ReducePlan(topology, 0, lengths, dtype, segments, chunk_bytes=chunk_bytes)


@lru_cache
def _gather_trace(shape: Shape, format: str, grouped: bool, again: bool) -> Sequence[_core.TraceStep]:
    return _gather_plan(shape, format).trace(grouped, again)


@lru_cache
def _reduce_trace(shape: Shape, formats: str, grouped: bool) -> Sequence[_core.TraceStep]:
    return _reduce_plan(shape, formats).trace(grouped)


def bytes_by_hop(
    collective: str, num_elements: int, dtype: str, formats: str, cluster: Cluster
) -> Sequence[_core.LinkBytes]:
    """Bytes that rank 0 sends in each hop of a compressed call. `num_elements`: of the whole tensor."""
    if collective == "all_reduce":
        topology = _topology(cluster.nodes, cluster.ranks_per_node)
        return _core.AllReducePlan(topology, 0, num_elements, dtype, formats).bytes_by_hop
    make = _gather_plan if collective == "all_gather" else _reduce_plan
    return make(_shape(num_elements, dtype, cluster), formats).bytes_by_hop


def gather(num_elements: int, dtype: str, format: str, cluster: Cluster, time: Timing = timed) -> Cost:
    """zcomm's all-gather."""
    shape = _shape(num_elements, dtype, cluster)
    return time(_gather_trace(shape, format, cluster.launch.is_queued, again=False), cluster)


def late_gather(num_elements: int, dtype: str, format: str, cluster: Cluster) -> Cost:
    """FSDP2's gather on a GPU, which leaves its wires: they are decoded where FSDP2 would copy."""
    lengths = [shard(num_elements, cluster)] * cluster.ranks
    plan = _core.GatherPlan.in_one_chunk(_topology(cluster.nodes, cluster.ranks_per_node), lengths, dtype, format)
    return timed(plan.trace(cluster.launch.is_queued), cluster)


def secondary_gather(num_elements: int, dtype: str, format: str, cluster: Cluster) -> Cost:
    """The same values from the node's secondary shards: the hop inside the node alone."""
    shape = _shape(num_elements, dtype, cluster)
    return timed(_gather_trace(shape, format, cluster.launch.is_queued, again=True), cluster)


def reduce(num_elements: int, dtype: str, formats: str, cluster: Cluster, time: Timing = timed) -> Cost:
    """zcomm's reduce-scatter."""
    shape = _shape(num_elements, dtype, cluster)
    return time(_reduce_trace(shape, formats, cluster.launch.is_queued), cluster)


def all_to_all(num_elements: int, dtype: str, formats: str, cluster: Cluster) -> Cost:
    """zcomm's all-to-all of equal parts. `num_elements`: of one rank's input."""
    topology, chunk_bytes = _topology(cluster.nodes, cluster.ranks_per_node), cluster.bytes_of_chunk
    parts = [shard(num_elements, cluster)] * cluster.ranks
    plan = _core.ExchangePlan(topology, 0, parts, parts, dtype, formats, chunk_bytes=chunk_bytes)
    return timed(plan.trace(cluster.launch.is_queued), cluster, cluster.ranks - cluster.ranks_per_node)


def all_reduce(num_elements: int, dtype: str, formats: str, cluster: Cluster, time: Timing = timed) -> Cost:
    """zcomm's all-reduce."""
    topology, chunk_bytes = _topology(cluster.nodes, cluster.ranks_per_node), cluster.bytes_of_chunk
    plan = _core.AllReducePlan(topology, 0, num_elements, dtype, formats, chunk_bytes=chunk_bytes)
    return time(plan.trace(cluster.launch.is_queued), cluster)


def lossless_bytes(encoded: float, decoded: float, bits: float) -> float:
    """Bytes that the codec of lossless differences reads and writes. `encoded`, `decoded`: 16-bit values; `bits`: of a
    difference. An encoder reads value and base twice, to measure and to write, and writes the base."""
    return encoded * (10 + bits / 8) + decoded * (4 + bits / 8)


def _in_chunks(plan: _core.LosslessPlan, sent: _core.LinkBytes, num_hops: int, codec: float, cluster: Cluster) -> Cost:
    """Seconds of a lossless gather: groups of a chunk start one after the other, links and codec overlap."""
    intra_bytes, inter_bytes = sent.intra_node, sent.inter_node * cluster.ranks_per_node
    between = inter_bytes / cluster.rate_between(cluster.nodes - 1) if inter_bytes else 0.0
    wire = max(intra_bytes / cluster.rate_inside if intra_bytes else 0.0, between)
    link = cluster.inter if inter_bytes else cluster.intra
    num_groups = plan.num_chunks + num_hops - 1 if intra_bytes + inter_bytes else 0
    start = cluster.launch.group + link.start_seconds(2 * (cluster.nodes + cluster.ranks_per_node - 2))
    alone = num_groups * start + max(wire, codec) + min(wire, codec) / max(plan.num_chunks, 1)
    alone += (num_groups + KERNELS_OF_LOSSLESS * plan.num_chunks) * cluster.product_wait
    return Cost(alone, wire, codec, intra_bytes, inter_bytes)


def gather_lossless(num_elements: int, dtype: str, bits: float, cluster: Cluster) -> Cost:
    """zcomm's all-gather by lossless differences of `bits` per value; inside the nodes values go as they are. On
    GPUs headers go ahead, which is one more start; on CPUs each goes with its difference."""
    shape = _shape(num_elements, dtype, cluster)
    plan = _lossless_plan(shape)
    copied = 2 * plan.secondary_bytes  # from what is kept to the output: read and written
    num_others = cluster.nodes - 1
    coded = lossless_bytes(shape[0] * min(num_others, 1), shape[0] * num_others, bits)
    codec = copied / cluster.compute.codec_rate + coded / cluster.compute.lossless_rate
    cost = _in_chunks(plan, plan.bytes(round(shape[0] * bits / 8)), 2, codec, cluster)
    if cluster.nodes > 1 and cluster.launch.is_queued:
        cost += Cost(seconds=cluster.inter.start_seconds(2 * (cluster.nodes - 1)))
    return cost


def gather_unchanged(num_elements: int, dtype: str, cluster: Cluster) -> Cost:
    """The same values once more, inside the node: what is kept is compared with its hash, copied and sent."""
    plan = _lossless_plan(_shape(num_elements, dtype, cluster))
    return _in_chunks(
        plan, plan.bytes_from_secondary, 1, 3 * plan.secondary_bytes / cluster.compute.codec_rate, cluster
    )


def secondary_bytes(num_elements: int, dtype: str, cluster: Cluster) -> int:
    """What a rank keeps of a gather by differences."""
    return _lossless_plan(_shape(num_elements, dtype, cluster)).largest_secondary_bytes
