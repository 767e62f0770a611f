"""What the tables of bench/tables.py are made with: figures looked up, and how they read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench import results_file
from bench.results_file import Measurement


class Source:
    """Where a table looks its figures up. It remembers the measurements that were used: a line names them."""

    def __init__(self, subject: str) -> None:
        self._kinds = results_file.load(subject)
        self.used: list[Measurement] = []

    def kinds(self, names: Iterable[str]) -> list[str]:
        """Those that have one of the measurements."""
        wanted = set(names)
        return [kind for kind, found in self._kinds.items() if wanted & found.keys()]

    def names(self, kind: str) -> list[str]:
        return list(self._kinds[kind])

    def get(self, kind: str, name: str) -> Measurement | None:
        found = self._kinds[kind].get(name)
        if found is not None and found not in self.used:
            self.used.append(found)
        return found

    def rows(self, kind: str, name: str, **wanted: Any) -> list[dict[str, Any]]:
        found = self.get(kind, name)
        records = found.records if found else []
        return [row for row in records if all(row[column] == value for column, value in wanted.items())]

    def row(self, kind: str, name: str, **wanted: Any) -> dict[str, Any] | None:
        return next(iter(self.rows(kind, name, **wanted)), None)


def label(kind: str) -> str:
    """A kind of machine as the head of a column."""
    return results_file.CPUS.get(kind) or kind.split("-")[0].upper()


def lines_of(header: Sequence[str], rows: Iterable[Sequence[str]], source: Source) -> list[str]:
    """A table in Markdown, and where its figures come from."""
    return [*markdown(header, rows), "", f"{'; '.join(origins(source))}."]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def origins(source: Source) -> list[str]:
    """The commit of each machine. Raises ValueError for two of one machine: a table is of one state of the code."""
    commits: dict[str, str] = {}
    for each in source.used:
        if commits.setdefault(each.machine, each.commit) != each.commit:
            raise ValueError(f"{each.name}: expected commit {commits[each.machine]} as in its table, got {each.commit}")
    return [f"{machine}: commit `{commit}`" for machine, commit in commits.items()]


def size_text(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def milliseconds(row: dict[str, Any] | None, speedup: bool = True) -> str:
    if row is None:
        return ""
    time = row["median_us"] / 1e3
    text = f"{time:.2f}" if time < 1 else f"{time:.1f}" if time < 100 else f"{time:.0f}"
    return f"{text} ({row['speedup']:.2f}x)" if speedup else text
