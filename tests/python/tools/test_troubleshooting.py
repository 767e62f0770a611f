"""The messages in docs/troubleshooting.md are those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
OF_OTHERS = {
    "Your assigned backend zcomm is not available, please use gloo",  # Accelerate's
}


def texts_of_sources() -> str:
    """All sources, with strings that are written in several pieces as one."""
    files = [path for folder in ("src", "python", "zcomm") for path in (ROOT / folder).rglob("*.[chp]*")]
    text = "\n".join(path.read_text() for path in files if path.suffix in (".cpp", ".hpp", ".py"))
    return re.sub(r'"\s*(?:\+\s*)?(?:std::string\()?f?"', "", text.replace('\\"', "'"))


def messages() -> list[str]:
    sections = PAGE.read_text().split("\n## ")[1:]
    return [
        message
        for section in sections
        if not section.startswith("No message")
        for message in re.findall("^### (.*)$", section, re.MULTILINE)
    ]


def test_messages_are_those_of_the_sources() -> None:
    sources = texts_of_sources()
    assert len(messages()) > 15
    for message in messages():
        if message in OF_OTHERS:
            continue
        for part in re.split(r'\*[^*]*\*|"', message):  # italics mark variable parts
            words = part.strip(" :,.()[]'#")
            assert not words or words in sources, f"{message}: no source says {words!r}"
