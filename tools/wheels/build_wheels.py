"""Builds the sdist, and from it one wheel per Python: the core once, and a binding for each minor version of torch.
Then the wheel of zcomm-bench, which all of them share.

`make wheels` runs it. It needs g++ and, per Python, its headers and venv; with nvcc, in PATH or as CUDACXX, the wheels
have the GPU side. torch's headers and libraries come from its wheels, which pip downloads once into build/torch. The
wheels load on systems with glibc 2.28 and the libstdc++ of GCC 7: see old_abi.py.

`--machine aarch64` cross-compiles, without the GPU side, with the headers of this machine's Pythons: those of the other
one differ in nothing that an extension reads.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import check_wheel
import old_abi
import wheel_environment

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
WORK = BUILD / "wheels"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"]
# torch is downloaded for this one, as its headers are the same for all: every release of the list serves it.
TORCH_PYTHON = "3.14"
# The last release of each minor version.
TORCH_RELEASES = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
TOOLS = ["scikit-build-core>=0.10", "cmake>=3.25", "ninja", "wheel"]
_TORCH_LIBRARIES = ["c10", "torch_cpu", "torch_python"]


def platform_of(machine: str) -> str:
    """The systems that a wheel loads on, as its name has them."""
    return f"manylinux_2_28_{machine}"


def run(*command: str | Path, remedy: str = "") -> None:
    """Run a program. Ends this one with its error if it fails, and with what helps."""
    print("+", *command, flush=True)
    if subprocess.run([str(part) for part in command], cwd=ROOT).returncode:
        raise SystemExit(f"{Path(command[0]).name} failed: see above. {remedy}".rstrip())


def find_python(version: str) -> Path | None:
    """An interpreter of this version with headers, venv and the GIL: in PATH, or among pyenv's."""
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    needed = (
        "import sys, os, sysconfig, venv, ensurepip; os.stat(sysconfig.get_paths()['include'] + '/Python.h'); "
        f"sys.exit('%d.%d' % sys.version_info[:2] != '{version}' or sysconfig.get_config_var('Py_GIL_DISABLED') == 1)"
    )
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", needed], capture_output=True).returncode == 0:
            return Path(candidate)
    return None


def environment(python: Path, version: str) -> Path:
    """The interpreter of an environment with what builds a wheel."""
    venv = WORK / f"venv-{version}"
    if not (venv / ".ready").exists():
        shutil.rmtree(venv, ignore_errors=True)
        run(python, "-m", "venv", venv)
        run(venv / "bin/python", "-m", "pip", "install", "-q", "--upgrade", "pip", *TOOLS)
        (venv / ".ready").touch()
    return venv / "bin/python"


def torch_folder(release: str, machine: str, pip: Path) -> Path:
    """What a binding for this release is built with: its headers and the libraries that the binding links."""
    folder = BUILD / "torch" / machine / release / "torch"
    if folder.is_dir():
        return folder
    download = BUILD / "torch" / "download"
    shutil.rmtree(download, ignore_errors=True)
    run(pip, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--python-version", TORCH_PYTHON,
        "--platform", platform_of(machine), "-d", download, f"torch=={release}",
        remedy="--torch names the releases to build for: a wheel has no binding for others.")  # fmt: skip
    (wheel,) = download.glob("torch-*.whl")
    libraries = {f"torch/lib/lib{name}.so" for name in _TORCH_LIBRARIES}
    unpacked = folder.parent.with_name(f"{release}.unpacked")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name.startswith("torch/include/") or name in libraries or name.endswith(("torch/version.py", "METADATA"))
        ]
        archive.extractall(unpacked, wanted)
    wheel.unlink()
    unpacked.rename(folder.parent)
    return folder


def serves(torch: Path, python: str) -> bool:
    """Whether this torch is released for this Python."""
    (metadata,) = torch.parent.glob("torch-*.dist-info/METADATA")
    line = f"Classifier: Programming Language :: Python :: {re.escape(python)}$"
    return re.search(line, metadata.read_text(), re.MULTILINE) is not None


def build_sdist(python: Path, out: Path) -> Path:
    """What pip builds from where no wheel fits. Returns the folder that the wheels are built in: what the sdist lacks
    fails them."""
    folder = WORK / "sdist"
    # All files of an sdist have one date, so ninja would see no change.
    for earlier in (folder, *WORK.glob("cmake-*")):
        shutil.rmtree(earlier, ignore_errors=True)
    folder.mkdir()
    run(python, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})")
    (sdist,) = folder.iterdir()
    run("tar", "-xf", sdist, "-C", folder)
    shutil.move(sdist, out / sdist.name)
    (source,) = folder.iterdir()
    return source


def variables_of(machine: str, cuda: bool) -> dict[str, str]:
    """The CMake variables of all wheels for a machine."""
    compiler = "" if machine == platform.machine() else f"{machine}-linux-gnu-"
    variables = old_abi.write(WORK / f"old_abi-{machine}", compiler)
    if compiler:
        variables |= {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": machine}
        variables["CMAKE_CXX_COMPILER"] = f"{compiler}g++"
    return {**variables, "ZCOMM_CUDA": "ON" if cuda else "OFF"}


def build(source: Path, python: Path, machine: str, torches: list[Path], variables: dict[str, str], out: Path) -> Path:
    """The wheel of one Python, checked and named after the systems that it loads on."""
    raw, cmake = WORK / "raw", WORK / f"cmake-{machine}"
    shutil.rmtree(raw, ignore_errors=True)
    # One folder for all Pythons, so that the core is compiled once. What CMake knows of the last Python goes.
    (cmake / "CMakeCache.txt").unlink(missing_ok=True)
    variables = {**variables, "ZCOMM_TORCH": ";".join(str(torch) for torch in torches)}
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in variables.items()]
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", raw,
        f"--config-settings=build-dir={cmake}", *settings, source)  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    bindings = {torch.parent.name: torch for torch in torches}
    check_wheel.check(wheel, bindings, variables["ZCOMM_CUDA"] == "ON", machine)
    run(python, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_of(machine), wheel)
    (wheel,) = raw.glob("*.whl")
    return Path(shutil.move(wheel, out / wheel.name))


def build_bench(source: Path, python: Path, out: Path) -> Path:
    """The wheel of zcomm-bench, which is the same for all Pythons and torches."""
    raw = WORK / "raw-bench"
    shutil.rmtree(raw, ignore_errors=True)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", raw, source / "bench")
    (wheel,) = raw.iterdir()
    return Path(shutil.move(wheel, out / wheel.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions, e.g. 3.11")
    parser.add_argument("--torch", nargs="+", default=TORCH_RELEASES, help="releases, e.g. 2.13.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--try", nargs="*", dest="tried", help="releases to try each wheel with; default: the newest")
    parser.add_argument("--no-cuda", action="store_true", help="without the GPU side, where nvcc is")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64; another one is not tried")
    arguments = parser.parse_args()
    machine, is_native = arguments.machine, arguments.machine == platform.machine()
    if set(arguments.tried or []) - set(arguments.torch):
        parser.error(f"expected --try to name releases of {' '.join(arguments.torch)}, got {' '.join(arguments.tried)}")

    found = {version: python for version in arguments.python if (python := find_python(version))}
    left_out = [f"Python {v}: none here with headers, venv and the GIL" for v in arguments.python if v not in found]
    if not found:
        raise SystemExit(f"expected a Python of {', '.join(arguments.python)} with headers, venv and the GIL, got none")
    pythons = {version: environment(python, version) for version, python in found.items()}
    torches = [torch_folder(release, machine, next(iter(pythons.values()))) for release in arguments.torch]

    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not is_native:
        left_out.append(f"the GPU side, and a try of the wheels: this machine is no {machine}")
    elif not nvcc and not arguments.no_cuda:
        left_out.append("the GPU side: no nvcc in PATH or as CUDACXX")
    variables = variables_of(machine, bool(nvcc) and not arguments.no_cuda and is_native)
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    source = build_sdist(next(iter(pythons.values())), out)
    bench = build_bench(source, next(iter(pythons.values())), out)
    wheels = [bench]
    for version, python in pythons.items():
        own = [torch for torch in torches if serves(torch, version)]
        releases = [torch.parent.name for torch in own]
        if not own:
            raise SystemExit(f"expected a torch released for Python {version}, got {', '.join(arguments.torch)}")
        left_out += [f"torch {r} for Python {version}: not released" for r in arguments.torch if r not in releases]
        wheels.append(build(source, python, machine, own, variables, out))
        tried = releases[-1:] if arguments.tried is None else [r for r in arguments.tried if r in releases]
        for release in tried if is_native else []:
            wheel_environment.try_out([wheels[-1], bench], found[version], release, WORK)
    for wheel in wheels:
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
    for what in left_out:
        print(f"left out: {what}")


if __name__ == "__main__":
    main()
