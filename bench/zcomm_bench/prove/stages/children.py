"""Worlds of their own for what must not touch this one: each rank starts a child, which is the same rank of it.

A rank that is killed takes its launcher's job along, and NCCL reads its variables once in a process.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zcomm_bench.prove.stages.ranks import Ranks

LOG_LINES = 5
# Words with a path, an address, "host<port>" as NCCL has it, "(host, port)" and "[host]:port" as torch has them.
NAMES = re.compile(r"\(\S+, \d+\)|\S*(?:(?<!\w)/|\d\.\d+\.\d+\.\d|<\d+>|\[[\da-f]*:|[\w\]]:\d{4,5}\b)\S*")


def run(ranks: Ranks, program: str, spec: Mapping[str, Any], variables: Mapping[str, str], seconds: float) -> list[Any]:
    """Run `program`, a module that takes a JSON object and a file, on all ranks; returns what each has written there as
    JSON, by rank. One that has written nothing after `seconds` is killed: then there is "ended" in its place."""
    port = [free_port() if ranks.rank == 0 else 0]
    dist.broadcast_object_list(port, 0)
    own = {name: text for name, text in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    own |= {"MASTER_PORT": str(port[0]), **variables}
    with tempfile.TemporaryDirectory() as folder:
        written, log = Path(folder, "written.json"), Path(folder, "log")
        command = [sys.executable, "-m", program, json.dumps(spec), str(written)]
        with log.open("w") as errors:
            child = subprocess.Popen(command, env=own, stdout=errors, stderr=errors)
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                status = None
        if written.exists():
            found = json.loads(written.read_text())
        else:
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            found = {"ended": f"after {seconds:.0f} s" if status is None else f"with status {status}", "log": lines}
    return ranks.of_all(found)


def nameless(error: str) -> str:
    """An error without what names a host or a user. Ranks stay."""
    return NAMES.sub("...", error).replace(socket.gethostname(), "...")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def arguments() -> tuple[dict[str, Any], Path]:
    """Of the program of a child."""
    return json.loads(sys.argv[1]), Path(sys.argv[2])


def write(path: Path, content: Any) -> None:
    """All at once, so that a parent reads the whole or nothing."""
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(content))
    unfinished.rename(path)
