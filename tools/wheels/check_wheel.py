"""What a wheel must hold to be worth its name: see :func:`check`."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import old_abi

LARGEST_BYTES = 25_000_000
# What is on any Linux system of the wheel's tag, and what torch brings and has loaded already.
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*\.so\.\d+")
_TORCH = re.compile(r"lib(c10|torch_cpu|torch_python)\.so")
_OWN = {"libzcomm_core.so", "libzcomm_nccl.so"}


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def _symbols(library: Path) -> tuple[set[str], set[str]]:
    """What a library needs and what it gives, each as symbol or symbol@version."""
    needs, gives = set(), set()
    for line in _run("readelf", "--dyn-syms", "-W", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
            (needs if fields[6] == "UND" and fields[4] != "WEAK" else gives).add(fields[7].replace("@@", "@"))
    return needs, gives


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-d", library))


def _check_library(library: Path, torch_gives: set[str], core_gives: set[str]) -> None:
    for name in _needed(library):
        if not _SYSTEM.fullmatch(name) and name not in _OWN and not (_TORCH.fullmatch(name) and torch_gives):
            raise SystemExit(f"{library.name}: expected libraries of the system or of torch, got {name}")
    for symbol in sorted(_symbols(library)[0]):
        name, _, version = symbol.partition("@")
        if version and old_abi.is_too_new(version):
            raise SystemExit(f"{library.name}: expected symbols of older systems, got {symbol}")
        if not version and name not in core_gives and name not in torch_gives and not re.match("_?Py", name):
            raise SystemExit(f"{library.name}: nobody has the symbol {name}")


def _check_metadata(text: str) -> None:
    for requirement in Parser().parsestr(text).get_all("Requires-Dist", []):
        if re.match("torch|nvidia|cuda", requirement) and "extra ==" not in requirement:
            raise SystemExit(f"expected no requirement of torch or CUDA, got {requirement}")


def _check_machine(library: Path, machine: str) -> None:
    header = _run("readelf", "-h", library).lower().replace("-", "_")
    if machine not in header or (library.name not in _OWN and f"{machine}-linux-gnu" not in library.name):
        raise SystemExit(f"{library.name}: expected a library for {machine}, and its name in that of a module")


def check(wheel: Path, torches: dict[str, Path], cuda: bool, machine: str) -> None:
    """Ends the program with the reason if the wheel is too large, holds another project's library or pins torch; if one
    of its libraries is for another machine or needs a symbol that older systems lack; if a binding is missing or its
    torch lacks a symbol; or if it has no kernels for GPUs and should, or has some and should not."""
    if wheel.stat().st_size > LARGEST_BYTES:
        raise SystemExit(f"{wheel.name}: expected at most {LARGEST_BYTES} bytes, got {wheel.stat().st_size}")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        libraries = {path.name.split(".")[0]: path for path in Path(folder).rglob("*.so*")}
        bindings = {f"_c10d_{'_'.join(release.split('.')[:2])}": torch for release, torch in torches.items()}
        expected = {"libzcomm_core", "_core", *bindings, *(["libzcomm_nccl"] if cuda else [])}
        if set(libraries) != expected:
            raise SystemExit(f"{wheel.name}: expected libraries {sorted(expected)}, got {sorted(libraries)}")
        (metadata,) = Path(folder).glob("*.dist-info/METADATA")
        _check_metadata(metadata.read_text())
        core_gives = _symbols(libraries["libzcomm_core"])[1]
        if (".nv_fatbin" in _run("readelf", "-S", "-W", libraries["libzcomm_core"])) != cuda:
            raise SystemExit(f"{wheel.name}: expected {'kernels' if cuda else 'no kernels'} for GPUs")
        for name, library in libraries.items():
            torch_gives: set[str] = set()
            for torch_library in (bindings[name] / "lib").glob("lib*.so") if name in bindings else []:
                torch_gives |= _symbols(torch_library)[1]
            _check_machine(library, machine)
            _check_library(library, torch_gives, core_gives)
    megabytes = wheel.stat().st_size / 1e6
    print(f"{wheel.name}: {len(bindings)} bindings, {megabytes:.1f} MB, symbols of manylinux_2_28 or older")
