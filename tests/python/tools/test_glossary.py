"""Terms that a page explains itself are explained as in the glossary."""

from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def rows(page: str) -> list[str]:
    """Of the tables of terms."""
    found, inside = [], False
    for line in (DOCS / page).read_text().splitlines():
        inside = line == "| term | meaning |" or (inside and line.startswith("|"))
        if inside and not line.startswith(("| term |", "|---")):
            found.append(line)
    return found


def test_the_terms_of_the_design_are_those_of_the_glossary() -> None:
    assert len(rows("design.md")) > 5
    assert set(rows("design.md")) <= set(rows("glossary.md"))
