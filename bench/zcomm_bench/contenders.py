"""What the benchmark compares: the backends, and what one can write without zcomm.

`exact_all_to_all` is a reduce-scatter by exchange and local sum over gloo, half the bytes of gloo's own; on GPUs
over NCCL. `naive` is an afternoon's compression: torch's row-wise quantization operators around gloo's collectives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, cast

import torch
import torch.distributed as dist

import zcomm
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm_bench.spec import FORMATTED, Spec, option_of, parse_backend

# The option whose format a collective has where its own says exact.
LIKE = {"all_reduce": "reduce_scatter", "all_to_all": "reduce_scatter", "broadcast": "all_gather"}
Group: TypeAlias = "dist.ProcessGroup"
Pack = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Problem:
    """The tensors of one size, which all contenders share.

    all_gather: `shard` is the own slot of `whole`, as FSDP2 calls it. reduce_scatter: `whole` is the input, `shard` the
    output. all_reduce: `whole` alone is reduced in place. all_to_all: `whole` is the input, `shard`, as large, the
    output. broadcast: `whole` becomes that of rank 0.
    """

    collective: str
    op: str
    whole: torch.Tensor
    shard: torch.Tensor

    @property
    def reduce_op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if self.op == "avg" else dist.ReduceOp.SUM


class Contender:
    """One backend, by the calls that a trainer makes. `format` is how it compresses; "exact" if it does not."""

    format = "exact"

    def __init__(self, name: str, group: Group) -> None:
        self.name = name
        self.group = group
        self.size: int = group.size()

    def prepare(self, problem: Problem) -> None:
        """Called once per size, before any call."""

    def call(self, problem: Problem) -> None:
        getattr(self, problem.collective)(problem)

    def all_gather(self, problem: Problem) -> None:
        all_gather_single(problem.whole, problem.shard, group=self.group)

    def reduce_scatter(self, problem: Problem) -> None:
        reduce_scatter_single(problem.shard, problem.whole, op=problem.reduce_op, group=self.group)

    def all_reduce(self, problem: Problem) -> None:
        dist.all_reduce(problem.whole, op=problem.reduce_op, group=self.group)

    def all_to_all(self, problem: Problem) -> None:
        dist.all_to_all_single(problem.shard, problem.whole, group=self.group)

    def broadcast(self, problem: Problem) -> None:
        dist.broadcast(problem.whole, group_src=0, group=self.group)

    def wire_bytes(self, problem: Problem) -> int | None:
        """Bytes that a call sends from this rank, where this class knows."""
        return None


class Zcomm(Contender):
    """zcomm, with counters: see zcomm.stats."""

    def __init__(self, name: str, group: Group, format: str) -> None:
        super().__init__(name, group)
        self.format = format


class ExactAllToAll(Contender):
    """Every rank sends each slot to its owner, which adds them up."""

    def prepare(self, problem: Problem) -> None:
        self._received = torch.empty_like(problem.whole)
        self._sum = torch.empty_like(problem.whole[: problem.whole.numel() // self.size])

    def reduce_scatter(self, problem: Problem) -> None:
        self._reduce(problem, problem.shard)

    def all_reduce(self, problem: Problem) -> None:
        self._reduce(problem, self._sum)
        all_gather_single(problem.whole, self._sum, group=self.group)

    def _reduce(self, problem: Problem, out: torch.Tensor) -> None:
        dist.all_to_all_single(self._received, problem.whole, group=self.group)
        slots = self._received.view(self.size, -1)
        if problem.op == "avg":
            torch.mean(slots, dim=0, out=out)
        else:
            torch.sum(slots, dim=0, out=out)

    def wire_bytes(self, problem: Problem) -> int:
        hops = 2 if problem.collective == "all_reduce" else 1
        whole_bytes: int = problem.whole.nbytes
        return hops * whole_bytes * (self.size - 1) // self.size


class Naive(Contender):
    """Rows of one block, each with its own scale and offset; shards are padded to whole rows."""

    OPERATORS: ClassVar[dict[str, tuple[Pack, Pack]]] = {
        "int8": (torch.ops.quantized.embedding_bag_byte_prepack, torch.ops.quantized.embedding_bag_byte_unpack),
        "int4": (torch.ops.quantized.embedding_bag_4bit_prepack, torch.ops.quantized.embedding_bag_4bit_unpack),
    }

    def __init__(self, name: str, group: Group, format: str) -> None:
        super().__init__(name, group)
        kind, _, block = format.partition(":")
        self.format = format
        self._block = int(block)
        self._pack, self._unpack = self.OPERATORS[kind]

    def all_gather(self, problem: Problem) -> None:
        self._gather(problem.shard, problem.whole)

    def reduce_scatter(self, problem: Problem) -> None:
        problem.shard.copy_(self._reduced(problem))

    def all_reduce(self, problem: Problem) -> None:
        self._gather(self._reduced(problem), problem.whole)

    def wire_bytes(self, problem: Problem) -> int:
        row: int = self._encode(torch.zeros(1, self._block)).shape[1]
        rows: int = -(-problem.whole.numel() // self.size // self._block)
        hops = 2 if problem.collective == "all_reduce" else 1
        return hops * (self.size - 1) * rows * row

    def _gather(self, shard: torch.Tensor, whole: torch.Tensor) -> None:
        packed = self._encode(shard.view(1, -1))
        gathered = packed.new_empty(self.size * packed.shape[0], packed.shape[1])
        all_gather_single(gathered, packed, group=self.group)
        # Slot by slot: faster than all at once, whose temporaries are fresh pages.
        for slot, rows in zip(whole.view(self.size, -1), gathered.chunk(self.size), strict=True):
            slot.copy_(self._decode(rows, shard.numel()))

    def _reduced(self, problem: Problem) -> torch.Tensor:
        slots = problem.whole.view(self.size, -1)
        packed = self._encode(slots)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received, packed, group=self.group)
        first, *others = received.chunk(self.size)
        total = self._decode(first, slots.shape[1])
        for rows in others:
            total += self._decode(rows, slots.shape[1])
        return total.div_(self.size) if problem.op == "avg" else total

    def _encode(self, slots: torch.Tensor) -> torch.Tensor:
        """(slots, elements) -> (rows, bytes); the rows of a slot are neighbours."""
        values = slots.float()
        missing = -values.shape[1] % self._block
        if missing:
            values = torch.nn.functional.pad(values, (0, missing))
        return self._pack(values.reshape(-1, self._block))

    def _decode(self, rows: torch.Tensor, num_elements: int) -> torch.Tensor:
        """(rows, bytes) of one slot -> (num_elements,) as float32."""
        return self._unpack(rows).view(-1)[:num_elements]


def make_contenders(spec: Spec, node_size: int | None) -> list[Contender]:
    """The contenders of `spec`, each with a group of its own. All ranks call this together."""
    return [_make(spec, name, node_size) for name in spec.backends]


def _make(spec: Spec, name: str, node_size: int | None) -> Contender:
    kind, _ = parse_backend(name, spec.device)
    new_group: Any = dist.new_group  # torch 2.14: it returns a number to other ranks
    if kind in ("gloo", "nccl", "exact_all_to_all"):
        group = new_group(backend="nccl" if spec.device == "cuda" else "gloo")
        return ExactAllToAll(name, group) if kind == "exact_all_to_all" else Contender(name, group)
    chosen, options = _formats(spec, name, node_size)
    if kind == "naive":
        return Naive(name, new_group(backend="gloo"), chosen)
    return Zcomm(name, new_group(backend="zcomm", pg_options=options), chosen)


def check_formats(spec: Spec) -> None:
    """Raises ValueError or TypeError that names the option where a backend of `spec` has a wrong format, or where
    nothing reads an option."""
    compressed = {name: parse_backend(name, spec.device) for name in spec.backends}
    compressed = {name: parsed for name, parsed in compressed.items() if parsed[0] in FORMATTED}
    read = {"min_bytes", "chunk_bytes"} if any(kind == "zcomm" for kind, _ in compressed.values()) else set()
    if any(format is None for _, format in compressed.values()):
        read |= {option_of(spec.collective), LIKE.get(spec.collective, spec.collective)}
    for option in sorted(spec.options.keys() - read):
        raise ValueError(
            f"{option}: expected a call that reads it, got {spec.collective} of {', '.join(spec.backends)}"
        )
    for name in compressed:
        _formats(spec, name, None)


def _formats(spec: Spec, name: str, node_size: int | None) -> tuple[str, zcomm.Options]:
    """How that backend compresses the collective, and the options that say so."""
    kind, format = parse_backend(name, spec.device)
    option = option_of(spec.collective)
    if format == "exact":
        raise ValueError(
            f"backends: expected {kind} in a format that compresses, got {name!r}: exact calls are not its own"
        )
    fields: dict[str, Any] = {"forms": "single,in_place", **spec.options, "node_size": node_size}
    if format is not None:
        fields[option] = format
    options = zcomm.Options(**fields)
    if option not in fields and getattr(options, option) == "exact":
        # Exact by default, which would compare gloo with itself.
        fields[option] = getattr(options, LIKE[spec.collective])
        options = zcomm.Options(**fields)
    chosen = cast(str, getattr(options, option))
    if kind != "naive":
        return chosen, options
    chosen = chosen.split("/")[-1]
    if re.fullmatch(rf"({'|'.join(Naive.OPERATORS)}):\d+", chosen) is None:
        raise ValueError(f"naive: expected int8:B or int4:B, got {chosen!r}")
    return chosen, options
