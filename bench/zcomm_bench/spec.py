"""What to measure: sizes, bandwidths and backends as in nccl-tests, on logical (uncompressed) bytes."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zcomm._units import parse_nodes
from zcomm_bench.lab import network

REDUCTIONS = ("reduce_scatter", "all_reduce")
NOT_EXCHANGES = ("all_gather", *REDUCTIONS)
COLLECTIVES = (*NOT_EXCHANGES, "all_to_all", "broadcast")
DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "zcomm", "exact_all_to_all", "naive")
CUDA_BACKENDS = ("nccl", "zcomm", "exact_all_to_all")
FORMATTED = ("zcomm", "naive")  # the backends that take "=FORMAT"
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DTYPE_BYTES = {"float": 4, "bfloat16": 2, "half": 2}
LARGEST = {"float": 3.4e38, "bfloat16": 3.39e38, "half": 65504.0}
LARGEST_INPUT = 10.0  # of what is normally distributed
OPS = ("sum", "avg")
NO_LAB = "none"
OVERHEAD_BATCHES = 60


def option_of(collective: str) -> str:
    """The option of zcomm that names the formats of a collective."""
    return collective if collective in NOT_EXCHANGES else "exchanges"


def parse_link(text: str) -> float | None:
    """Bytes per second of a link; None if it has no limit."""
    return None if text == NO_LAB else network.parse_limit(text)


def parse_size(text: str) -> int:
    """Bytes of "8", "1K", "1.5M", "2G", as nccl-tests reads them: K is 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGkmg]?)", text)
    if match is None:
        raise ValueError(f'expected a size such as "8", "64K" or "128M", got {text!r}')
    return int(float(match[1]) * _SIZES[match[2].upper()])


def sweep(minimum: int, maximum: int, factor: int = 2, step: int | None = None) -> list[int]:
    """Sizes in bytes from `minimum` to `maximum`, each `factor` times, or `step` bytes more than, the one before."""
    if not 1 <= minimum <= maximum:
        raise ValueError(f"expected 1 <= minbytes <= maxbytes, got {minimum} and {maximum}")
    if step is not None:
        if step < 1:
            raise ValueError(f"expected a step of at least 1 byte, got {step}")
        return list(range(minimum, maximum + 1, step))
    if factor < 2:
        raise ValueError(f"expected a step factor of at least 2, got {factor}")
    sizes = [minimum]
    while sizes[-1] * factor <= maximum:
        sizes.append(sizes[-1] * factor)
    return sizes


def shard_elements(size: int, dtype: str, num_ranks: int) -> int:
    """Elements of a rank's shard where the whole is about `size` bytes; at least one."""
    return max(1, size // (DTYPE_BYTES[dtype] * num_ranks))


def algbw(size: float, seconds: float) -> float:
    """Algorithm bandwidth in GB/s (1e9): `size` is the bytes of the gathered, scattered or reduced tensor."""
    return size / seconds / 1e9


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw: the part of the whole that every rank must send at least, if nothing is compressed. A broadcast's
    is the whole."""
    if collective == "broadcast":
        return 1.0
    return (num_ranks - 1) / num_ranks * (2 if collective == "all_reduce" else 1)


def parse_backend(text: str, device: str = "cpu") -> tuple[str, str | None]:
    """Name and format of "gloo", "zcomm", "zcomm=int4:128", ...; on "cuda", of "nccl" and so on."""
    name, equals, format = text.partition("=")
    every = CUDA_BACKENDS if device == "cuda" else BACKENDS
    if name not in every or (equals and (name not in FORMATTED or not format)):
        expected = ", ".join(f"{known}[=FORMAT]" if known in FORMATTED else known for known in every)
        raise ValueError(f"expected backends out of {expected}, got {text!r}")
    return name, format or None


@dataclass(frozen=True)
class Spec:
    """One run of the benchmark.

    `sizes` are in bytes; they are rounded down to whole shards. `calls` back to back make a sample; 0: as many, up to
    50, as take some milliseconds and much longer than the burst that an idle link lets through. `link` is a rate of
    `lab.network`, "unlimited", or "none" for plain loopback. `options` are fields of zcomm.Options. `seconds`
    bounds the samples of a size: fewer than `iters` are taken, but three at least; 0: no bound. `device` is where the
    tensors are; ranks on "cuda" share the GPUs if there are fewer (see zcomm_bench.lab.gpus).
    """

    collective: str
    sizes: Sequence[int]
    backends: Sequence[str] = ("gloo", "zcomm")
    dtype: str = "float"
    op: str = "sum"
    iters: int = 20
    warmup: int = 5
    calls: int = 0
    check: bool = True
    link: str = "1gbit"
    nodes: str = "4x1"
    launches: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    seconds: float = 0.0

    def __post_init__(self) -> None:
        accepted = (("collective", COLLECTIVES), ("dtype", tuple(DTYPE_BYTES)), ("op", OPS), ("device", DEVICES))
        for name, values in accepted:
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: expected one of {', '.join(values)}, got {getattr(self, name)!r}")
        if self.op == "avg" and self.collective not in REDUCTIONS:
            raise ValueError(f"op: expected sum for {self.collective}, got 'avg'")
        for name, least in (("iters", 1), ("warmup", 1), ("calls", 0), ("launches", 1), ("seconds", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected at least {least}, and no infinity, got {getattr(self, name)}")
        if not self.sizes or not self.backends or len(set(self.backends)) < len(self.backends):
            raise ValueError("expected at least one size and one backend, and no backend twice")
        for backend in self.backends:
            kind = parse_backend(backend, self.device)[0]
            if kind == "exact_all_to_all" and self.collective not in REDUCTIONS:
                raise ValueError(f"exact_all_to_all is a baseline for reductions, not for {self.collective}")
            if kind == "naive" and self.collective not in ("all_gather", *REDUCTIONS):
                raise ValueError(f"naive is a baseline for all_gather and reductions, not for {self.collective}")
        if parse_nodes(self.nodes)[0] > network.MAX_HOSTS and self.link != NO_LAB:
            raise ValueError(f"nodes: expected at most {network.MAX_HOSTS} behind links, got {self.nodes}")
        parse_link(self.link)
        if self.calls > self.most_calls:
            raise ValueError(f"calls: expected at most {self.most_calls} sums in place, got {self.calls}")

    @property
    def num_ranks(self) -> int:
        num_nodes, ranks_per_node = parse_nodes(self.nodes)
        return num_nodes * ranks_per_node

    @property
    def most_calls(self) -> int:
        """Calls of a sample: sums in place grow with each, and must stay finite."""
        if self.collective != "all_reduce" or self.op != "sum" or self.num_ranks == 1:
            return sys.maxsize
        return max(1, int(math.log(LARGEST[self.dtype] / LARGEST_INPUT, self.num_ranks)))

    @property
    def link_rate(self) -> float | None:
        """Bytes per second of every link; None if it has no limit."""
        return parse_link(self.link)

    @property
    def shards(self) -> list[int]:
        """Elements of a shard for every size, each once."""
        return list(dict.fromkeys(shard_elements(size, self.dtype, self.num_ranks) for size in self.sizes))

    @property
    def title(self) -> str:
        where = "loopback" if self.link == NO_LAB else f"{self.link} links"
        return f"{self.collective}, {self.dtype}, {self.nodes} ranks{' on GPUs' * (self.device == 'cuda')}, {where}"
