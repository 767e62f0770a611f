"""A wheel as its user has it: see :func:`try_out`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

TRAINING = Path(__file__).with_name("train_two_ranks.py")
ENTRY_POINT = """
import sys, torch.distributed as dist
find = getattr(dist.Backend, "_ensure_backend_registered", None)  # torch 2.14 looks when the name is first asked for
if find is not None:
    find("zcomm")
assert "ZCOMM" in dist.Backend._plugins, "torch does not know the backend"
assert "zcomm._c10d" not in sys.modules, "the binding was loaded before it was needed"
"""


def try_out(wheels: Sequence[Path], python: Path, release: str, folder: Path) -> None:
    """Installs the wheels beside this release of torch in an empty environment and uses them: see :func:`use`."""
    venv = folder / f"try-{wheels[0].name.split('-')[2]}-{release}"
    shutil.rmtree(venv, ignore_errors=True)
    _run(os.environ["PATH"], python, "-m", "venv", venv)
    _run(os.environ["PATH"], venv / "bin/python", "-m", "pip", "install", "-q", f"torch=={release}")
    use(wheels, venv)
    shutil.rmtree(venv)


def use(wheels: Sequence[Path], venv: Path) -> None:
    """Installs the wheels of zcomm and zcomm-bench in an environment that has torch and uses them from another folder,
    with no compiler in reach: torch finds the backend, two ranks train, ``python -m zcomm info`` shows it, and the
    commands of ``zcomm_bench`` are there. Ends the program where one of these fails."""
    reach, python = str(venv / "bin"), venv / "bin/python"
    _run(reach, python, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheels[0])
    _run(reach, python, "-c", ENTRY_POINT)
    _run(reach, python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAINING)
    _run(reach, python, "-m", "zcomm", "info")
    _run(reach, python, "-m", "pip", "install", "-q", "--only-binary", ":all:", *wheels)
    _run(reach, python, "-m", "zcomm_bench", "--help")


def _run(path: str, *command: str | Path) -> None:
    print("+", *command, flush=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run([str(part) for part in command], cwd=elsewhere, env={**os.environ, "PATH": path})
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} failed, see above")
