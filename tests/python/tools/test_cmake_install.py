"""The core as C++ projects find it: installed, with headers, a versioned library and find_package(zcomm)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zcomm

ROOT = Path(__file__).parents[3]
# make's virtual environment has both.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
CMAKE, NINJA = shutil.which("cmake", path=PATH), shutil.which("ninja", path=PATH)


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(CMAKE is None or NINJA is None, reason="there is no cmake or ninja")
@pytest.mark.timeout(900)
def test_the_example_builds_outside_of_the_tree_against_an_installed_core(tmp_path: Path) -> None:
    shared = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}"]
    build = ROOT / "build/plain"  # where `make check` has compiled it
    if not (build / "CMakeCache.txt").exists():
        build = tmp_path / "core"
        run(CMAKE, *shared, "-S", ROOT, "-B", build, "-DZCOMM_CUDA=OFF")
    run(CMAKE, "--build", build, "--target", "zcomm_core")
    run(CMAKE, "--install", build, "--prefix", tmp_path / "installed")

    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    here = ["-S", tmp_path / "examples", "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}"]
    run(CMAKE, *shared, *here)
    run(CMAKE, "--build", tmp_path / "build")
    assert "all ranks hold the same bits" in run(tmp_path / "build/zcomm_collectives", "4", "5000")

    minor = zcomm.__version__.rpartition(".")[0]
    needed = run("readelf", "-d", tmp_path / "build/zcomm_collectives")
    assert f"[libzcomm_core.so.{minor}]" in needed
    (library,) = (tmp_path / "installed").glob("lib*/**/libzcomm_core.so")
    assert library.resolve().name == f"libzcomm_core.so.{zcomm.__version__}"

    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(wrong LANGUAGES CXX)\nfind_package(zcomm 99.0 REQUIRED)\n"
    )
    command = [
        CMAKE,
        *shared,
        "-S",
        wrong,
        "-B",
        tmp_path / "wrong-build",
        f"-DCMAKE_PREFIX_PATH={tmp_path / 'installed'}",
    ]
    refused = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert refused.returncode != 0
    assert f"version: {zcomm.__version__}" in refused.stderr
