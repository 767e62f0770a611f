"""The study's cases of outer steps: two sites, each a process, train the GPT and average what they changed."""

import hashlib
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zcomm
from bench.convergence.cases import Configuration, Setting

SITES = 2
import os
OUTER_LEARNING_RATE, OUTER_MOMENTUM = float(os.environ["OLR"]), float(os.environ["OM"])

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of a model, at a step, of a site's sequences


def inner_optimizers(model: nn.Module, setting: Setting) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks if the setting has it, AdamW for all else."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if setting.muon and "blocks" in name and p.dim() == 2]
    others = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, setting.beta2))]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def train_site(
    model: nn.Module,
    loss_of: Loss,
    learning_rate: Callable[[int], float],
    configuration: Configuration,
    setting: Setting,
) -> dict[str, Any]:
    """Train ``model`` at this process's site; return its losses, and what it sent per inner step."""
    inner = inner_optimizers(model, setting)
    sgd = torch.optim.SGD(model.parameters(), lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    outer = zcomm.outer.OuterStep(
        sgd, every=setting.outer_every, format=configuration.gradients, error_feedback=configuration.feedback
    )
    losses = []
    for step in range(setting.steps):
        loss = loss_of(model, step, dist.get_rank())
        for optimizer in inner:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in inner:
            optimizer.param_groups[0]["lr"] = learning_rate(step)
            optimizer.step()
        outer.step()
        losses.append(round(loss.item(), 5))
    return {"losses": losses, "inter_node_bytes": round(outer.stats().sent_bytes / setting.steps)}


def run_sites(site: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``site()`` returns at the first site. The sites are forks, which must precede torch's threads."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="zcomm-study-") as folder:

        def main(rank: int, results: Any) -> None:
            store = dist.FileStore(str(Path(folder) / "store"), SITES)
            dist.init_process_group("zcomm", store=store, rank=rank, world_size=SITES)
            result = site()
            dist.barrier()
            dist.destroy_process_group()
            results.send(result)

        receiving, processes = [], []
        for rank in range(SITES):
            here, there = fork.Pipe(duplex=False)
            receiving.append(here)
            processes.append(fork.Process(target=main, args=(rank, there)))
            processes[-1].start()
            there.close()
        results = [here.recv() for here in receiving]  # raises EOFError where a site has failed
        for process in processes:
            process.join()
        return results[0]


def record(configuration: Configuration, setting: Setting, seed: int, result: dict[str, Any], model: nn.Module) -> None:
    pass
