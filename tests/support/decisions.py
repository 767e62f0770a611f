"""Tables that compress="auto" decides by, without a rehearsal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from zcomm.distributed.decisions import machine

# Seconds of an exact call, of a compressed one, and of one in one hop.
SLOW_LINK = (1.0, 0.5, 0.0)
FAST_LINK = (0.5, 1.0, 0.0)

RANKS = ("1x2", "2x1", "2x2")
DTYPES = ("float32", "bfloat16")
FORMATS = {
    "all_gather": ("int8:256", "int4:64"),
    "reduce_scatter": ("int8:128/int4:128", "int8:128", "int8:64"),
    "all_reduce": ("int8:128/int4:128", "int8:128", "int8:64"),
}


def row(
    seconds: tuple[float, float, float],
    collective: str,
    format: str,
    ranks: str = "2x2",
    dtype: str = "float32",
    least_bytes: int = 1,
    again: bool = False,
) -> dict[str, Any]:
    """Of a table: as `zcomm_bench measure` writes it. Of one byte it stands for all larger sizes."""
    times = dict(zip(("exact_seconds", "compressed_seconds", "one_hop_seconds"), seconds, strict=True))
    kind = {"ranks": ranks, "device": "cpu", "collective": collective, "dtype": dtype, "format": format, "again": again}
    return {**kind, "least_bytes": least_bytes, **times}


def rows_of_all_kinds(seconds: tuple[float, float, float]) -> list[dict[str, Any]]:
    """Of the calls that tests make."""
    return [
        row(seconds, collective, format, ranks, dtype, again=again)
        for collective, formats in FORMATS.items()
        for format, ranks, dtype, again in itertools.product(formats, RANKS, DTYPES, (False, True))
    ]


def table(
    folder: Path,
    rows: list[dict[str, Any]] | tuple[float, float, float],
    name: str = "cluster.json",
    **of_machine: Any,
) -> str:
    """The file of these rows, or of rows of all kinds that have these seconds, as if measured on this machine, but for
    what is given of it."""
    content = {
        "schema": "zcomm-measure/2",
        "machine": machine("cpu") | of_machine,
        "decisions": rows if isinstance(rows, list) else rows_of_all_kinds(rows),
    }
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)
