"""Options of commands that are checked as they are read, so that an error names the option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer


def checked(parse: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback of typer: text that ``parse`` refuses with a ValueError ends the program with the reason."""

    def check(text: str | None) -> str | None:
        if text is not None:
            try:
                parse(text)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
        return text

    return check


def in_folder(path: Path | None) -> Path | None:
    """A callback of typer: makes the folder of a file that is written at the end, when an error would lose the work."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(str(error)) from None
    return path
