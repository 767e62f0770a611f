"""The files of bench/results: what the benchmarks measured, as git keeps it.

A file is called SUBJECT-KIND.jsonl. The kind is that of the machine: its instruction set, or the name of its GPU. A
measurement begins with an object: its name, the commit that was measured, the machine, the names of the columns, and
other facts that hold for all rows. Its rows follow, a list in each line. A repeated measurement replaces the one of the
same name.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
DIGITS = 5
CPUS = {"avx512": "AVX-512", "avx2": "AVX2", "baseline": "no AVX2"}  # how pages write a kind
UNKNOWN = "unknown"


@dataclass
class Measurement:
    """One table of figures: all its rows come from one commit and one machine."""

    name: str
    commit: str
    machine: str
    columns: list[str]
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)

    @property
    def head(self) -> dict[str, Any]:
        named = {"name": self.name, "commit": self.commit, "machine": self.machine}
        return {**named, **self.facts, "columns": self.columns}

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows, each as a dict by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def measured(
    name: str, machine: str, columns: Sequence[str], records: Iterable[Mapping[str, Any]], **facts: Any
) -> Measurement:
    """A measurement of the present commit, out of records that may have more than its columns."""
    rows = [[_rounded(record[column]) for column in columns] for record in records]
    return Measurement(name, commit(), machine, list(columns), facts, rows)


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def read(path: Path) -> list[Measurement]:
    """The measurements of a file. Raises ValueError where a line is neither a head nor a row of the head above it."""
    found: list[Measurement] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        value = json.loads(line)
        if isinstance(value, dict):
            own = [value.pop(name) for name in ("name", "commit", "machine", "columns")]
            found.append(Measurement(*own, facts=value))
        elif found and len(value) == len(found[-1].columns):
            found[-1].rows.append(value)
        else:
            expected = f"{len(found[-1].columns)} values" if found else "an object"
            raise ValueError(f"{path}:{number}: expected {expected}, got {line[:60]}")
    return found


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    lines = [json.dumps(line, separators=(",", ":")) for each in measurements for line in (each.head, *each.rows)]
    path.write_text("".join(f"{line}\n" for line in lines))


def keep(path: Path, new: Iterable[Measurement]) -> None:
    """Write measurements into a file, in place of those of the same names; others stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    every = {each.name: each for each in (read(path) if path.exists() else [])}
    every |= {each.name: each for each in new}
    write(path, every.values())


def append(path: Path, one: Measurement) -> None:
    """Add rows at the end of a file, below a head of their own unless the last one there is the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    last = read(path)[-1:] if path.exists() else []
    lines = one.rows if last and last[0].head == one.head else [one.head, *one.rows]
    with path.open("a") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def load(subject: str, folder: Path = RESULTS) -> dict[str, dict[str, Measurement]]:
    """The measurements of a subject by kind of machine and name: CPUs before GPUs."""
    kinds = {path.stem.removeprefix(f"{subject}-"): path for path in sorted(folder.glob(f"{subject}-*.jsonl"))}
    order = [kind for kind in CPUS if kind in kinds] + [kind for kind in kinds if kind not in CPUS]
    return {kind: {each.name: each for each in read(kinds[kind])} for kind in order}


def commit() -> str:
    """The commit of the code that runs: with "-changed" if tracked files differ from it. Where there is no git, the
    variable COMMIT names it; "unknown" without that."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # What a benchmark writes is no change of the code.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results", ":!docs")
        return git("rev-parse", "--short=7", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", UNKNOWN)


def own_isa() -> str:
    """The instruction set that zcomm uses on this machine: the kind of its measurements."""
    from zcomm import codec

    return os.environ.get("ZCOMM_ISA", codec.cpu_isas()[-1])


def cpu_machine(isa: str) -> str:
    """The machine of a measurement on a CPU, as pages name it."""
    return f"{CPUS.get(isa, isa)} ({os.cpu_count()} cores)"


def gpu_machine(gpu: str) -> str:
    """The same on a GPU."""
    return f"{gpu.removeprefix('NVIDIA ')} ({os.cpu_count()} cores)"
