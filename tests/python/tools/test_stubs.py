"""The stubs of the C++ modules: their names and arguments are those of the modules."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zcomm import _core

ROOT = Path(__file__).parents[3]


def torch_binding() -> ModuleType:
    pytest.importorskip("torch")
    from zcomm.distributed.binding import _c10d

    return _c10d


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Public functions, classes and annotated names; types that only the stub has are left out."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.ClassDef) and "TypedDict" not in map(ast.unparse, node.bases)
        ):
            found[node.name] = node
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and ast.unparse(node.annotation) != "TypeAlias"
        ):
            found[node.target.id] = node
    return {name: found[name] for name in public(found)}


def arguments_of(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs) if argument.arg != "self"]


def named_arguments(docstring: str) -> list[str] | None:
    """Return the arguments in the first line of a pybind11 docstring; None if it names none."""
    names = re.findall(r"[(,] \*?(\w+): ", docstring.partition("\n")[0].replace("(", "( "))
    names = [name for name in names if name != "self"]
    return None if any(re.fullmatch(r"arg\d+", name) for name in names) else names


@pytest.mark.parametrize("name", ["_core", "_c10d"])
def test_a_stub_is_that_of_its_module(name: str) -> None:
    module = _core if name == "_core" else torch_binding()
    stub = declared(ast.parse((ROOT / "zcomm" / f"{name}.pyi").read_text()).body)
    if name == "_c10d" and not hasattr(module.ProcessGroup, "reconfigure"):  # before torch 2.14
        del stub["ElasticGroup"]
    assert stub.keys() == public(vars(module)), name
    for key, node in stub.items():
        if isinstance(node, ast.FunctionDef):
            assert named_arguments(getattr(module, key).__doc__) in (None, arguments_of(node)), key
        if isinstance(node, ast.ClassDef) and isinstance(getattr(module, key), type):
            members = declared(node.body)
            theirs = public(vars(getattr(module, key)))
            inherited = public(dir(getattr(module, key))) - theirs
            assert members.keys() - inherited == theirs, key
            for member, declaration in members.items():
                if isinstance(declaration, ast.FunctionDef) and not declaration.decorator_list:
                    named = named_arguments(getattr(getattr(module, key), member).__doc__)
                    assert named in (None, arguments_of(declaration)), f"{key}.{member}"
