"""A wheel as its user has it: see :func:`try_out`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
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


def try_out(wheel: Path, python: Path, release: str, folder: Path) -> None:
    """Installs the wheel beside this release of torch in an empty environment and uses it from another folder, with no
    compiler in reach: torch finds the backend, two ranks train, ``python -m zcomm info`` shows it. Ends the program
    where one of these fails."""
    venv = folder / f"try-{wheel.name.split('-')[2]}-{release}"
    shutil.rmtree(venv, ignore_errors=True)

    def run(*command: str | Path, reach: str = str(venv / "bin")) -> None:
        print("+", *command, flush=True)
        environment = {**os.environ, "PATH": reach}
        with tempfile.TemporaryDirectory() as elsewhere:
            done = subprocess.run([str(part) for part in command], cwd=elsewhere, env=environment)
        if done.returncode:
            raise SystemExit(f"{wheel.name} with torch {release}: {Path(command[0]).name} failed, see above")

    own = venv / "bin/python"
    everything = os.environ["PATH"]
    run(python, "-m", "venv", venv, reach=everything)
    run(own, "-m", "pip", "install", "-q", f"torch=={release}", reach=everything)
    run(own, "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel)
    run(own, "-c", ENTRY_POINT)
    run(own, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAINING)
    run(own, "-m", "pip", "install", "-q", "--only-binary", ":all:", f"{wheel}[bench]")
    run(own, "-m", "zcomm", "info")
    shutil.rmtree(venv)
