"""How the libraries of an installation are linked and compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import zcomm._core as _core

LIBRARIES = sorted(Path(str(_core.__file__)).parent.glob("*.so"))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="binutils are not installed")
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name.split(".")[0])
def test_libraries_are_hardened(library: Path) -> None:
    """Addresses of functions are resolved at the start, and read-only from then on; functions check their stacks."""
    if library.read_bytes()[:4] != b"\x7fELF":
        pytest.skip("not ELF")

    def read(*options: str) -> str:
        return subprocess.run(["readelf", "-W", *options, library], capture_output=True, text=True, check=True).stdout

    assert "GNU_RELRO" in read("-l") and "BIND_NOW" in read("-d")
    symbols = read("--dyn-syms")
    assert "__stack_chk_fail" in symbols or "__asan_init" in symbols or "__tsan_init" in symbols
