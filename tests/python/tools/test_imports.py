"""Rules of imports and of environment reads, checked on the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "zcomm"
WORKSHOP = ROOT / "bench" / "zcomm_bench"
#: Modules that import torch. In others, a function may import it for callers who have torch.
WITH_TORCH = re.compile(
    r"(zcomm\.(distributed|fsdp|ddp|megatron|outer|_c10d|_deepspeed|_meeting)|"
    r"zcomm_bench\.(contenders|gpu_clock|measure|planner\.units|prove\.stages|tensors|worker))\b"
)


def nodes(tree: ast.AST, inside_functions: bool) -> Iterator[ast.AST]:
    """Yield nodes that run, so not those under TYPE_CHECKING; with ``inside_functions`` also the bodies of
    functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        yield node
        yield from nodes(node, inside_functions)


def imports(file: Path, inside_functions: bool = True) -> set[str]:
    """The names that ``file`` imports, "from a import b" as "a.b"."""
    found = set()
    for node in nodes(ast.parse(file.read_text()), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> dict[str, Path]:
    """Return the modules of both packages by name, without the first file of zcomm, which loads others on demand."""
    files = [(file, package.parent) for package in (PACKAGE, WORKSHOP) for file in package.rglob("*.py")]
    found = {".".join(file.relative_to(parent).with_suffix("").parts): file for file, parent in files}
    return {name.removesuffix(".__init__"): file for name, file in found.items() if name != "zcomm.__init__"}


def imported_modules(inside_functions: bool) -> dict[str, set[str]]:
    """Module of the package -> those that it imports."""
    known = modules()
    found = {}
    for module, file in known.items():
        names = imports(file, inside_functions)
        found[module] = {name if name in known else name.rpartition(".")[0] for name in names} & known.keys()
    return found


def reached_from(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen, todo = set(), {start}
    while todo:
        seen |= todo
        todo = set().union(*(graph[module] for module in todo)) - seen
    return seen


def test_torch_is_imported_in_its_rooms_alone() -> None:
    """Modules that work without torch import neither torch nor a module that does."""
    graph = imported_modules(inside_functions=False)
    of_torch = {
        module
        for module, file in modules().items()
        if any(name.split(".")[0] == "torch" for name in imports(file, inside_functions=False))
    }
    assert {"zcomm.ddp", "zcomm.fsdp.collectives", "zcomm.distributed.groups"} <= of_torch
    for module in graph:
        if not WITH_TORCH.match(module):
            assert reached_from(module, graph) & of_torch == set(), module


def test_what_trains_does_not_import_the_workshop() -> None:
    for module, imported in imported_modules(inside_functions=True).items():
        if module.split(".")[0] == "zcomm":
            assert not any(name.split(".")[0] == "zcomm_bench" for name in imported), module


def test_no_modules_import_each_other() -> None:
    """No circle exists, neither on import nor in functions."""
    graph = imported_modules(inside_functions=True)
    assert len(graph) > 25
    for module, imported in graph.items():
        assert all(module not in reached_from(other, graph) for other in imported), module


def test_chains_of_rooms_are_short() -> None:
    """A room is a package or a module of zcomm. Rooms import each other in no circle, and four in a row at most."""
    rooms: dict[str, set[str]] = {}
    for module, imported in imported_modules(inside_functions=True).items():
        if module.startswith("zcomm."):
            room = module.split(".")[1]
            rooms.setdefault(room, set()).update({name.split(".")[1] for name in imported if "." in name} - {room})

    def longest_from(room: str, before: tuple[str, ...] = ()) -> int:
        assert room not in before, before
        return 1 + max((longest_from(other, (*before, room)) for other in rooms[room]), default=0)

    assert max(map(longest_from, rooms)) == 4


def test_files_of_the_binding_include_lower_floors() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    listed = re.search(r"From the top:\n\n((?:\* .*\n)+)", design)
    assert listed is not None
    lines = listed[1].splitlines()
    floors = {folder: -row for row, line in enumerate(lines) for folder in re.findall(r"`(\w+)`:", line)}
    sources = [file for file in (ROOT / "python" / "c10d").rglob("*") if file.suffix in (".cpp", ".hpp")]
    assert {file.parent.name for file in sources} == set(floors) and len(sources) > 40
    for file in sources:
        for included in re.findall(r'#include "c10d/(\w+)/', file.read_text()):
            assert floors[included] < floors[file.parent.name], (file, included)


def test_one_module_reads_the_private_names_of_fsdp2() -> None:
    """Another one those of FSDP1."""
    reader, of_fsdp1 = PACKAGE / "distributed" / "_fsdp2.py", PACKAGE / "distributed" / "_fsdp1.py"
    private = {node.attr for node in ast.walk(ast.parse(reader.read_text())) if isinstance(node, ast.Attribute)}
    private = {name for name in private if name.startswith("_")} | {"fsdp_params", "sharded_param", "sharded_state"}
    assert "_all_gather_comm" in private
    for file in PACKAGE.rglob("*.py"):
        if file not in (reader, of_fsdp1):
            read = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
            inside_torch = {name for name in imports(file) if name.startswith("torch.distributed.fsdp._")}
            assert read & private | inside_torch == set(), file


def test_one_module_reads_the_private_names_of_dtensor() -> None:
    private = "torch.distributed.tensor._"
    readers = {file.name for file in PACKAGE.rglob("*.py") if any(name.startswith(private) for name in imports(file))}
    assert readers == {"_dtensor.py"}


def test_one_module_reads_the_private_names_of_ddp() -> None:
    assert {file.name for file in PACKAGE.rglob("*.py") if "_module_parameters" in file.read_text()} == {"_ddp.py"}


def test_functions_of_the_package_fit_on_a_page() -> None:
    for file in modules().values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None and node.end_lineno - node.lineno < 60, f"{file}: {node.name}"


def test_no_test_imports_a_test() -> None:
    """Shared code of tests is in tests/support."""
    tests = [file for file in (ROOT / "tests").rglob("*.py") if file.name.startswith(("test_", "conftest"))]
    assert len(tests) > 50
    names = {file.stem for file in tests}
    assert {f"{file}: {name}" for file in tests for name in imports(file) if names & set(name.split("."))} == set()
