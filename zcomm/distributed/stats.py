"""What a group has moved, and what it left exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of


@dataclass
class Calls:
    """``bytes`` are of the gathered, scattered or reduced tensors."""

    calls: int = 0
    bytes: int = 0


@dataclass
class CollectiveStats:
    """One collective on this rank: what was compressed, what that cost, and what was not and why.

    ``inside_bytes`` and ``between_bytes`` were sent by this rank to ranks of its node and to other nodes.
    ``transfer_seconds`` is the time spent waiting for transfers, ``codec_seconds`` that of encoding and decoding.
    ``exact`` maps a reason to the calls that it kept exact; the reasons are listed in docs/design.md.
    """

    calls: int = 0
    bytes: int = 0
    inside_bytes: int = 0
    between_bytes: int = 0
    codec_seconds: float = 0.0
    transfer_seconds: float = 0.0
    exact: dict[str, Calls] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> int:
        return self.inside_bytes + self.between_bytes


@dataclass
class DirectStats(Calls):
    """Reduce-scatters that zcomm made as ``"exact:direct"``, and what this rank sent for them. ``exact`` of
    ``reduce_scatter`` counts them as well, by what kept them exact."""

    inside_bytes: int = 0
    between_bytes: int = 0


@dataclass
class Stats:
    """``others`` are collectives that are never compressed, and point-to-point calls."""

    all_gather: CollectiveStats
    reduce_scatter: CollectiveStats
    all_reduce: CollectiveStats
    direct_reduce_scatter: DirectStats
    others: Calls

    def __str__(self) -> str:
        parts = []
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            one: CollectiveStats = getattr(self, name)
            if one.calls:
                parts.append(
                    f"{name} {one.calls} calls, {_size(one.bytes)}: sent {_size(one.inside_bytes)} inside and "
                    f"{_size(one.between_bytes)} between nodes, codec {one.codec_seconds:.2f} s"
                )
            if one.exact:
                reasons = ", ".join(f"{c.calls} {reason} ({_size(c.bytes)})" for reason, c in one.exact.items())
                parts.append(f"{name} exact: {reasons}")
        direct = self.direct_reduce_scatter
        if direct.calls:
            parts.append(
                f"direct reduce_scatter {direct.calls} calls, {_size(direct.bytes)}: sent {_size(direct.inside_bytes)} "
                f"inside and {_size(direct.between_bytes)} between nodes"
            )
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
        fields["exact"] = {reason: Calls(**calls) for reason, calls in fields["exact"].items()}
        return CollectiveStats(**fields)

    return Stats(
        collective("all_gather"),
        collective("reduce_scatter"),
        collective("all_reduce"),
        DirectStats(**raw["direct_reduce_scatter"]),
        Calls(**raw["others"]),
    )


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
