"""The study's cases of outer steps: two sites, a process each, train the GPT and average what they changed."""

import hashlib
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train_gpt import sample

import zcomm.outer
from bench.convergence.cases import Configuration, Setting
from bench.convergence.model import corpus, learning_rate, new_model, validate

SITES = 2
# Of those tried the best of exact outer steps, over both intervals. Trainings as short as these want less momentum.
OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.4


def inner_optimizers(model: nn.Module, setting: Setting) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks if the setting has it, AdamW for all else."""
    named = list(model.named_parameters())
    matrices = {name: p for name, p in named if setting.muon and "blocks" in name and p.dim() == 2}
    others = [p for name, p in named if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, betas=(0.9, setting.beta2))]
    if matrices:
        # Updates as large as AdamW's, and its weight decay: one learning rate serves both.
        optimizers.append(torch.optim.Muon(matrices.values(), weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def train_site(configuration: Configuration, setting: Setting, seed: int) -> dict[str, Any]:
    """What this process's site has of a run."""
    text, held_out = corpus()
    model = new_model(setting, seed)
    inner = inner_optimizers(model, setting)
    sgd = torch.optim.SGD(model.parameters(), lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    outer = zcomm.outer.OuterStep(
        sgd, every=setting.outer_every, format=configuration.gradients, error_feedback=configuration.feedback
    )
    losses = []
    for step in range(setting.steps):
        number = (seed * setting.steps + step) * SITES + dist.get_rank()
        loss = model(sample(text, setting.batch, setting.sequence, seed=number))
        loss.backward()
        for optimizer in inner:
            optimizer.param_groups[0]["lr"] = learning_rate(setting, step)
            optimizer.step()
            optimizer.zero_grad()
        outer.step()
        losses.append(round(loss.item(), 5))
    outer.synchronize()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "validation_loss": validate(model, held_out, setting) if dist.get_rank() == 0 else None,
        "shards_sha256": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
        "losses": losses,
        "inter_node_bytes": round(outer.stats().sent_bytes / setting.steps),
        "cpu_seconds": time.process_time(),
    }


def run_sites(body: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``body()`` returns at each site, in forks of this process."""
    fork = multiprocessing.get_context("fork")

    def site(rank: int, store: Path, result: Connection) -> None:
        dist.init_process_group("zcomm", store=dist.FileStore(str(store), SITES), rank=rank, world_size=SITES)
        result.send(body())
        dist.barrier()
        dist.destroy_process_group()

    with tempfile.TemporaryDirectory(prefix="zcomm-study-") as folder:
        ours, processes = [], []
        for rank in range(SITES):
            our, their = fork.Pipe(duplex=False)
            processes.append(fork.Process(target=site, args=(rank, Path(folder) / "store", their)))
            processes[-1].start()
            their.close()
            ours.append(our)
        results = [our.recv() for our in ours]  # EOFError: that site has failed, and said why
        for process in processes:
            process.join()
    return results


def train(configuration: Configuration, setting: Setting, seed: int) -> dict[str, Any]:
    """One run, as bench.convergence.run.train returns it. Signal-to-noise ratios are not measured."""
    start = time.perf_counter()
    corpus()  # once, for both forks
    first, *others = run_sites(lambda: train_site(configuration, setting, seed))
    if any(other["shards_sha256"] != first["shards_sha256"] for other in others):
        raise AssertionError("the sites' parameters differ after an outer step")
    return {
        **first,
        "configuration": asdict(configuration),
        "setting": asdict(setting),
        "seed": seed,
        "python": platform.python_version(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "intra_node_bytes": 0,
        "gathered_validation_loss": first["validation_loss"],
        "gradient_snr_db": [],
        "weight_snr_db": [],
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(first["cpu_seconds"] + sum(other["cpu_seconds"] for other in others), 1),
    }
