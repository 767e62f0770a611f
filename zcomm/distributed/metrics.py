"""The counters of a group for the tools that draw them: a flat dictionary, and a file that node_exporter reads."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zcomm.distributed.stats import CollectiveStats, stats

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
_HELP = {
    "calls": "Compressed calls.",
    "bytes": "Bytes of the tensors of compressed calls.",
    "wire_bytes": "Bytes that compressed calls sent from this rank.",
    "codec_seconds": "Seconds of encoding and decoding.",
    "transfer_seconds": "Seconds of waiting for transfers.",
    "uncompressed_calls": "Calls that were left exact, by reason.",
    "uncompressed_bytes": "Bytes of the tensors of calls that were left exact, by reason.",
}


def metrics(group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Counters of ``group`` (default: the world) on this rank since it was made, as a flat dictionary for TensorBoard,
    Weights & Biases or MLflow: ``"zcomm/all_gather/wire_bytes"``, ``"zcomm/all_gather/exact/min_bytes/calls"``.

    The names are the fields of :func:`zcomm.stats`; bytes and seconds. Hops are numbered from 0:
    ``"zcomm/all_gather/hops/0/wait_seconds"``. ``decisions``, which are no counters, are left
    out. Raises ValueError if the group has no zcomm backend.
    """
    flat: dict[str, float] = {}
    counted = dataclasses.asdict(stats(group))
    del counted["decisions"]
    _flatten("zcomm", counted, flat)
    return flat


def _flatten(name: str, value: Any, flat: dict[str, float]) -> None:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}/{key}", inner, flat)
    else:
        flat[name] = float(value)


def write_prometheus(path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
    """Write the counters of ``group`` on this rank to ``path``, in Prometheus' text format, for the textfile collector
    of node_exporter. The name ends in ``.prom``. The file is replaced at once: a reader never sees half of it.

    Raises ValueError for another ending, and if the group has no zcomm backend."""
    target = Path(path)
    if target.suffix != ".prom":
        raise ValueError(f"path: expected a name that ends in .prom, got {str(path)!r}")
    text = "".join(_exposition(group))
    with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=target.name, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, target)


def _exposition(group: dist.ProcessGroup | None) -> Iterator[str]:
    counted = stats(group)
    rank = dist.get_rank()
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    for collective in _COLLECTIVES:
        one: CollectiveStats = getattr(counted, collective)
        labels = f'collective="{collective}",rank="{rank}"'
        for name in ("calls", "bytes", "wire_bytes", "codec_seconds", "transfer_seconds"):
            samples[name].append(f"{{{labels}}} {getattr(one, name)}")
        for reason, calls in one.exact.items():
            samples["uncompressed_calls"].append(f'{{{labels},reason="{reason}"}} {calls.calls}')
            samples["uncompressed_bytes"].append(f'{{{labels},reason="{reason}"}} {calls.bytes}')
    for name, lines in samples.items():
        metric = f"zcomm_{name}_total"
        yield f"# HELP {metric} {_HELP[name]}\n# TYPE {metric} counter\n"
        yield from (f"{metric}{line}\n" for line in lines)
