"""Tables as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], num_texts: int) -> list[str]:
    """Return a line for each row, with its cells in columns. The first ``num_texts`` columns and the last are texts.
    Texts begin at the left, and numbers end at the right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        texts = [cell.ljust(width) for cell, width in zip(row[:num_texts], widths, strict=False)]
        numbers = [cell.rjust(width) for cell, width in zip(row[num_texts:-1], widths[num_texts:], strict=False)]
        lines.append("  ".join([*texts, *numbers, row[-1]]).rstrip())
    return lines
