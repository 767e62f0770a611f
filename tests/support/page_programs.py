"""Runs the program of a page by the command that the page prints below it, and compares what it writes with the output
that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from zcomm_bench.prove.stages.children import free_port

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "trainers"


@dataclass(frozen=True)
class Printed:
    """The first Python block of a page, and the first block that begins with a prompt: a command and its output."""

    program: str
    command: str
    output: str

    @classmethod
    def of(cls, page: str) -> Printed:
        text = (PAGES / f"{page}.md").read_text()
        program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        shown = re.search(r"```\n\$ (.*?)\n(.*?)```", text, re.DOTALL)
        assert program and shown, f"{page}.md: expected a program, and below it a command with its output"
        return cls(program[1], shown[1], shown[2])

    @property
    def compressed(self) -> tuple[str, ...]:
        """The collectives in the first table of the output."""
        return tuple(re.findall(r"^(\w+) +\d+ ", self.output.split("left exact")[0], re.MULTILINE))

    def run(self, folder: Path, **env: str) -> str:
        """Run the command in ``folder``, where the program has the name that the command gives it."""
        (folder / re.findall(r"\w+\.py\b", self.command)[-1]).write_text(self.program)
        return execute(self.command, folder, **env)


def execute(command: str, folder: Path, **env: str) -> str:
    """Run a command of the shell with this Python's tools and without the user's settings; return what it wrote."""
    # DeepSpeed would compile an operation for inference, for minutes, that training does not use.
    (folder / "sitecustomize.py").write_text(
        "import sys, types\n"
        "ops = types.ModuleType('deepspeed.ops.op_builder.all_ops')\n"
        "ops.ALL_OPS = {}\n"
        "sys.modules[ops.__name__] = ops\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZCOMM_")}
    environment |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [env.pop("PYTHONPATH", "")])]),
        "PET_MASTER_PORT": str(free_port()),  # torchrun's own is one port for all jobs of a host
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        **env,
    }
    done = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=folder, capture_output=True, text=True, timeout=400
    )
    written = done.stdout + done.stderr
    assert done.returncode == 0, written
    return written


def assert_shown(printed: Printed, written: str) -> None:
    """All that the page shows was written: collectives, calls, bytes, ratios; times differ from run to run."""
    ours = [" ".join(line.split()) for line in written.splitlines()]
    for line in printed.output.splitlines():
        wanted = re.escape(" ".join(re.sub(r"\b[\d.]+ (ns|us|ms|s)\b", "TIME", line).split()))
        pattern = wanted.replace(re.escape("..."), ".*").replace("TIME", r"[\d.]+ (ns|us|ms|s)")
        # Ray names the worker before each line.
        assert any(re.fullmatch(rf"(\S*\(.*\)\S* )?{pattern}", one) for one in ours), f"not written: {line}\n{written}"


# What a ring of exact calls sends from each of two ranks, as parts of the tensors. First broadcasts do not count.
RING = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0}
MEBIBYTES = {"B": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0}


def sent(written: str) -> tuple[float, float]:
    """MiB of weights and gradients that rank 0 of 2 sends by its statistics: by exact calls alone, and in truth."""
    found = re.search(r"^zcomm, rank 0 of 2 .*\n((?:(?:compressed|left exact|\w+) .*\n)*)", written, re.MULTILINE)
    assert found, written
    exact = true = 0.0
    compressed = True
    for line in found[1].splitlines():
        compressed &= not line.startswith("left exact")
        sizes = [float(size) * MEBIBYTES[unit] for size, unit in re.findall(r"([\d.]+) (B|KiB|MiB)\b", line)]
        if sizes:  # of the tensors; and of compressed calls what is sent in the node, and between nodes
            ring = RING.get(line.split()[0], 0.0) * sizes[0]
            exact, true = exact + ring, true + (sum(sizes[1:3]) if compressed else ring)
    return exact, true


def stated(page: str, row: str) -> list[float]:
    """The numbers in the last cell of the row that begins so, in a table of the page."""
    (line,) = [line for line in (PAGES / f"{page}.md").read_text().splitlines() if line.startswith(f"| {row} |")]
    return [float(number) for number in re.findall(r"[\d.]+", re.sub("`.*?`", "", line.split("|")[-2]))]
