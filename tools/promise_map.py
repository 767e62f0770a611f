"""Which tests hold each promise of docs/promises.md: reads the marks, and writes the list into that page.

    python tools/promise_map.py            writes it
    python tools/promise_map.py --check    ends with status 1 if the page is not current

A C++ test is marked by its name, ``TEST_CASE("promises 1, 3: ...")``, a test of processes by
``@pytest.mark.promise(1, 3)`` or the module's ``pytestmark``. Each promise needs one of both kinds.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
BEGIN, END = "<!-- promises: begin -->", "<!-- promises: end -->"
Tests = dict[int, set[str]]  # of a promise, the files


def titles() -> dict[int, str]:
    """The numbered promises."""
    found = re.findall(r"^(\d)\. \*\*(.+?)\.\*\*", PAGE.read_text(), re.MULTILINE)
    return {int(number): title for number, title in found}


def cpp_tests() -> Tests:
    tests: Tests = defaultdict(set)
    for path in (ROOT / "tests" / "cpp").glob("*_test.cpp"):
        for numbers in re.findall(r'TEST_CASE\(\s*"promises? ([\d, ]+): ', path.read_text()):
            for number in numbers.split(","):
                tests[int(number)].add(path.name)
    return tests


def promises_of(marks: Iterator[ast.expr]) -> Iterator[int]:
    """The numbers in ``pytest.mark.promise(...)`` among some expressions."""
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
            yield from (ast.literal_eval(number) for number in mark.args)


def process_tests() -> Tests:
    tests: Tests = defaultdict(set)
    for path in (ROOT / "tests" / "python").rglob("test_*.py"):
        body = ast.parse(path.read_text()).body
        marks = (
            node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        )
        decorators = (mark for node in body if isinstance(node, ast.FunctionDef) for mark in node.decorator_list)
        parts = (part for mark in marks for part in ast.walk(mark) if isinstance(part, ast.expr))
        for number in promises_of(itertools.chain(parts, decorators)):
            tests[number].add(path.name)
    return tests


def _names(files: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(files))


def lines() -> list[str]:
    """The table. Raises ValueError if a promise lacks a test, or a test names a promise that is not made."""
    promises, kinds = titles(), {"C++": cpp_tests(), "processes": process_tests()}
    for kind, tests in kinds.items():
        if set(tests) != set(promises):
            raise ValueError(f"expected {kind} tests of promises {sorted(promises)}, got those of {sorted(tests)}")
    rows = [
        f"| {number} | {title} | {' | '.join(_names(tests[number]) for tests in kinds.values())} |"
        for number, title in promises.items()
    ]
    return ["| | promise | in C++ | with processes |", "|---|---|---|---|", *rows]


def main() -> None:
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    written = "\n".join([before + BEGIN, "", *lines(), "", END + after])
    if "--check" not in sys.argv:
        PAGE.write_text(written)
    elif page != written:
        sys.exit(f"{PAGE.name} is not current: python tools/promise_map.py")


if __name__ == "__main__":
    main()
