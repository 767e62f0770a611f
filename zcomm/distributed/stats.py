"""What a group has moved, and what it left exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from zcomm._renamed import NODE_BYTES, renamed
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of


@dataclass
class Calls:
    """``bytes`` are of the gathered, scattered or reduced tensors."""

    calls: int = 0
    bytes: int = 0


@dataclass
class HopStats:
    """One hop of a collective on this rank: bytes sent, and the time spent waiting for its transfers."""

    intra_node_bytes: int = 0
    inter_node_bytes: int = 0
    wait_seconds: float = 0.0


@renamed(NODE_BYTES)
@dataclass
class CollectiveStats:
    """One collective on this rank: what was compressed, what that cost, and what was not and why.

    ``intra_node_bytes`` and ``inter_node_bytes`` were sent by this rank to ranks of its node and to other nodes.
    ``transfer_seconds`` is the time spent waiting for transfers, ``codec_seconds`` that of encoding and decoding.
    ``host_waits``: times that the host has waited for the GPU, which lossless differences make it do once per step.
    ``hops``: the same bytes by hop, in the order of the hops, and the part of ``transfer_seconds`` that each was waited
    for. An all-reduce has up to two of its reduce-scatter, then two of its all-gather. On a GPU the host does not wait.
    ``exact`` maps a reason to the calls that it kept exact; the reasons are listed in docs/design.md.
    """

    calls: int = 0
    bytes: int = 0
    intra_node_bytes: int = 0
    inter_node_bytes: int = 0
    codec_seconds: float = 0.0
    transfer_seconds: float = 0.0
    host_waits: int = 0
    hops: list[HopStats] = field(default_factory=list)
    exact: dict[str, Calls] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> int:
        return self.intra_node_bytes + self.inter_node_bytes


@renamed(NODE_BYTES)
@dataclass
class SentCalls(Calls):
    """``intra_node_bytes`` and ``inter_node_bytes`` were sent by this rank for them, as far as zcomm sent them."""

    intra_node_bytes: int = 0
    inter_node_bytes: int = 0


@dataclass
class Decision:
    """What ``policy="auto"`` has decided for a class of calls, the same on all ranks: of a collective, a dtype and
    formats, and of ``least_bytes`` up to less than twice as many. The seconds are those of the slowest rank: medians of
    ``rounds`` rehearsals, or predicted by the calibration where ``rounds`` is 0. ``again``: of two all-gathers, the
    second of which secondary shards serve if they are compressed. ``one_hop``: compressed ones take one hop, not two;
    ``one_hop_seconds`` is 0 where that is not another way."""

    collective: str
    dtype: str
    least_bytes: int
    format: str
    compressed: bool
    exact_seconds: float
    compressed_seconds: float
    rounds: int
    again: bool = False
    one_hop: bool = False
    one_hop_seconds: float = 0.0

    def __str__(self) -> str:
        how = f"in {self.rounds} rehearsals" if self.rounds else "by the calibration"
        way = "exact" if not self.compressed else "compressed in one hop" if self.one_hop else "compressed"
        one_hop = f", in one hop {self.one_hop_seconds * 1e3:.3g} ms," if self.one_hop_seconds else ""
        again = ", and again from secondary shards" if self.again else ""
        return (
            f"{self.collective} of {_size(self.least_bytes)} and more, {self.dtype} in {self.format}{again}: "
            f"{way}, as an exact call takes {self.exact_seconds * 1e3:.3g} ms "
            f"and a compressed one {self.compressed_seconds * 1e3:.3g} ms{one_hop} {how}"
        )


@dataclass
class Stats:
    """``others`` are collectives that are never compressed, and point-to-point calls.

    ``direct_reduce_scatter``: those that zcomm made as ``"exact:direct"``; ``exact`` of ``reduce_scatter`` counts them
    as well, by what kept them exact. ``rehearsals``: calls that ``policy="auto"`` has made on scratch, exact and
    compressed ones; nothing else counts them. ``decisions``: what it has decided so far.
    """

    all_gather: CollectiveStats
    reduce_scatter: CollectiveStats
    all_reduce: CollectiveStats
    direct_reduce_scatter: SentCalls
    rehearsals: SentCalls
    decisions: list[Decision]
    others: Calls

    def __str__(self) -> str:
        parts = []
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            one: CollectiveStats = getattr(self, name)
            if one.calls:
                parts.append(
                    f"{name} {one.calls} calls, {_size(one.bytes)}: sent {_size(one.intra_node_bytes)} intra-node and "
                    f"{_size(one.inter_node_bytes)} inter-node, codec {one.codec_seconds:.2f} s"
                )
            if one.exact:
                reasons = ", ".join(f"{c.calls} {reason} ({_size(c.bytes)})" for reason, c in one.exact.items())
                parts.append(f"{name} exact: {reasons}")
        direct = self.direct_reduce_scatter
        if direct.calls:
            parts.append(
                f"direct reduce_scatter {direct.calls} calls, {_size(direct.bytes)}: sent "
                f"{_size(direct.intra_node_bytes)} intra-node and {_size(direct.inter_node_bytes)} inter-node"
            )
        parts += [f"auto: {decision}" for decision in self.decisions]
        if self.others.calls:
            parts.append(f"others {self.others.calls} calls")
        return "; ".join(parts) or "no calls"


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """Counters of ``group`` (default: the world) on this rank, since it was made.

    Raises ValueError if the group has no zcomm backend.
    """
    return stats_of(backend_of(group))


def stats_of(backend: _c10d.ProcessGroup) -> Stats:
    """Counters of one backend object; see :func:`stats`."""
    raw = backend.stats()

    def collective(name: str) -> CollectiveStats:
        fields = dict(raw[name])
        fields["hops"] = [HopStats(**hop) for hop in fields["hops"]]
        fields["exact"] = {reason: Calls(**calls) for reason, calls in fields["exact"].items()}
        return CollectiveStats(**fields)

    return Stats(
        collective("all_gather"),
        collective("reduce_scatter"),
        collective("all_reduce"),
        SentCalls(**raw["direct_reduce_scatter"]),
        SentCalls(**raw["rehearsals"]),
        [Decision(**decision) for decision in backend.decisions()],
        Calls(**raw["others"]),
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
