"""A group after another one over the same store: a second world of a process, and workers that an agent restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import restarts
from support.worlds import run

import zcomm

WORKER = """
import os, torch, torch.distributed as dist
os.environ["ZCOMM_FORMS"] = "in_place"
dist.init_process_group("zcomm")
rank = dist.get_rank()
whole = torch.zeros(2, 32768)
whole[rank] = rank + 1
dist.all_gather_into_tensor(whole, whole[rank])
assert torch.allclose(whole[:, 0], torch.tensor([1.0, 2.0]), rtol=0.01), whole
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(3 + rank)  # nobody says good-bye
dist.destroy_process_group()
os._exit(0)  # at the interpreter's end threads of torch's own abort now and then, which the agent takes for a failure
"""


# Worker 1 fails once all have begun. Worker 0 does not notice: its agent restarts it, and counts no failure.
FAR_WORKER = """
import os, pathlib, sys, time, torch, torch.distributed as dist
os.environ["ZCOMM_FORMS"] = "in_place"
dist.init_process_group("zcomm")
rank = dist.get_rank()
whole = torch.zeros(2, 32768)
whole[rank] = rank + 1
dist.all_gather_into_tensor(whole, whole[rank])
begun = pathlib.Path(sys.argv[1])
if not (begun / "failed").exists():
    (begun / str(rank)).touch()
    if rank == 0:
        time.sleep(3600)
    while len(list(begun.iterdir())) < 2:
        time.sleep(0.05)
    (begun / "failed").touch()
    os._exit(3)
dist.destroy_process_group()
os._exit(0)  # as above
"""


TRAINER = """
import os, pathlib, sys
from support.restarts import train
train(pathlib.Path(sys.argv[1]), killed_at=6)
os._exit(0)  # as above
"""


def agent(folder: Path, program: str, size: int, *options: str) -> list[str]:
    """The command of torchrun, which starts all workers once more if one of them fails."""
    worker = folder / "worker.py"
    worker.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--max-restarts=1"]
    return [*command, f"--log-dir={folder}", "--rdzv-backend=c10d", *options, str(worker)]


def run_agent(folder: Path, program: str, size: int, *arguments: str, **env: str) -> None:
    command = agent(folder, program, size, "--master-addr=127.0.0.1", "--rdzv-endpoint=127.0.0.1:0")
    ended = subprocess.run(
        [*command, *arguments], env={**os.environ, **env}, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.job
@pytest.mark.timeout(300)
def test_workers_that_an_agent_restarts_connect_again(tmp_path: Path) -> None:
    run_agent(tmp_path, WORKER, 2)


@pytest.mark.job
@pytest.mark.timeout(300)
def test_workers_of_two_agents_of_which_one_counts_a_failure_connect_again(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    where = [
        "--nnodes=2",
        f"--rdzv-endpoint={tmp_path / 'agents'}",
        "--rdzv-conf=store_type=file",
        "--local-addr=localhost",
    ]
    command = [*agent(tmp_path, FAR_WORKER, 1, *where), str(begun)]
    agents = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        ends = [process.communicate(timeout=280)[1] for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], "\n".join(end[-3000:] for end in ends)


@pytest.mark.job
@pytest.mark.timeout(400)  # eight processes import torch
def test_training_by_lossless_weights_goes_on_after_a_restart(tmp_path: Path) -> None:
    """A rank is killed between the forward and the backward pass of step 6. All begin again at the checkpoint of step
    4, without what they held, and end with the parameters of a training that nothing has interrupted."""
    env = {"ZCOMM_NODE_SIZE": "2", "ZCOMM_MIN_BYTES": "1"}
    folders = [tmp_path / name for name in ("interrupted", "whole")]
    for folder in folders:
        folder.mkdir()
    path = str(Path(__file__).parents[2])
    run_agent(folders[0], TRAINER, 4, str(folders[0]), OMP_NUM_THREADS="1", PYTHONPATH=path, **env)
    run(lambda: restarts.train(folders[1], killed_at=-1), 4, backend=None, launched=True, env=env)
    interrupted, whole = (torch.load(folder / "end.pt") for folder in folders)
    assert (interrupted["begin"], whole["begin"]) == (4, 0)
    assert (interrupted["generations"], whole["generations"]) == ([6, 6, 6], [10, 10, 10])
    for resumed, expected in zip(interrupted["parameters"], whole["parameters"], strict=True):
        assert torch.equal(resumed, expected)


def _two_worlds(rank: int, path: str, answers: Any) -> None:
    store = dist.FileStore(path, 2)
    for world in range(3):
        options = zcomm.Options(forms="in_place")
        dist.init_process_group("zcomm", store=store, rank=rank, world_size=2, pg_options=options)
        whole = torch.zeros(2, 32768)
        whole[rank] = 10 * world + rank + 1
        dist.all_gather_into_tensor(whole, whole[rank])
        answers.put((world, rank, whole[:, 0].tolist()))
        dist.destroy_process_group()


@pytest.mark.job
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


def test_an_exact_group_is_not_split_off_a_world_that_is_bound_to_a_device() -> None:
    def body() -> None:
        world: Any = dist.group.WORLD
        world.bound_device_id = torch.device("cuda", 0)
        seen = []

        def watched(*args: Any, **fields: Any) -> Any:
            seen.append(world.bound_device_id)
            return made(*args, **fields)

        distributed: Any = dist
        made, distributed.new_group = dist.new_group, watched
        group: Any = zcomm.distributed.new_exact_group([0])
        assert seen == [None] and world.bound_device_id == torch.device("cuda", 0)
        assert group._get_backend(torch.device("cpu")).name() == "gloo"
        world.bound_device_id = None

    run(body, 1)
