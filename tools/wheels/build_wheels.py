"""Builds one wheel per Python: the core once, and a binding for each minor version of torch. `make wheels` runs it.

Needs g++ and, per Python, its headers and venv. torch's headers and libraries come from its wheels, which pip downloads
once into build/torch. The wheels load on systems with glibc 2.28 and the libstdc++ of GCC 7: see old_abi.py.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import check_wheel
import old_abi
import wheel_environment

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# The last release of each minor version.
TORCH_RELEASES = ["2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
TOOLS = ["scikit-build-core>=0.10", "cmake>=3.25", "ninja", "wheel"]
PLATFORM = "manylinux_2_28_x86_64"
_TORCH_LIBRARIES = ["c10", "torch_cpu", "torch_python"]


def run(*command: str | Path) -> None:
    """Run a program. Ends this one with its error if it fails."""
    print("+", *command, flush=True)
    if subprocess.run([str(part) for part in command], cwd=ROOT).returncode:
        raise SystemExit(f"{Path(command[0]).name} failed: see above")


def find_python(version: str) -> Path | None:
    """An interpreter of this version with headers and venv: in PATH, or among pyenv's."""
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    needed = (
        "import sys, os, sysconfig, venv, ensurepip; os.stat(sysconfig.get_paths()['include'] + '/Python.h'); "
        f"sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    )
    for candidate in filter(None, candidates):
        if subprocess.run([candidate, "-c", needed], capture_output=True).returncode == 0:
            return Path(candidate)
    return None


def torch_folder(release: str) -> Path:
    """What a binding for this release is built with: its headers and the libraries that the binding links."""
    folder = BUILD / "torch" / release / "torch"
    if folder.is_dir():
        return folder
    download = BUILD / "torch" / "download"
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", download,
        f"torch=={release}")  # fmt: skip
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
    least = re.search(r"^Requires-Python: >=3\.(\d+)", metadata.read_text(), re.MULTILINE)
    return least is None or int(python.split(".")[1]) >= int(least[1])


def build(python: Path, version: str, torches: list[Path], variables: dict[str, str], out: Path) -> Path:
    """The wheel of one Python, checked and named after the systems that it loads on."""
    work = BUILD / "wheels"
    venv, raw = work / f"venv-{version}", work / f"raw-{version}"
    if not venv.is_dir():
        run(python, "-m", "venv", venv)
        run(venv / "bin/python", "-m", "pip", "install", "-q", "--upgrade", "pip", *TOOLS)
    shutil.rmtree(raw, ignore_errors=True)
    # One folder for all Pythons, so that the core is compiled once. What CMake knows of the last Python goes.
    (work / "cmake/CMakeCache.txt").unlink(missing_ok=True)
    variables = {**variables, "ZCOMM_TORCH": ";".join(str(torch) for torch in torches)}
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in variables.items()]
    run(venv / "bin/python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", raw,
        f"--config-settings=build-dir={work / 'cmake'}", *settings, ROOT)  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    check_wheel.check(wheel, {torch.parent.name: torch for torch in torches})
    run(venv / "bin/python", "-m", "wheel", "tags", "--remove", "--platform-tag", PLATFORM, wheel)
    (wheel,) = raw.glob("*.whl")
    return wheel.rename(out / wheel.name)


def build_sdist(out: Path, python: Path) -> None:
    """What pip builds from where no wheel fits."""
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(out)!r}))"
    run(python, "-c", code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="versions, e.g. 3.11")
    parser.add_argument("--torch", nargs="+", default=TORCH_RELEASES, help="releases, e.g. 2.13.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--try", nargs="*", dest="tried", help="releases to try each wheel with; default: the newest")
    parser.add_argument("--no-cuda", action="store_true", help="without the GPU side, where nvcc is")
    arguments = parser.parse_args()

    pythons = {version: find_python(version) for version in arguments.python}
    left_out = [version for version, python in pythons.items() if python is None]
    torches = [torch_folder(release) for release in arguments.torch]
    variables = old_abi.write(BUILD / "wheels/old_abi")
    if arguments.no_cuda:
        variables["ZCOMM_CUDA"] = "OFF"
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wheels = []
    for version, python in pythons.items():
        if python is not None:
            own = [torch for torch in torches if serves(torch, version)]
            wheels.append(build(python, version, own, variables, out))
            newest = [own[-1].parent.name]
            for release in newest if arguments.tried is None else arguments.tried:
                wheel_environment.try_out(wheels[-1], python, release, BUILD / "wheels")
    if not wheels:
        raise SystemExit(f"expected a Python of {', '.join(arguments.python)} with headers and venv, got none")
    build_sdist(out, BUILD / f"wheels/venv-{next(v for v, python in pythons.items() if python)}/bin/python")
    for wheel in wheels:
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
    if left_out:
        print(f"left out, as there is no such Python here: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
