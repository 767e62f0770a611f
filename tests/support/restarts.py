"""Training that begins again at its checkpoint, after a rank was killed between a forward and a backward pass."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from support.training import make_batch, make_model, whole

STEPS, SAVED = 10, 4


def train(folder: Path, killed_at: int) -> None:
    """Train in a world of torchrun's variables, and write to ``end.pt`` what it has come to.

    ``killed_at``: the step in which the last rank kills itself, unless an agent has restarted it. Steps have batches of
    their own, so that a step that is left out or made twice is noticed."""
    checkpoint = folder / "checkpoint"
    begin = SAVED if (checkpoint / ".metadata").exists() else 0  # which is written last
    dist.init_process_group("zcomm")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    for block in [*model, model]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    compression = zcomm.fsdp.compress(model, weights="lossless")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if begin > 0:
        states = get_state_dict(model, optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    for step in range(begin, STEPS):
        inputs, targets = make_batch(step * size + rank)
        loss = (model(inputs).float() - targets).square().mean()
        if step == killed_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED:
            states = get_state_dict(model, optimizer)
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=checkpoint)
    parameters = [whole(parameter) for parameter in model.parameters()]
    if rank == 0:
        generations = [stats.generation for stats in compression.stats().values()]
        torch.save({"begin": begin, "generations": generations, "parameters": parameters}, folder / "end.pt")
    dist.destroy_process_group()
