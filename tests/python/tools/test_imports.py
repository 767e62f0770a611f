"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]


def imports(file: Path, top: bool = False) -> set[str]:
    """The absolute names that ``file`` imports, "from a import b" as "a.b"; ``top``: as soon as it is imported."""
    tree = ast.parse(file.read_text())
    nodes = list(tree.body) if top else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_test_imports_a_test() -> None:
    """What tests share is in tests/support."""
    tests = [file for file in (ROOT / "tests").rglob("*.py") if file.name.startswith(("test_", "conftest"))]
    assert len(tests) > 50
    names = {file.stem for file in tests}
    assert {f"{file}: {name}" for file in tests for name in imports(file) if names & set(name.split("."))} == set()
