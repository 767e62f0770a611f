"""The front of NCCL has every function of every NCCL that is here, finds the real library and never itself, and changes
nothing in a program without NCCL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.nccl_headers import ROOT, check_compiles, include_folders

from zcomm import __main__ as command
from zcomm import _core, _nccl

BUILT = ROOT / "build/plain/cuda_host"
FRONT, STAND_IN = BUILT / "libzcomm_nccl.so", BUILT / "libnccl.so.2"
needs_front = pytest.mark.skipif(not FRONT.exists(), reason="the front is not built: make test-cuda-host")


def functions(file: str, pattern: str) -> set[str]:
    """Return the names of functions in a source of the front."""
    return {f"nccl{name}" for name in re.findall(pattern, (ROOT / "src/front" / file).read_text())}


ANSWERED = functions("nccl.cpp", r"(?:Result |ZCOMM_(?:CALLS?|END|MAKE)\()nccl(\w+)[(,]")
ANSWERED |= {f"{name}Config" for name in functions("nccl.cpp", r"ZCOMM_CALLS\(nccl(\w+),")}
FORWARDED = functions("functions.cpp", r"(?<=[\",])([A-Z]\w+)(?=,|\\n)")


def declared(header: Path) -> set[str]:
    code = re.sub(r"/\*[\s\S]*?\*/", "", header.read_text())  # without comments
    return set(re.findall(r"^\s*(?:[\w*]+\s+)+\**(nccl\w+)\s*\(", code, re.MULTILINE))


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)


def test_every_function_of_every_nccl_is_there() -> None:
    assert not FORWARDED & ANSWERED
    for folder in include_folders():
        names = declared(folder / "nccl.h")
        assert len(names) >= 27 and names <= FORWARDED | ANSWERED, folder
        symbols = folder.parent / "symbols"
        if symbols.exists():
            names = set(re.findall(r" [TW] (nccl\w+)$", symbols.read_text(), re.MULTILINE))
            assert len(names) >= 27 and names <= FORWARDED | ANSWERED, folder


@needs_front
def test_the_library_exports_them_and_nothing_else() -> None:
    done = subprocess.run(["nm", "-D", "--defined-only", FRONT], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines() if line.split()[-2].isupper()}
    assert names == FORWARDED | ANSWERED | {"zcomm_front_library"}


def test_what_it_answers_has_the_parameters_of_nccl_h(tmp_path: Path) -> None:
    for folder in include_folders():
        names = sorted(ANSWERED & declared(folder / "nccl.h"))
        lines = ["#include <nccl.h>", '#include "front_parameters.hpp"']
        lines += [f"#define {name} front_{name}" for name in sorted(ANSWERED)]
        lines += ['#include "front/nccl.cpp"', *(f"#undef {name}" for name in sorted(ANSWERED))]
        lines += [f"static_assert(same_parameters(&front_{name}, &{name}));" for name in names]
        (tmp_path / "check.cpp").write_text("\n".join(lines))
        check_compiles(tmp_path / "check.cpp", folder, tmp_path)


@needs_front
@pytest.mark.parametrize("variables", [{}, {"ZCOMM_ALL_REDUCE": "int8:128"}])
def test_a_program_without_nccl_does_not_notice_it(variables: dict[str, str]) -> None:
    pytest.importorskip("torch")
    script = """
import threading, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
values = torch.ones(3)
dist.all_reduce(values)
dist.destroy_process_group()
print(values.tolist(), threading.active_count())
"""
    plain, preloaded = run(script), run(script, LD_PRELOAD=str(FRONT), **variables)
    assert (preloaded.returncode, preloaded.stdout, preloaded.stderr) == (0, plain.stdout, plain.stderr)


ASK = """
import ctypes, sys
library = ctypes.CDLL({name!r})
version, told = ctypes.c_int(0), library.zcomm_front_library
told.restype = ctypes.c_char_p
result = library.ncclGetVersion(ctypes.byref(version))
library.ncclGetErrorString.restype = ctypes.c_char_p
print(result, version.value, told().decode(), library.ncclGetErrorString(5).decode())
"""


@needs_front
def test_it_finds_the_real_library_in_its_own_name_and_in_that_of_nccl(tmp_path: Path) -> None:
    wanted = f"0 22809 {STAND_IN} invalid usage\n"
    assert run(ASK.format(name=str(FRONT)), ZCOMM_NCCL_LIB=str(STAND_IN)).stdout == wanted
    assert run(ASK.format(name=str(FRONT)), LD_LIBRARY_PATH=str(BUILT)).stdout == wanted
    both = {"LD_PRELOAD": f"{FRONT} {STAND_IN}"}
    assert run("import ctypes\n" + ASK.replace("ctypes.CDLL({name!r})", "ctypes.CDLL(None)"), **both).stdout == wanted
    (tmp_path / "libnccl.so.2").symlink_to(FRONT)
    named = {"LD_LIBRARY_PATH": str(tmp_path), "ZCOMM_NCCL_LIB": str(STAND_IN)}
    assert run(ASK.format(name="libnccl.so.2"), **named).stdout == wanted


@needs_front
def test_it_never_takes_itself_for_nccl(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").symlink_to(FRONT)
    for variables in ({}, {"ZCOMM_NCCL_LIB": str(tmp_path / "libnccl.so.2")}):
        done = run(ASK.format(name="libnccl.so.2"), LD_LIBRARY_PATH=str(tmp_path), **variables)
        assert done.stdout.startswith("5 0 ") and done.returncode == 0
        assert "zcomm's front of NCCL has no library to forward to: " in done.stderr


@needs_front
def test_info_tells_whether_it_is_in_force() -> None:
    script = "from zcomm import _nccl; print(_nccl.library_behind_front())"
    assert run(script).stdout == "None\n"
    inside = {"LD_PRELOAD": f"{FRONT} {STAND_IN}", "ZCOMM_NCCL_LIB": str(STAND_IN)}  # torch may bring another NCCL
    assert run(script, **inside).stdout == f"{STAND_IN}\n"


def test_the_command_names_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "__file__", str(tmp_path / "_core.so"))
    monkeypatch.setattr(sys, "argv", ["zcomm", "nccl-front"])
    with pytest.raises(SystemExit, match="this build of zcomm has no front of NCCL"):
        command.main()
    (tmp_path / "libzcomm_nccl.so").touch()
    assert _nccl.front_path() == str(tmp_path / "libzcomm_nccl.so")
