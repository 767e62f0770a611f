"""Counters of a group for the tools that draw them: a flat dictionary, and a file that node_exporter reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from zcomm.distributed.binding import _c10d

COLLECTIVES = _c10d.COLLECTIVES
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


def flat(counters: Mapping[str, Any]) -> dict[str, float]:
    """Nested counters by their paths, ``"zcomm/all_gather/calls"``; items of lists are numbered from 0."""
    found: dict[str, float] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(f"{name}/{key}", inner)
        else:
            found[name] = float(value)

    visit("zcomm", counters)
    return found


def write_prometheus(path: str | os.PathLike[str], counters: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Writes nested counters with ``labels`` to ``path`` in Prometheus' text format. Raises as
    Stats.write_prometheus."""
    if not os.fspath(path).endswith(".prom"):
        raise ValueError(f"path: expected a name that ends in .prom, got {os.fspath(path)!r}")
    try:
        from prometheus_client import CollectorRegistry, write_to_textfile
        from prometheus_client.core import CounterMetricFamily
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise ImportError(
            "zcomm.stats().write_prometheus() needs prometheus_client: pip install 'zcomm[metrics]'"
        ) from error

    class Counters(Collector):
        def collect(self) -> Iterator[CounterMetricFamily]:
            for name, text in _CALLS.items():
                family = CounterMetricFamily(f"zcomm_{name}", text, labels=["collective", *labels])
                for collective in (*COLLECTIVES, "send_recv"):
                    if name in counters[collective]:
                        family.add_metric([collective, *labels.values()], counters[collective][name])
                yield family
            for name, text in _UNCOMPRESSED.items():
                family = CounterMetricFamily(
                    f"zcomm_uncompressed_{name}", text, labels=["collective", "reason", *labels]
                )
                for collective in COLLECTIVES:
                    for reason, calls in counters[collective]["exact"].items():
                        family.add_metric([collective, reason, *labels.values()], calls[name])
                yield family

    registry = CollectorRegistry()
    registry.register(Counters())
    write_to_textfile(os.fspath(path), registry)
