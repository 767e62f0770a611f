"""Every error of the sources has one of the field's grammars: "NAME: expected Y, got X", with a reason after a colon,
"X must be Y", "X must be Y, got Z", "X requires Y", or "X and Y are mutually exclusive"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("src", "include", "python", "zcomm", "tools", "bench", "examples")
LITERAL = r'"(?:[^"\\\n]|\\.)*"'
OTHER_GRAMMAR = re.compile(r"^(?!.*\b(expected|must be)\b.*\bgot\b).*\bgot\b|[:,] need\b|\bneeds to be\b", re.DOTALL)


def texts_of_python(source: str) -> Iterator[str]:
    """Strings that are no docstrings, with {} for values."""

    def visit(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Expr(ast.Constant()):
                pass
            case ast.Constant(str(text)):
                yield text
            case ast.JoinedStr(parts):
                yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from visit(child)

    yield from visit(ast.parse(source))


def texts_of_cpp(source: str) -> Iterator[str]:
    """The literals of each statement, with {} for what is between two."""
    code = re.sub(rf"({LITERAL})|//.*", lambda found: (found[1] or "").replace(";", ","), source)
    for statement in code.split(";"):
        yield "{}".join(literal[1:-1] for literal in re.findall(LITERAL, statement))


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, text)"""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            yield from ((path.name, text) for text in texts_of_python(path.read_text()))
        elif path.suffix in (".cpp", ".hpp", ".inl", ".cu", ".cuh"):
            yield from ((path.name, text) for text in texts_of_cpp(path.read_text()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_errors_have_one_of_the_grammars(folder: str) -> None:
    assert not [found for found in texts(ROOT / folder) if OTHER_GRAMMAR.search(found[1])]


def test_the_other_grammars_are_found() -> None:
    wrong = 'f"x: got {x}, expected 1"', 'f"x: got {x}, must be 1"', '"x: need 1"', '"x needs to be 1"'
    right = 'f"x: expected {y}, got {x}: it needs y"', 'f"x must be 1, got {x}"', '"x requires y"'
    python = '"""It needs to be."""\n' + "\n".join(f"raise ValueError({error})" for error in (*wrong, *right))
    cpp = 'a("x: got " + x + ", need 1; " "2"); b("x: expected 1; 2, " + y + "got " + x);  // x: need 1'
    found = [*texts_of_python(python), *texts_of_cpp(cpp)]
    assert [bool(OTHER_GRAMMAR.search(text)) for text in found if text] == [*[True] * 4, *[False] * 3, True, False]
