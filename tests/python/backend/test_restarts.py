"""A group after another one over the same store: a second world of a process, and workers that an agent restarts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm

WORKER = """
import os, torch, torch.distributed as dist
dist.init_process_group("zcomm")
rank = dist.get_rank()
whole = torch.zeros(2, 32768)
whole[rank] = rank + 1
dist.all_gather_into_tensor(whole, whole[rank])
assert torch.allclose(whole[:, 0], torch.tensor([1.0, 2.0]), rtol=0.01), whole
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3 + rank)  # nobody says good-bye
dist.destroy_process_group()
"""


def test_workers_that_an_agent_restarts_connect_again(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--master-addr=127.0.0.1", f"--log-dir={tmp_path}", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", str(worker)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]


def _two_worlds(rank: int, path: str, answers: Any) -> None:
    store = dist.FileStore(path, 2)
    for world in range(3):
        dist.init_process_group("zcomm", store=store, rank=rank, world_size=2)
        whole = torch.zeros(2, 32768)
        whole[rank] = 10 * world + rank + 1
        dist.all_gather_into_tensor(whole, whole[rank])
        answers.put((world, rank, whole[:, 0].tolist()))
        dist.destroy_process_group()


def test_a_process_can_make_a_world_again_over_the_same_store(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_two_worlds, args=(rank, str(tmp_path / "store"), answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    got = sorted(answers.get(timeout=120) for _ in range(6))
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    for world, _, values in got:
        assert values == pytest.approx([10 * world + 1, 10 * world + 2], rel=0.01)


def test_a_forked_child_leaves_its_parents_groups_alone(tmp_path: Path) -> None:
    code = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("zcomm", store=dist.HashStore(), rank=0, world_size=1)
child = os.fork()
if child == 0:
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
dist.barrier()
dist.destroy_process_group()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_exact_group_is_not_split_off_a_world_that_is_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    dist.init_process_group("zcomm", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device("cuda", 0)
        seen = []
        made = dist.new_group
        monkeypatch.setattr(
            dist, "new_group", lambda *args, **fields: (seen.append(world.bound_device_id), made(*args, **fields))[1]
        )
        group = zcomm.new_exact_group([0])
        assert seen == [None] and world.bound_device_id == torch.device("cuda", 0)
        assert group._get_backend(torch.device("cpu")).name() == "gloo"
        world.bound_device_id = None
    finally:
        dist.destroy_process_group()
