"""The commands of docs/jobs.md start a training on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcomm_bench.lab.network import NetLab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = Path(__file__).parents[3] / "docs" / "jobs.md"
TRAINING = """
import os
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import zcomm

dist.init_process_group("zcomm")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(2)))
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for module in [*model, model]:
    fully_shard(module, mesh=mesh)
for _ in range(2):
    model(torch.randn(4, 256)).sum().backward()
gathers = zcomm.stats().all_gather
sent = gathers.intra_node_bytes > 0, gathers.inter_node_bytes > 0
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {sent[0]} {sent[1]}")
dist.destroy_process_group()
"""
# Ranks of the same node were found, and ranks of another one.
EXPECTED = {f"rank {rank} of 4: True True" for rank in range(4)}


def command_of(section: str) -> str:
    """The first shell command of a section of the page."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    assert found, section
    return found[1]


def run_on_two_hosts(lab: NetLab, folder: Path, commands: list[str], env: list[dict[str, str]]) -> set[str]:
    """Run the commands, one per host, in ``folder``, where train.py is; return the lines that the ranks wrote."""
    (folder / "train.py").write_text(TRAINING)
    torchrun = folder / "torchrun"  # runs this Python
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    common = {"PATH": f"{folder}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": lab.interface, "OMP_NUM_THREADS": "1"}
    agents = [
        lab.popen(
            host,
            ["bash", "-c", command],
            {**common, **own},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for host, (command, own) in enumerate(zip(commands, env, strict=True))
    ]
    written = [agent.communicate(timeout=300)[0] for agent in agents]
    assert not any(agent.returncode for agent in agents), "\n".join(written)
    return {line for line in "\n".join(written).splitlines() if line.startswith("rank ")}


@pytest.fixture
def lab() -> Iterator[NetLab]:
    with NetLab(2) as made:
        if not made.isolated:
            pytest.skip(f"needs network namespaces: {made.note}")
        yield made


def test_torchrun_on_two_hosts(lab: NetLab, tmp_path: Path) -> None:
    command = (
        command_of("torchrun").replace("host0", lab.addresses[0]).replace("--nproc-per-node 8", "--nproc-per-node 2")
    )
    # The hosts of the lab share one name, from which an agent tells whether it is host0: here each is told.
    options = [f"--local-addr {address} --rdzv-conf is_host={host == 0}" for host, address in enumerate(lab.addresses)]
    commands = [command.replace("torchrun", f"torchrun {words}", 1) for words in options]
    assert run_on_two_hosts(lab, tmp_path, commands, [{}, {}]) == EXPECTED


def test_the_variables_of_kubeflow(lab: NetLab, tmp_path: Path) -> None:
    """torchrun without arguments, in the environment that the training operator makes."""
    (command,) = re.findall(r'command: \["torchrun", "train.py"\]', PAGE.read_text())
    assert command
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": lab.addresses[0],
        "PET_MASTER_PORT": "29400",
    }
    env = [{**common, "PET_NODE_RANK": str(rank)} for rank in range(2)]
    assert run_on_two_hosts(lab, tmp_path, ["torchrun train.py"] * 2, env) == EXPECTED
