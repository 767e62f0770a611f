"""Counters of a group: bytes moved, and calls left exact. Also for tools that draw them: as a flat dictionary, and as a
file that node_exporter reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from zcomm._tables import aligned
from zcomm._units import size_text, time_text
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of

#: Weight of a collective's tensor bytes in sums over all collectives.
BYTES_MOVED = {name: 2 if name == "all_reduce" else 1 for name in _c10d.COLLECTIVES}

# Fields of Stats that do not count.
_NO_COUNTERS = "decisions", "by_steps", "node_memory", "threshold", "formats", "group", "description", "rank", "size"
# Collectives that send as much in a ring of exact calls, from each rank.
_RINGS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
# Forms that would compress the calls kept exact by a reason.
_FORMS = {"form": "list,coalesced", "unmarked": "single", "out_of_place": "out_of_place", "in_place": "in_place"}
_FORMATS = {
    "all_gather": "all_gather='int8:256'",
    "reduce_scatter": "reduce_scatter='int8:128/int4:128'",
    "all_reduce": "all_reduce='int8:128/int4:128', or zcomm.ddp.compress_hook for DDP",
    **dict.fromkeys(("all_to_all", "gather", "scatter"), "exchanges='int8:128'"),
}

# Metrics of Prometheus, with their explanations.
_CALLS = {
    "calls": "Compressed calls.",
    "bytes": "Bytes of the tensors of compressed calls.",
    "wire_bytes": "Bytes that compressed calls sent from this rank.",
    "codec_seconds": "Seconds of encoding and decoding.",
    "transfer_seconds": "Seconds of waiting for transfers.",
}
_UNCOMPRESSED = {
    "calls": "Calls that were left exact, by reason.",
    "bytes": "Bytes of the tensors of calls that were left exact, by reason.",
}


@dataclass
class Calls:
    """Number of calls. ``bytes`` are of the gathered, scattered or reduced tensors."""

    calls: int = 0
    bytes: int = 0


@dataclass
class SentCalls(Calls):
    """Calls with bytes sent by zcomm from this rank: ``intra_node_bytes`` and ``inter_node_bytes``."""

    intra_node_bytes: int = 0
    inter_node_bytes: int = 0


@dataclass
class HopStats:
    """One hop of a collective on this rank: bytes sent, and the time spent waiting for its transfers."""

    intra_node_bytes: int = 0
    inter_node_bytes: int = 0
    wait_seconds: float = 0.0


@dataclass
class CollectiveStats(SentCalls):
    """One collective on this rank: what was compressed, what that cost, and what was not and why.

    ``intra_node_bytes`` and ``inter_node_bytes`` were sent by this rank to ranks of its node and to other nodes.
    ``transfer_seconds`` is the time spent waiting for transfers, ``codec_seconds`` that of encoding and decoding.
    ``host_waits``: times that the host has waited for the GPU, which lossless differences make it do once per step.
    ``hops``: the same bytes by hop, in the order of the hops, and the part of ``transfer_seconds`` that each was waited
    for. An all-reduce has up to two of its reduce-scatter, then two of its all-gather. On a GPU the host does not wait.
    ``exact`` maps a reason to the calls that it kept exact; the reasons are listed in docs/options.md.
    """

    codec_seconds: float = 0.0
    transfer_seconds: float = 0.0
    host_waits: int = 0
    hops: list[HopStats] = field(default_factory=list)
    exact: dict[str, Calls] = field(default_factory=dict)

    @property
    def wire_bytes(self) -> int:
        return self.intra_node_bytes + self.inter_node_bytes


@dataclass
class Messages(Calls):
    """Compressed messages from this rank: ``bytes`` are of the values, ``wire_bytes`` those sent."""

    wire_bytes: int = 0


@dataclass
class SendRecvStats(Messages):
    """All compressed messages from this rank, and those to each rank of the group."""

    peers: dict[int, Messages] = field(default_factory=dict)


@dataclass
class Decision:
    """What ``compress="auto"`` has decided for a class of calls, the same on all ranks: of a collective, a dtype and
    formats, and of ``least_bytes`` up to less than twice as many.

    ``by``: "table", "calls" (rehearsals), or "steps", as :class:`StepDecision` has it. The seconds are of a call by
    itself, of the slowest rank: medians of ``rounds`` rehearsals, those of the table, or 0 for neither. ``again``: of
    two all-gathers, the second of which secondary shards serve if they are compressed. ``one_hop``: compressed ones
    take one hop, not two; ``one_hop_seconds`` is 0 where that is not another way."""

    collective: str
    dtype: str
    least_bytes: int
    format: str
    by: str
    compressed: bool
    exact_seconds: float
    compressed_seconds: float
    rounds: int
    again: bool = False
    one_hop: bool = False
    one_hop_seconds: float = 0.0

    def __str__(self) -> str:
        how = f"in {self.rounds} rehearsals" if self.rounds else "by the table of decisions"
        why = ", by steps; by itself" if self.by == "steps" else ", as"
        way = "exact" if not self.compressed else "compressed in one hop" if self.one_hop else "compressed"
        one_hop = f", in one hop {time_text(self.one_hop_seconds)}," if self.one_hop_seconds else ""
        again = ", and again from secondary shards" if self.again else ""
        named = f"{self.collective} of {size_text(self.least_bytes)} and more, {self.dtype} in {self.format}{again}: "
        if not self.exact_seconds:
            return f"{named}{way}, by steps"
        return (
            f"{named}{way}{why} an exact call takes {time_text(self.exact_seconds)} "
            f"and a compressed one {time_text(self.compressed_seconds)}{one_hop} {how}"
        )


@dataclass
class StepDecision:
    """What ``compress="auto"`` has decided by the time of training steps, the same on all ranks. The seconds are
    medians over blocks of steps, of the slowest rank; a median may be off by its spread. ``steps`` were counted."""

    compressed: bool
    steps: int
    exact_seconds: float
    exact_spread: float
    compressed_seconds: float
    compressed_spread: float

    def __str__(self) -> str:
        return (
            f"by steps: {'compressed' if self.compressed else 'exact'}, as a step takes "
            f"{time_text(self.exact_seconds)} +- {time_text(self.exact_spread)} with exact calls and "
            f"{time_text(self.compressed_seconds)} +- {time_text(self.compressed_spread)} with compressed ones "
            f"in {self.steps} steps"
        )


@dataclass
class Stats:
    """``others`` are collectives that are never compressed, and exact point-to-point calls.

    ``rehearsals``: calls that zcomm makes for its own decisions. ``compress="auto"`` times calls on scratch, and ranks
    agree about changed weights by small calls. Nothing else counts them. ``decisions``: what ``compress="auto"`` has
    decided so far. ``by_steps``: its last decision by training steps; None while there is none, or another one is on
    its way.
    ``threshold``: the ``min_bytes`` that ``compress="auto"`` has chosen, and why; empty where the options decide.
    ``corrupted_messages``: those in which ``verify`` has found other bytes than were sent, counted by their receiver.
    ``node_memory``: "shared" if compressed calls on CPUs go through memory that the ranks of the node share, else why
    they do not; empty before the first of them.
    ``formats``: the group's own, by collective. ``group``: its name. ``description``: what :class:`zcomm.Options` may
    name it by in ``groups``. ``rank`` and ``size``: this rank in the group, and the group's ranks.
    """

    all_gather: CollectiveStats
    reduce_scatter: CollectiveStats
    all_reduce: CollectiveStats
    all_to_all: CollectiveStats
    gather: CollectiveStats
    scatter: CollectiveStats
    broadcast: CollectiveStats
    send_recv: SendRecvStats
    rehearsals: SentCalls
    decisions: list[Decision]
    others: Calls
    corrupted_messages: int = 0
    by_steps: StepDecision | None = None
    node_memory: str = ""
    threshold: str = ""
    formats: dict[str, str] = field(default_factory=dict)
    group: str = ""
    description: str = ""
    rank: int = 0
    size: int = 1

    def to_dict(self) -> dict[str, float]:
        """These counters as a flat dictionary for TensorBoard, Weights & Biases or MLflow:
        ``"zcomm/all_gather/wire_bytes"``, ``"zcomm/all_gather/exact/min_bytes/calls"``. Hops are numbered from 0:
        ``"zcomm/all_gather/hops/0/wait_seconds"``. Decisions, which are no counters, are left out."""
        found: dict[str, float] = {}

        def visit(name: str, value: Any) -> None:
            if isinstance(value, list):
                value = dict(enumerate(value))
            if isinstance(value, dict):
                for key, inner in value.items():
                    visit(f"{name}/{key}", inner)
            else:
                found[name] = float(value)

        visit("zcomm", self._counters())
        return found

    def write_prometheus(self, path: str | os.PathLike[str]) -> None:
        """Write these counters to ``path`` in Prometheus' text format, for the textfile collector of node_exporter. The
        file is replaced at once: a reader never sees half of it.

        Raises ValueError if the name does not end in ``.prom``, and ImportError without ``prometheus_client``."""
        if not os.fspath(path).endswith(".prom"):
            raise ValueError(f"path: expected a name that ends in .prom, got {os.fspath(path)!r}")
        try:
            from prometheus_client import CollectorRegistry, write_to_textfile
            from prometheus_client.core import CounterMetricFamily
            from prometheus_client.registry import Collector
        except ImportError as error:
            raise ImportError(
                "zcomm.stats().write_prometheus() needs prometheus_client: pip install prometheus_client"
            ) from error
        counters, group_and_rank = self._counters(), [self.group, str(dist.get_rank())]

        class Counters(Collector):
            def collect(self) -> Iterator[CounterMetricFamily]:
                for name, text in _CALLS.items():
                    family = CounterMetricFamily(f"zcomm_{name}", text, labels=["collective", "group", "rank"])
                    for collective in (*_c10d.COLLECTIVES, "send_recv"):
                        if name in counters[collective]:
                            family.add_metric([collective, *group_and_rank], counters[collective][name])
                    yield family
                for name, text in _UNCOMPRESSED.items():
                    labels = ["collective", "reason", "group", "rank"]
                    family = CounterMetricFamily(f"zcomm_uncompressed_{name}", text, labels=labels)
                    for collective in _c10d.COLLECTIVES:
                        for reason, calls in counters[collective]["exact"].items():
                            family.add_metric([collective, reason, *group_and_rank], calls[name])
                    yield family
                text = "Messages that arrived with other bytes than were sent, counted by their receiver."
                family = CounterMetricFamily("zcomm_corrupted_messages", text, labels=["group", "rank"])
                family.add_metric(group_and_rank, counters["corrupted_messages"])
                yield family

        registry = CollectorRegistry()
        registry.register(Counters())
        write_to_textfile(os.fspath(path), registry)

    def _counters(self) -> dict[str, Any]:
        counters = asdict(self)
        for name in _NO_COUNTERS:
            del counters[name]
        for name in BYTES_MOVED:
            counters[name]["wire_bytes"] = getattr(self, name).wire_bytes
        return counters

    def __str__(self) -> str:
        """Return a table: a line for each collective that was compressed, and for each reason that left calls exact.
        "times fewer" compares the bytes that this rank has sent with what it would send in a ring of exact calls."""
        lines = [f"zcomm, rank {self.rank} of {self.size} of group {self.description or self.group or 'default'}"]
        if rows := list(self._sent_rows()):
            heads = ("compressed", "calls", "tensors", "sent in node", "between nodes", "codec", "times fewer", "")
            lines += aligned([heads, *rows], 1)
        if rows := list(self._exact_rows()):
            lines += aligned([("left exact", "because", "calls", "tensors", "to compress"), *rows], 2)
            lines.append(f"{self.explain_exact()[2].partition(':')[0]}.")
        lines += [f"auto: {line}" for line in self.explain_auto()]
        if self.others.calls:
            lines.append(f"{self.others.calls} other calls, which are never compressed")
        lines += [f"corrupted messages: {self.corrupted_messages}"] * bool(self.corrupted_messages)
        if self.node_memory not in ("", "shared", "one rank in this node"):
            lines.append(f"ranks of this node share no memory: {self.node_memory}")
        return "\n".join(lines if len(lines) > 1 else [*lines, "no calls"])

    def summary(self) -> str:
        """Return the same in a line, as it is logged."""
        rows = [(*row[:3], row[-2]) for row in self._sent_rows()]
        parts = [
            f"{name} {calls} calls, {size}" + f", {fewer} fewer bytes" * bool(fewer)
            for name, calls, size, fewer in rows
        ]
        parts += [f"{name} exact: {calls} {reason} ({size})" for name, reason, calls, size, _ in self._exact_rows()]
        parts += [f"corrupted messages: {self.corrupted_messages}"] * bool(self.corrupted_messages)
        return "; ".join([*parts, *(f"auto: {line}" for line in self.explain_auto())]) or "no calls"

    def _sent_rows(self) -> Iterator[tuple[str, ...]]:
        for name in _c10d.COLLECTIVES:
            one: CollectiveStats = getattr(self, name)
            if one.calls:
                sent = size_text(one.intra_node_bytes), size_text(one.inter_node_bytes)
                exact = BYTES_MOVED[name] * one.bytes * (self.size - 1) / max(self.size, 1)
                is_ring = name in _RINGS and one.wire_bytes
                fewer = f"{exact / one.wire_bytes:.1f}x" if is_ring else ""
                yield name, f"{one.calls}", size_text(one.bytes), *sent, time_text(one.codec_seconds), fewer, ""
        if (messages := self.send_recv).calls:
            fewer = f"{messages.bytes / max(messages.wire_bytes, 1):.1f}x"
            sent_bytes = f"sent {size_text(messages.wire_bytes)}"
            yield "send_recv", f"{messages.calls}", size_text(messages.bytes), "", "", "", fewer, sent_bytes

    def _exact_rows(self) -> Iterator[tuple[str, ...]]:
        for name in _c10d.COLLECTIVES:
            for reason, calls in getattr(self, name).exact.items():
                yield name, reason, f"{calls.calls}", size_text(calls.bytes), self._setting(name, reason)

    def explain_auto(self) -> list[str]:
        """Return a line for ``threshold``, for each of ``decisions``, and for that by steps."""
        return [str(line) for line in (self.threshold, *self.decisions, self.by_steps) if line]

    def explain_exact(self) -> tuple[int, int, str]:
        """Return the bytes that a setting would compress, those of all calls, and a line that has the exact ones by
        reason, with that setting. Bytes are those of the tensors; those of all-reduces count twice."""
        exact: dict[tuple[str, str], int] = {}
        total = 0
        for name, times in BYTES_MOVED.items():
            one: CollectiveStats = getattr(self, name)
            total += times * one.bytes
            for reason, calls in one.exact.items():
                exact[name, reason] = times * calls.bytes
                total += times * calls.bytes
        parts, changeable = [], 0
        for (name, reason), num_bytes in sorted(exact.items(), key=lambda item: -item[1]):
            setting = self._setting(name, reason)
            changeable += num_bytes if setting else 0
            if num_bytes >= 0.01 * total:
                share = f"{num_bytes / total:.0%} {name} {reason}"
                parts.append(f"{share} (to compress: {setting})" if setting else share)
        share = f"{sum(exact.values()) / max(total, 1):.0%} of the bytes stayed exact"
        return changeable, total, ": ".join([share, *([", ".join(parts)] if parts else [])])

    def _setting(self, name: str, reason: str) -> str:
        """Return the setting that would compress such calls; "" if there is none, as where the user's own exact() or
        compress() has made them exact."""
        if reason in _FORMS:
            what = "weights or gradients" + (" that no optimizer steps" if reason == "in_place" else "")
            compiled = ", or 'traced' for compiled FSDP" if reason == "form" else ""
            return f"groups={{{self.description!r}: {_FORMS[reason]!r}}}{compiled}, if these are {what}"
        if reason == "min_bytes":
            return "a smaller min_bytes, or larger FSDP2 units"
        if reason != "format_exact":
            return ""
        is_exact = set(self.formats.get(name, "exact").split("/")) <= {"exact", "bf16"}  # bf16: of values of 16 bits
        return _FORMATS.get(name, "") if is_exact else ""


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """Return the counters of ``group`` (default: the world) on this rank, since it was made.

    Raises ValueError if the group has no zcomm backend. Example: ``print(zcomm.stats())``, after some steps.
    """
    return stats_of(backend_of(group))


def stats_of(backend: _c10d.ProcessGroup) -> Stats:
    """Return the counters of one backend object; see :func:`stats`."""
    raw, by_steps = backend.stats(), backend.step_decision()
    options: Any = backend.options  # zcomm.Options

    def collective(name: str) -> CollectiveStats:
        fields = dict(raw[name])
        fields["hops"] = [HopStats(**hop) for hop in fields["hops"]]
        fields["exact"] = {reason: Calls(**calls) for reason, calls in fields["exact"].items()}
        return CollectiveStats(**fields)

    peers = {peer: Messages(**sent) for peer, sent in raw["send_recv"].items()}
    calls, num_bytes, wire_bytes = (
        sum(getattr(sent, name) for sent in peers.values()) for name in ("calls", "bytes", "wire_bytes")
    )
    return Stats(
        **{name: collective(name) for name in _c10d.COLLECTIVES},
        send_recv=SendRecvStats(calls, num_bytes, wire_bytes, peers),
        rehearsals=SentCalls(**raw["rehearsals"]),
        decisions=[Decision(**decision) for decision in backend.decisions()],
        others=Calls(**raw["others"]),
        by_steps=StepDecision(**by_steps) if by_steps else None,
        corrupted_messages=raw["corrupted_messages"],
        node_memory=raw["node_memory"],
        threshold=options.threshold,
        formats={name: getattr(options, name, options.exchanges) for name in _c10d.COLLECTIVES},
        group=options.group_name,
        description=backend.description,
        rank=backend.rank(),
        size=backend.size(),
    )
