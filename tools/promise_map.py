"""Which tests hold each promise of the README: reads the marks, and writes the list into docs/testing.md.

    python tools/promise_map.py            writes it
    python tools/promise_map.py --check    ends with status 1 if the page is not current

A C++ test is marked by its name, ``TEST_CASE("promises 1, 3: ...")``, a test of processes by
``@pytest.mark.promise(1, 3)`` or the module's ``pytestmark``. Each promise needs one of both kinds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- promises: begin -->", "<!-- promises: end -->"
Tests = dict[int, list[str]]


def titles() -> dict[int, str]:
    """The numbered promises of the README."""
    found = re.findall(r"^(\d)\. \*\*(.+?)\.\*\*", (ROOT / "README.md").read_text(), re.MULTILINE)
    return {int(number): title for number, title in found}


def cpp_tests() -> Tests:
    tests: Tests = defaultdict(list)
    for path in sorted((ROOT / "tests" / "cpp").glob("*_test.cpp")):
        for numbers, name in re.findall(r'TEST_CASE\(\s*"promises? ([\d, ]+): (.+?)"\)', path.read_text()):
            for number in numbers.split(","):
                tests[int(number)].append(f"`{path.name}`: {name}")
    return tests


def promises_of(marks: Iterator[ast.expr]) -> Iterator[int]:
    """The numbers in ``pytest.mark.promise(...)`` among some expressions."""
    for mark in marks:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
            yield from (ast.literal_eval(number) for number in mark.args)


def process_tests() -> Tests:
    tests: Tests = defaultdict(list)
    for path in sorted((ROOT / "tests" / "python").rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        marks = (
            node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        )
        for number in promises_of(part for mark in marks for part in ast.walk(mark) if isinstance(part, ast.expr)):
            tests[number].append(f"`{path.name}`")
        for node in body:
            if isinstance(node, ast.FunctionDef):
                for number in promises_of(iter(node.decorator_list)):
                    tests[number].append(f"`{path.name}`: {node.name.removeprefix('test_').replace('_', ' ')}")
    return tests


def lines() -> list[str]:
    """The list in the page. Raises ValueError if a promise lacks a test, or a test names a promise that is not made."""
    promises, kinds = titles(), {"C++": cpp_tests(), "processes": process_tests()}
    text = []
    for kind, tests in kinds.items():
        if strange := set(tests) - set(promises):
            raise ValueError(f"expected promises {sorted(promises)}, got {kind} tests of {sorted(strange)}")
    for number, title in promises.items():
        text += [f"{number}. {title}", ""]
        for kind, tests in kinds.items():
            if not tests[number]:
                raise ValueError(f"expected tests of promise {number} in C++ and with processes, got none of {kind}")
            text += [f"   * {kind}, {test}" for test in tests[number]]
        text.append("")
    return text


def main() -> None:
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    written = "\n".join([before + BEGIN, "", *lines(), END + after])
    if "--check" not in sys.argv:
        PAGE.write_text(written)
    elif page != written:
        sys.exit(f"{PAGE.name} is not current: python tools/promise_map.py")


if __name__ == "__main__":
    main()
