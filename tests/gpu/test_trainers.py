"""Training on a GPU under zcomm against the same job under NCCL: FSDP2 and DDP, two ranks on one GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.expected import digest
from support.gpu_world import DEVICE, run
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zcomm

pytest.importorskip("typer", reason="examples/train_gpt.py needs typer")
import train_gpt

RANKS, STEPS = 2, 30
WIDTH, LAYERS, SEQUENCE, BATCH = 128, 2, 64, 4
CORPUS_BYTES = 1 << 20
STOCK = "nccl" if DEVICE.type == "cuda" else "gloo"
# As variables, options reach the groups of a mesh, too.
EXACT = {"ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "exact"}
COMPRESSED = {"ZCOMM_MIN_BYTES": "1024", "ZCOMM_NODE_SIZE": "1"}  # gradients as int4, as between nodes
ALL_REDUCED = {**COMPRESSED, "ZCOMM_ALL_REDUCE": "int8:128"}


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return model


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[0] if DEVICE.type == "cuda" else None)


TRAINERS = {"FSDP2": fsdp2, "DDP": ddp}
# In one process of pytest's, where several share the work: both need the same run of the stock backend.
each_trainer = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in TRAINERS]
)


@dataclass
class Result:
    """What a rank saw; losses are the mean over ranks."""

    losses: list[float]
    parameters: str  # a digest of all of them, whole
    calls: dict[str, int]  # that were compressed


@cache
def corpus() -> torch.Tensor:
    return train_gpt.load_corpus()[0][:CORPUS_BYTES]


def train(wrap: Callable[[nn.Module], nn.Module]) -> Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # their backward passes add in any order
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wrap(train_gpt.GPT(WIDTH, LAYERS, SEQUENCE).to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        text = train_gpt.sample(corpus(), BATCH, SEQUENCE, seed=step * size + rank).to(DEVICE)
        loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    means = torch.stack(losses)
    dist.all_reduce(means)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in whole])
    assert flat.isfinite().all()
    return Result((means / size).tolist(), digest(flat.cpu()), compressed_calls(model))


def compressed_calls(model: nn.Module) -> dict[str, int]:
    groups: set[Any] = {dist.group.WORLD}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups |= set(next(module.parameters()).device_mesh.get_all_groups())  # type: ignore[union-attr]
    counts = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for group in groups:
        if dist.get_backend(group) == "zcomm":
            for name in counts:
                counts[name] += getattr(zcomm.stats(group), name).calls
    return counts


def trained(name: str, backend: str, env: dict[str, str]) -> Result:
    """What rank 0 saw; all ranks hold the same parameters at the end."""
    corpus()  # read once, by the parent of the ranks
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **env}
    results = run(lambda: train(TRAINERS[name]), RANKS, backend=backend, env=env, options=None)
    assert len({result.parameters for result in results}) == 1, "replicas differ"
    return results[0]


@pytest.fixture(scope="module")
def stock() -> Callable[[str], Result]:
    """The same job under torch's own backend, run once."""
    return cache(lambda name: trained(name, STOCK, {}))


@each_trainer
def test_training_keeps_its_loss(name: str, stock: Callable[[str], Result]) -> None:
    """Within a hundredth of the loss under NCCL after 30 steps, with weights as int8 and gradients as int4."""
    got, want = trained(name, "zcomm", COMPRESSED if name == "FSDP2" else ALL_REDUCED), stock(name)
    expected = ("all_gather", "reduce_scatter") if name == "FSDP2" else ("all_reduce",)
    assert all(got.calls[collective] >= STEPS for collective in expected), got.calls
    assert got.losses != want.losses, "not compressed at all?"
    assert got.losses[-1] < 0.9 * got.losses[0], got.losses
    assert math.isclose(got.losses[-1], want.losses[-1], rel_tol=0.01), (got.losses[-5:], want.losses[-5:])


@each_trainer
def test_exact_training_is_that_of_the_stock_backend(name: str, stock: Callable[[str], Result]) -> None:
    """With exact formats, and DDP by default: every loss, and the parameters to the last bit."""
    got, want = trained(name, "zcomm", EXACT if name == "FSDP2" else {}), stock(name)
    assert sum(got.calls.values()) == 0
    assert got.losses == want.losses, [(a, b) for a, b in zip(got.losses, want.losses, strict=True) if a != b]
    assert got.parameters == want.parameters
