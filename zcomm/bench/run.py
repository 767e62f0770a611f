"""The benchmark of the collectives: what to run, what comes out of it, and the files that hold it.

Options, columns and definitions are those of nccl-tests, on logical (uncompressed) bytes; `zcomm.bench.worker` is what
every rank runs. Several backends run side by side in the same processes and take turns call by call, so that a machine
which gets slower makes all of them slower.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zcomm._version import __version__
from zcomm.lab import gpus, network

SCHEMA = "zcomm-bench/1"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
DEVICES = ("cpu", "cuda")
BACKENDS = ("gloo", "zcomm", "exact_all_to_all", "naive")
CUDA_BACKENDS = ("nccl", "zcomm", "exact_all_to_all")
FORMATTED = ("zcomm", "naive")  # the backends that take "=FORMAT"
DTYPE_BYTES = {"float": 4, "bfloat16": 2, "half": 2}
OPS = ("sum", "avg")
NO_LAB = "none"
OVERHEAD_BATCHES = 60


def parse_size(text: str) -> int:
    """Bytes of "8", "1K", "1.5M", "2G", as nccl-tests reads them: K is 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGkmg]?)", text)
    if match is None:
        raise ValueError(f'expected a size such as "8", "64K" or "128M", got {text!r}')
    return int(float(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2].upper()])


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
    """busbw / algbw: the part of the whole that every rank must send at least, if nothing is compressed."""
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
    `zcomm.lab.network`, "unlimited", or "none" for plain loopback. `options` are fields of zcomm.Options. `seconds`
    bounds the samples of a size: fewer than `iters` are taken, but three at least; 0: no bound. `device` is where the
    tensors are; ranks on "cuda" share the GPUs if there are fewer (see zcomm.lab.gpus).
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
        for name, least in (("iters", 1), ("warmup", 1), ("calls", 0), ("launches", 1), ("seconds", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not self.sizes or not self.backends or len(set(self.backends)) < len(self.backends):
            raise ValueError("expected at least one size and one backend, and no backend twice")
        for backend in self.backends:
            if parse_backend(backend, self.device)[0] == "exact_all_to_all" and self.collective == "all_gather":
                raise ValueError("exact_all_to_all is a baseline for reductions, not for all_gather")
        network.parse_nodes(self.nodes)
        if self.link != NO_LAB:
            network.parse_rate(self.link)

    @property
    def num_ranks(self) -> int:
        num_nodes, ranks_per_node = network.parse_nodes(self.nodes)
        return num_nodes * ranks_per_node

    @property
    def rate_bits(self) -> int | None:
        """Bits per second of every link; None if it has no limit."""
        return None if self.link == NO_LAB else network.parse_rate(self.link)

    @property
    def shards(self) -> list[int]:
        """Elements of a shard for every size, each once."""
        return list(dict.fromkeys(shard_elements(size, self.dtype, self.num_ranks) for size in self.sizes))

    @property
    def title(self) -> str:
        where = "loopback" if self.link == NO_LAB else f"{self.link} links"
        return f"{self.collective}, {self.dtype}, {self.nodes} ranks{' on GPUs' * (self.device == 'cuda')}, {where}"


Update = Callable[[list[dict[str, Any]], str], object]


def run(spec: Spec, on_update: Update = lambda records, progress: None) -> dict[str, Any]:
    """Run the benchmark and return what `save` writes.

    `on_update` gets the records so far and a line of progress whenever a size is done. Raises network.RankFailed.
    """
    rows: dict[tuple[int, str], list[dict[str, Any]]] = {}
    found = gpus.facts() if spec.device == "cuda" else {}
    shared = gpus.sharing(spec.num_ranks, found, spec.link) if found else ""
    note = ""
    for launch in range(spec.launches):

        def take(line: str, launch: int = launch) -> None:
            try:
                measured = json.loads(line)
            except ValueError:
                print(line, file=sys.stderr)
                return
            for row in measured:
                rows.setdefault((row["size"], row["backend"]), []).append(row)
            done = f"launch {launch + 1} of {spec.launches}, {measured[0]['size']} bytes"
            on_update([_merge(spec, samples) for samples in rows.values()], done)

        note = launch_ranks(spec, ["collective", json.dumps(dataclasses.asdict(spec))], take) or note
    return {
        "schema": SCHEMA,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "machine": {**machine(), **found},
        "note": "; ".join(text for text in (shared, note) if text),
        "config": dataclasses.asdict(spec),
        "results": [_merge(spec, samples) for samples in rows.values()],
    }


def launch_ranks(spec: Spec, arguments: list[str], on_line: Callable[[str], object]) -> str:
    """Run the worker as every rank; returns what the network lab has to say."""
    # Without a lab all ranks share one host, whose own address is loopback; their nodes are virtual.
    nodes, rate = (f"1x{spec.num_ranks}", None) if spec.link == NO_LAB else (spec.nodes, spec.link)
    argv = [sys.executable, "-m", "zcomm.bench.worker", *arguments]
    # On GPUs plain loopback is just that: NCCL knows the machine by more than its network.
    isolate = spec.device == "cpu" or spec.link != NO_LAB
    return network.launch(argv, nodes=nodes, rate=rate, on_line=on_line, isolate=isolate).note


def measure_overhead(batch: int = 100) -> list[dict[str, Any]]:
    """Microseconds of processor time that the caller of an exact collective spends: gloo's, zcomm's, the difference.

    One element, in a group of one rank.
    """
    results: list[dict[str, Any]] = []
    spec = Spec("all_reduce", [4], link=NO_LAB, nodes="1x1")
    launch_ranks(spec, ["overhead", json.dumps({"batch": batch})], lambda line: results.extend(json.loads(line)))
    return results


def _merge(spec: Spec, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of one size and backend out of those of its launches: the median of every figure."""

    def median(name: str) -> float | None:
        values = [sample[name] for sample in samples if sample[name] is not None]
        return statistics.median(values) if values else None

    first = samples[0]
    figures = {name: median(name) for name in FIGURES}
    seconds = (figures["median_us"] or 0.0) * 1e-6
    factor = bus_factor(spec.collective, spec.num_ranks)
    size, wire, link = first["size"], figures["wire_bytes"], figures["link_bytes"]
    rate = spec.rate_bits
    return {
        "size": size,
        "count": first["count"],
        "type": spec.dtype,
        "redop": "none" if spec.collective == "all_gather" else spec.op,
        "backend": first["backend"],
        "format": first["format"],
        "exact_reason": first["exact_reason"],
        **figures,
        "algbw": algbw(size, seconds),
        "busbw": algbw(size, seconds) * factor,
        "ratio": size * factor / wire if wire else None,
        "link_busy": link * 8 / rate / seconds if link is not None and rate else None,
        "launch_medians_us": [sample["median_us"] for sample in samples],
    }


# What the ranks report for every size and backend; None where it is not known. Times and bytes are of one call.
FIGURES = {
    "min_us": "time of the fastest sample",
    "median_us": "time",
    "p90_us": "time that nine of ten samples keep below",
    "speedup": "median over the turns of (time of the first backend / time)",
    "wire_bytes": "payload that one rank sends, by the backend's own account",
    "link_bytes": "bytes that leave a node, by the counter of its interface, headers included",
    "codec_us": "time spent encoding and decoding; on a GPU, of the same passes with nothing beside them",
    "transfer_us": "time spent waiting for transfers; None on a GPU, where the host does not wait",
    "max_error": "largest difference from the float64 result, in units of that result's root mean square",
    "mean_error": "mean absolute difference, in the same units",
    "calls": "calls that make a sample",
}


def save(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read a report. Raises ValueError if the file is something else."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not a report of this benchmark ({SCHEMA})")
    return report


def machine() -> dict[str, Any]:
    """Where a report comes from."""
    return {
        "zcomm": __version__,
        "torch": _torch_version(),
        "python": platform.python_version(),
        "cpu": _first_match("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "tcp_congestion_control": _first_match("/proc/sys/net/ipv4/tcp_congestion_control", r"(\w+)"),
        "load_average": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _torch_version() -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_match(path: str, pattern: str) -> str | None:
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return match[1].strip() if match else None
