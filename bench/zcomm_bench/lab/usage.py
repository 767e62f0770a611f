"""Options of commands that are checked as they are read, so that an error names the option."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

PICTURES = (".png", ".svg", ".pdf")


@contextmanager
def refusals() -> Iterator[None]:
    """Let a ValueError end the program with its reason."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def checked(parse: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback of typer: text that ``parse`` refuses with a ValueError ends the program with the reason."""

    def check(text: str | None) -> str | None:
        if text is not None:
            with refusals():
                parse(text)
        return text

    return check


def source_of(context: typer.Context, name: str) -> str:
    """The source of an option's figure: "given" on the command line or in a file, or "assumed"."""
    source = context.get_parameter_source(name)
    return "assumed" if source is None or source.name == "DEFAULT" else "given"


def in_folder(path: Path | None) -> Path | None:
    """A callback of typer: makes the folder of a file that is written at the end, when an error would lose the work."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"expected a file, got the folder {path}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(str(error)) from None
    return path


def picture(path: Path | None) -> Path | None:
    """`in_folder` of a picture, whose name has to say its kind."""
    if path is not None and path.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"expected a name that ends in {' or '.join(PICTURES)}, got {path.name!r}")
    return in_folder(path)
