"""FSDP2's secondary shards on a GPU, and weights that change in a way that PyTorch does not count."""

from __future__ import annotations

import pytest
import torch
from support.gpu_world import DEVICE, dist, run, synchronize
from support.narrow_weights import narrow
from torch import nn
from torch.distributed.fsdp import fully_shard

from zcomm.fsdp import Compression, compress

TWO_NODES = {"ZCOMM_NODE_SIZE": "1", "ZCOMM_MIN_BYTES": "1"}
BYTES = "bytes, "  # of codes and scales
WEIGHTS = pytest.mark.parametrize("weights", ["int8:256", "lossless", BYTES + "int8:256", BYTES + "lossless"])


def sharded(weights: str) -> tuple[nn.Module, Compression]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)).bfloat16().to(DEVICE)
    if weights.startswith(BYTES):
        narrow(model)
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return model, compress(model, weights=weights.removeprefix(BYTES))


def write(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(2)


@WEIGHTS
@torch.no_grad()
def test_uncounted_changes_are_never_old_weights(weights: str) -> None:
    """On a GPU NaN or an error at once, and then an error; on a CPU the new weights."""

    def body() -> None:
        model, secondary = sharded(weights)
        inputs = torch.ones(4, 256, dtype=torch.bfloat16, device=DEVICE)
        before = model(inputs)
        assert torch.equal(model(inputs), before)
        assert all(stats.gathers_intra_node == 1 for stats in secondary.stats().values())
        write(model)
        if DEVICE.type == "cpu":
            assert torch.equal(model(inputs), 4 * before)
            return
        with pytest.raises(RuntimeError, match=r"weights were modified without a version bump"):
            for _ in range(2):
                got = model(inputs)
                synchronize()
                assert bool(got.isnan().all())

    run(body, 2, env={**TWO_NODES, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, options=None)


@WEIGHTS
@torch.no_grad()
def test_invalidate_after_an_uncounted_change(weights: str) -> None:
    def body() -> None:
        model, secondary = sharded(weights)
        inputs = torch.ones(4, 256, dtype=torch.bfloat16, device=DEVICE)
        before = model(inputs)
        write(model)
        secondary.invalidate()
        for _ in range(2):
            got = model(inputs)
            assert bool(got.isfinite().all()) and not torch.equal(got, before)
        synchronize()
        assert all(stats.gathers_intra_node == 1 for stats in secondary.stats().values())

    run(body, 2, env=TWO_NODES, options=None)
