"""Seconds and bytes of one collective: the exact ring of NCCL and Gloo, and zcomm's one or two hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zcomm import _core
from zcomm_bench.planner.cluster import Cluster
from zcomm_bench.planner.workload import DTYPE_BYTES


@dataclass(frozen=True)
class Cost:
    """Of one collective: seconds that its bytes need on the links, seconds of latency, and seconds of the codec; bytes
    that a rank sends inside its node, and bytes that a node sends to the others."""

    wire: float = 0.0
    latency: float = 0.0
    codec: float = 0.0
    intra_bytes: float = 0.0
    inter_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, count: float) -> Cost:
        return Cost(*(getattr(self, name) * count for name in self.__dataclass_fields__))

    @property
    def seconds(self) -> float:
        """Of the call by itself."""
        return self.wire + self.latency + self.codec


def shard(num_elements: int, cluster: Cluster) -> int:
    """Elements of a rank's shard, padded as FSDP2 pads it."""
    return -(-num_elements // cluster.ranks)


def exact(num_elements: int, dtype: str, cluster: Cluster, factor: float = 1.0) -> Cost:
    """An all-gather or reduce-scatter by a ring over all ranks: every link carries (ranks - 1) / ranks of the whole."""
    ranks = cluster.ranks
    sent = shard(num_elements, cluster) * DTYPE_BYTES[dtype] * (ranks - 1) * factor
    if cluster.nodes == 1:
        return Cost(sent / cluster.intra.rate, (ranks - 1) * cluster.intra.hop.value, 0.0, sent)
    if cluster.ranks_per_node == 1:
        return Cost(sent / cluster.inter.rate, (ranks - 1) * cluster.inter.hop.value, 0.0, 0.0, sent)
    slowest = min(cluster.inter.rate, cluster.intra.rate)
    return Cost(sent / slowest, (ranks - 1) * cluster.inter.hop.value, 0.0, sent, sent)


def _hops(cluster: Cluster, sent: _core.LinkBytes, codec_bytes: float) -> Cost:
    """The hops of consecutive chunks run at once, so the slower one decides. `sent`: by one rank."""
    intra_bytes, inter_bytes = sent.intra_node, sent.inter_node * cluster.ranks_per_node
    wire = max(intra_bytes / cluster.intra.rate, inter_bytes / cluster.inter.rate)
    latency = 0.0
    if intra_bytes:
        latency += cluster.intra.exchange_seconds(cluster.ranks_per_node - 1)
    if inter_bytes:
        latency += cluster.inter.exchange_seconds(cluster.nodes - 1)
    return Cost(wire, latency, codec_bytes / cluster.compute.codec_rate, intra_bytes, inter_bytes)


@lru_cache
def _topology(nodes: int, ranks_per_node: int) -> _core.Topology:
    return _core.Topology([node for node in range(nodes) for _ in range(ranks_per_node)])


@lru_cache
def _gather_plan(length: int, dtype: str, format: str, nodes: int, ranks_per_node: int) -> _core.GatherPlan:
    lengths = [length] * (nodes * ranks_per_node)
    return _core.GatherPlan(_topology(nodes, ranks_per_node), 0, lengths, dtype, [(length, format)])


@lru_cache
def _difference_plan(length: int, dtype: str, nodes: int, ranks_per_node: int) -> _core.DifferencePlan:
    return _core.DifferencePlan(_topology(nodes, ranks_per_node), 0, [length] * (nodes * ranks_per_node), dtype)


@lru_cache
def _reduce_plan(length: int, dtype: str, formats: str, nodes: int, ranks_per_node: int) -> _core.ReducePlan:
    lengths = [length] * (nodes * ranks_per_node)
    return _core.ReducePlan(_topology(nodes, ranks_per_node), 0, lengths, dtype, [(length, formats)])


def bytes_by_hop(
    collective: str, num_elements: int, dtype: str, formats: str, cluster: Cluster
) -> Sequence[_core.LinkBytes]:
    """Bytes that rank 0 sends in each hop of a compressed call. `num_elements`: of the whole tensor."""
    if collective == "all_reduce":
        topology = _topology(cluster.nodes, cluster.ranks_per_node)
        return _core.AllReducePlan(topology, 0, num_elements, dtype, formats).bytes_by_hop
    make = _gather_plan if collective == "all_gather" else _reduce_plan
    return make(shard(num_elements, cluster), dtype, formats, cluster.nodes, cluster.ranks_per_node).bytes_by_hop


def gather(num_elements: int, dtype: str, format: str, cluster: Cluster) -> Cost:
    """zcomm's all-gather: between the nodes first, then inside them."""
    length = shard(num_elements, cluster)
    plan = _gather_plan(length, dtype, format, cluster.nodes, cluster.ranks_per_node)
    return _hops(cluster, plan.bytes, _gather_codec(plan.passes, length, dtype, format))


def secondary_gather(num_elements: int, dtype: str, format: str, cluster: Cluster) -> Cost:
    """The same values from the node's secondary shards: the hop inside the node alone."""
    length = shard(num_elements, cluster)
    plan = _gather_plan(length, dtype, format, cluster.nodes, cluster.ranks_per_node)
    codec_bytes = _gather_codec(plan.passes_from_secondary, length, dtype, format)
    return _hops(cluster, plan.bytes_from_secondary, codec_bytes)


def _gather_codec(passes: _core.CodecPasses, length: int, dtype: str, format: str) -> float:
    """Bytes that the codec reads and writes: of each slot its values and its wire."""
    slot_bytes = length * DTYPE_BYTES[dtype] + _core.WireLayout(format, dtype, length).num_bytes
    return (passes.encoded + passes.decoded) / length * slot_bytes


def difference_bytes(encoded: float, decoded: float, bits: float) -> float:
    """Bytes that the codec of lossless differences reads and writes. `encoded`, `decoded`: 16-bit values; `bits`: of a
    difference. An encoder reads value and base twice, to measure and to write, and writes the base."""
    return encoded * (10 + bits / 8) + decoded * (4 + bits / 8)


def gather_differences(num_elements: int, dtype: str, bits: float, cluster: Cluster) -> Cost:
    """zcomm's all-gather by lossless differences of `bits` per value; inside the nodes values go as they are. On
    GPUs headers go ahead, which is the latency here; on CPUs each goes with its difference."""
    length = shard(num_elements, cluster)
    plan = _difference_plan(length, dtype, cluster.nodes, cluster.ranks_per_node)
    copied = 2 * plan.kept_bytes  # from what is kept to the output: read and written
    cost = _hops(cluster, plan.bytes(round(length * bits / 8)), copied)
    coded = difference_bytes(plan.passes.encoded, plan.passes.decoded, bits)
    headers = cluster.inter.exchange_seconds(cluster.nodes - 1) if cluster.nodes > 1 else 0.0
    return cost + Cost(latency=headers, codec=coded / cluster.compute.difference_rate)


def gather_unchanged(num_elements: int, dtype: str, cluster: Cluster) -> Cost:
    """The same values once more, inside the node: what is kept is compared with its hash, copied and sent."""
    plan = _difference_plan(shard(num_elements, cluster), dtype, cluster.nodes, cluster.ranks_per_node)
    return _hops(cluster, plan.bytes_from_secondary, 3 * plan.kept_bytes)


def kept_bytes(num_elements: int, dtype: str, cluster: Cluster) -> int:
    """What a rank keeps of a gather by differences."""
    plan = _difference_plan(shard(num_elements, cluster), dtype, cluster.nodes, cluster.ranks_per_node)
    return plan.largest_kept_bytes


def reduce(num_elements: int, dtype: str, formats: str, cluster: Cluster) -> Cost:
    """zcomm's reduce-scatter: encode, exchange and add inside the node; then the same with the sums between nodes."""
    length = shard(num_elements, cluster)
    plan = _reduce_plan(length, dtype, formats, cluster.nodes, cluster.ranks_per_node)
    passes, sent = plan.passes, plan.bytes.intra_node + plan.bytes.inter_node
    # Each wire is encoded once and sent once, and as many come in.
    codec_bytes = (passes.encoded + passes.decoded) * DTYPE_BYTES[dtype] + 2 * sent
    return _hops(cluster, plan.bytes, codec_bytes)
