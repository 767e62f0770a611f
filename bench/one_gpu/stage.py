"""What the stages share: their sizes, their arguments, and what becomes of their rows."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

import results_file
from bench.one_gpu import IS_REHEARSAL
from zcomm_bench.lab import gpus

T = TypeVar("T")


def pick(real: T, rehearsed: T) -> T:
    """What a GPU gets, or what a rehearsal does."""
    return rehearsed if IS_REHEARSAL else real


def output(doc: str | None) -> Path:
    """The folder that the command line names."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder that keeps the rows, such as bench/results")
    folder: Path = parser.parse_args().out
    if IS_REHEARSAL and folder.resolve() == results_file.RESULTS:
        parser.error(f"--out: expected another folder than {results_file.RESULTS} in a rehearsal")
    return folder


def keep(out: Path, subject: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], **facts: Any) -> None:
    """Shows the rows, and puts them into the results of this GPU, with facts that hold for all. What was there when a
    stage failed or was stopped is kept as "unfinished", which the planner does not read."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    found = []
    try:
        for row in rows:
            found.append(row)
    except BaseException:
        if found:
            write(out, subject, f"{subject}, unfinished", columns, found, facts)
        raise
    write(out, subject, subject, columns, found, facts)


def write(
    out: Path,
    subject: str,
    name: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> None:
    gpu = gpus.facts()
    facts = {"date": time.strftime("%Y-%m-%d"), **{fact: gpu[fact] for fact in ("cuda", "nccl")}, **facts}
    one = results_file.measured(name, results_file.gpu_machine(gpu["gpu"]), columns, rows, **facts)
    results_file.keep(out / f"{subject}-{gpus.chip(gpu['gpu'])}.jsonl", [one])
    table = Table(*columns, title=f"{name}, {gpu['gpu']}", title_justify="left", box=box.SIMPLE_HEAD)
    for row in one.rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    console = Console(highlight=False)
    console.width = max(console.width, 120)
    console.print(table)
