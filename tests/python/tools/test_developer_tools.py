"""Aids for developers: versions of tools, gdb's printers, and the size of what they write."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def test_hooks_of_commits_have_the_versions_of_make_lint() -> None:
    (extra,) = re.findall(r"^lint = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = {word for word in re.findall(r'"([^"]+)"', extra) if "==" in word}
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    used = {version for hook in repository["hooks"] for version in hook["additional_dependencies"]}
    assert used and used <= pinned


def files(*endings: str) -> list[Path]:
    folders = ("bench", "examples", "include", "python", "src", "tests", "tools", "zcomm")
    return [file for folder in folders for ending in endings for file in (ROOT / folder).rglob(f"*{ending}")]


def test_functions_have_60_lines_and_files_400_at_most() -> None:
    """clang-tidy counts functions of the core. Parameters, which commands have one to a line, do not count."""
    sources = files(".py", ".hpp", ".cpp", ".inl", ".cu", ".cuh")
    assert len(sources) > 500
    long = [file for file in sources if len(file.read_text().splitlines()) > 400]
    for file in files(".py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.body[0].lineno + 1 > 60:
                long.append(file / node.name)
    assert not long


PROGRAM = """
#include <memory>
#include <span>
#include "zcomm/topology.hpp"
#include "zcomm/tensor_view.hpp"
#include "zcomm/block_format.hpp"
namespace zcomm {
Topology::Topology(std::span<const int> ids)
    : tables_(std::make_shared<Tables>(Tables{{ids.begin(), ids.end()}, {}, {}, true})) {}
void show(TensorView view, BlockFormat format, HopFormats formats, const Topology& topology) {
  asm volatile("" ::: "memory");
}
}
int main() {
  using namespace zcomm;
  const int nodes[] = {0, 0, 1};
  float values[] = {0.5f, 1.5f, -2.0f};
  BlockFormat int4{ElementKind::int4, 128, true};
  show({reinterpret_cast<std::byte*>(values), 3, DType::float32}, int4, {{}, int4}, Topology(nodes));
}
"""


@pytest.mark.skipif(not (shutil.which("gdb") and shutil.which("g++")), reason="needs gdb and g++")
def test_gdb_shows_views_formats_and_topologies(tmp_path: Path) -> None:
    program = tmp_path / "program"
    (tmp_path / "program.cpp").write_text(PROGRAM)
    include = ROOT / "include"
    subprocess.run(["g++", "-std=c++20", "-g", "-O0", f"-I{include}", f"{program}.cpp", "-o", program], check=True)
    commands = ["break zcomm::show", "run", *(f"print {name}" for name in ("view", "format", "formats", "topology"))]
    arguments = [
        word for command in ["source " + str(ROOT / "tools/gdb/zcomm.py"), *commands] for word in ("-ex", command)
    ]
    shown = subprocess.run(["gdb", "-batch", *arguments, program], capture_output=True, text=True, check=True)
    values = re.findall(r"^\$\d = (.*)", shown.stdout, re.MULTILINE)
    name = "int4:128:stochastic"
    assert values == ["float32[3] {0.5, 1.5, -2}", name, f"exact/{name}", "nodes [0, 0, 1]"], (
        shown.stdout + shown.stderr
    )
