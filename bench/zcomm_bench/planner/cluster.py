"""The hardware that a prediction rests on, each figure with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zcomm import _core
from zcomm._units import parse_rate

MOST_RANKS = 10**6  # their messages are counted one by one
SOURCES = ("measured", "given", "assumed")


@dataclass(frozen=True)
class Figure:
    """A number and its source: "measured" on this cluster, "measured on" another machine, "given" by the user, or
    "assumed" from a table."""

    value: float
    source: str = "assumed"

    def __post_init__(self) -> None:
        if self.source.partition(" on ")[0] not in SOURCES:
            raise ValueError(f"source: expected one of {', '.join(SOURCES)}, got {self.source!r}")


@dataclass(frozen=True)
class Link:
    """A network. Rates are one direction, in bytes per second: of a node between nodes, of a rank inside a node.

    `efficiency` is the share of `bandwidth` that large messages reach. `hop` is the time of one step of a ring in
    seconds, for small messages; `bulk_hop` for large ones, where the ring has such links alone or crosses them.
    `exchange` and `peer` are the time to start an all-to-all, and what each message adds to it.
    """

    bandwidth: Figure
    efficiency: Figure
    hop: Figure
    exchange: Figure
    peer: Figure = Figure(0.25e-6)
    bulk_hop: Figure = Figure(0.0)

    @property
    def rate(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth.value * self.efficiency.value

    def start_seconds(self, num_messages: int) -> float:
        """Seconds before the first byte of so many messages, sent and received, has arrived."""
        return self.exchange.value + num_messages * self.peer.value


@dataclass(frozen=True)
class Compute:
    """One rank's processor: peak FLOP/s of 16-bit matrix products, the share of it that training reaches, bytes of
    memory and bytes per second of memory bandwidth, and the shares of that bandwidth that the codec reaches, and the
    codec of lossless differences. `taken_share`: of the time that the codec takes by itself, what computing beside it
    loses."""

    peak: Figure
    efficiency: Figure
    memory: Figure
    memory_bandwidth: Figure
    codec_share: Figure = Figure(0.7)  # an H100 reached 0.68 to 0.93, re-encoding sums of int4 0.47 to 0.56
    lossless_share: Figure = Figure(0.5)  # an H100's codec reached 0.52 of the data sheet's rate at 3.4 bits
    taken_share: Figure = Figure(1.0)

    @property
    def flops(self) -> float:
        return self.peak.value * self.efficiency.value

    @property
    def codec_rate(self) -> float:
        """Bytes that the codec reads and writes per second."""
        return self.memory_bandwidth.value * self.codec_share.value

    @property
    def lossless_rate(self) -> float:
        """The same of lossless differences: bytes as `collectives.lossless_bytes` counts them."""
        return self.memory_bandwidth.value * self.lossless_share.value


@dataclass(frozen=True)
class Launch:
    """Seconds that a call costs beside its bytes. On a GPU the host queues work: a kernel, an event, a group of
    messages, each message. `start` passes before a kernel's first byte moves. A host that computes itself queues
    nothing, and `is_queued` is False."""

    is_queued: bool
    kernel: float = 0.0
    event: float = 0.0
    group: float = 0.0
    message: float = 0.0
    start: float = 0.0
    source: str = "assumed"


# An NCCL group takes a thread that the caller joins. Measured figures replace these: see measured.py.
ON_GPU = Launch(True, kernel=4e-6, event=0.5e-6, group=50e-6, message=0.3e-6, start=3e-6)
ON_HOST = Launch(False)

# Channels of NCCL's sends, as src/transport/nccl_communicator.cpp asks for them. The ranks of a node have their own
# communicator. In one over several nodes, pairs inside a node would have only the channels of those between nodes
# (NCCL's src/graph/paths.cc). Rates are not confirmed on several GPUs; that between nodes is NCCL's own figure
# (NCCL_P2P_PER_CHANNEL_NET_BW).
CHANNEL_RATE = 14e9  # bytes per second, to another node
NVLINK_CHANNEL_RATE = 22e9  # inside a node
CHANNELS_PER_PEER = 4
CHANNELS = 16  # of a rank, for all its peers
FAST_CHANNELS = 32  # the same where links inside a node are faster than NVLink 4


@dataclass(frozen=True)
class Cluster:
    """`nodes` x `ranks_per_node` ranks, one processor each.

    `exact_reduce_factor`: bytes of an exact reduce-scatter over those of a ring; 2 for Gloo, whose reduce-scatter is an
    all-reduce, and 1 for NCCL.
    """

    nodes: int
    ranks_per_node: int
    intra: Link
    inter: Link
    compute: Compute
    exact_reduce_factor: float = 1.0
    launch: Launch = ON_GPU
    chunk_bytes: int | None = None  # as zcomm.Options has it
    product_wait: float = 0.0  # seconds after which a kernel or a group of NCCL starts beside matrix products

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.ranks > MOST_RANKS:
            raise ValueError(f"nodes: expected at most {MOST_RANKS} ranks, got {self.nodes} x {self.ranks_per_node}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def one_node(self) -> Cluster:
        return replace(self, nodes=1)

    @property
    def of_one_rank(self) -> Cluster:
        """One rank of each node, with its share of the node's link while all use it."""
        share = replace(self.inter.bandwidth, value=self.inter.bandwidth.value / self.ranks_per_node)
        return replace(self, ranks_per_node=1, inter=replace(self.inter, bandwidth=share))

    @property
    def channels_inside(self) -> int:
        """Channels of NCCL that carry a rank's messages to the others of its node."""
        return FAST_CHANNELS if self.intra.bandwidth.value > INTRA["nvlink4"] else CHANNELS

    @property
    def rate_inside(self) -> float:
        """Bytes per second that leave a rank for the others of its node, by sends."""
        if not self.launch.is_queued or self.intra.bandwidth.source == "measured":  # by sends
            return self.intra.rate
        return min(self.intra.rate, self.channels_inside * NVLINK_CHANNEL_RATE)

    def rate_between(self, peers: int) -> float:
        """Return the bytes per second that leave a node if each of its ranks sends to ``peers`` others."""
        if not self.launch.is_queued or self.inter.bandwidth.source == "measured":  # by sends
            return self.inter.rate
        return min(self.inter.rate, self.ranks_per_node * peers * CHANNELS_PER_PEER * CHANNEL_RATE)

    @property
    def bytes_of_chunk(self) -> int:
        default = _core.DEFAULT_GPU_CHUNK_BYTES if self.launch.is_queued else _core.DEFAULT_CHUNK_BYTES
        return self.chunk_bytes or default


def _compute(peak: float, memory: float, bandwidth: float) -> Compute:
    return Compute(Figure(peak), Figure(0.5), Figure(memory), Figure(bandwidth))


# Vendors' data sheets: dense bfloat16 (V100: float16) FLOP/s, bytes of memory, bytes/s of memory bandwidth.
PROCESSORS = {
    "v100": _compute(125e12, 32e9, 900e9),
    "a100": _compute(312e12, 80e9, 2039e9),
    "l40s": _compute(362e12, 48e9, 864e9),
    "h100": _compute(989e12, 80e9, 3350e9),
    "h200": _compute(989e12, 141e9, 4800e9),
    "b200": _compute(2250e12, 180e9, 8000e9),
}
# Bytes/s of a GPU to the others of its node, one direction.
INTRA = {
    "nvlink2": 150e9,
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "pcie3": 16e9,
    "pcie4": 32e9,
    "pcie5": 64e9,
}


def intra_link(text: str) -> Link:
    """The link inside a node: a name of `INTRA`, or a rate per rank."""
    bandwidth = Figure(INTRA[text]) if text in INTRA else Figure(parse_rate(text), "given")
    return Link(bandwidth, Figure(0.8), hop=Figure(2e-6), exchange=Figure(15e-6), bulk_hop=Figure(2e-6))


def inter_link(text: str, source: str = "given") -> Link:
    """The link of a node to the other nodes: a rate per node, and its source. Share and hop are those of the bus
    bandwidths that are published for 4 to 128 nodes of 8 x 400 Gbit/s (nccl#1229)."""
    bandwidth = Figure(parse_rate(text), source)
    return Link(bandwidth, Figure(0.9), hop=Figure(8e-6), exchange=Figure(30e-6), bulk_hop=Figure(10e-6))


def processor(name: str, share_of_peak: float | None = None) -> Compute:
    """A processor of `PROCESSORS`; `share_of_peak` is what training reaches of its peak, if the user knows.

    Raises ValueError for a name that is not there."""
    if name not in PROCESSORS:
        raise ValueError(f"gpu: expected one of {', '.join(PROCESSORS)}, got {name!r}")
    compute = PROCESSORS[name]
    return compute if share_of_peak is None else replace(compute, efficiency=Figure(share_of_peak, "given"))


def calibrated(cluster: Cluster, calibration: Mapping[str, Any]) -> Cluster:
    """`cluster` with the figures that were measured in the place of those that were assumed or given."""
    queued = calibration.get("backend") != "gloo"
    links = {}
    for name in ("intra", "inter"):
        measured, link = calibration.get(name), getattr(cluster, name)
        if measured is not None:
            hop = Figure(measured["hop_seconds"], "measured")
            link = replace(
                link,
                bandwidth=Figure(measured["bytes_per_second"], "measured"),
                efficiency=Figure(1.0, "measured"),
                hop=hop,
                bulk_hop=max(hop, link.bulk_hop, key=lambda each: each.value) if queued else hop,
                exchange=Figure(measured["exchange_seconds"], "measured"),
            )
        links[name] = link
    compute = cluster.compute
    if "codec_bytes_per_second" in calibration:
        rate = Figure(calibration["codec_bytes_per_second"], "measured")
        compute = replace(compute, memory_bandwidth=rate, codec_share=Figure(1.0, "measured"))
    if "lossless_bytes_per_second" in calibration:
        share = calibration["lossless_bytes_per_second"] / compute.memory_bandwidth.value
        compute = replace(compute, lossless_share=Figure(share, "measured"))
    return replace(
        cluster,
        **links,
        compute=compute,
        exact_reduce_factor=calibration.get("exact_reduce_factor", cluster.exact_reduce_factor),
        launch=cluster.launch if queued else ON_HOST,
    )
