"""New memory may hold anything. Trainers leave some of it between the values that they send: no value may suffer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.training import loss_of, make_model, sgd
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import zcomm
import zcomm.ddp


def ddp(model: nn.Module) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
    return wrapped


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    for block in [*model, model]:  # type: ignore[misc]
        fully_shard(block, reshard_after_forward=True)
    return model


def fsdp2_with_settings(model: nn.Module) -> nn.Module:
    sharded = fsdp2(model)
    zcomm.fsdp.compress(sharded, exempt=())
    return sharded


@pytest.mark.parametrize("shard", [ddp, fsdp1, fsdp2, fsdp2_with_settings])
@pytest.mark.parametrize("size", [2, 3])
def test_memory_full_of_nan_reaches_no_value(shard: Callable[[nn.Module], nn.Module], size: int) -> None:
    """In a width that no number of ranks divides, so that there is padding."""

    def body() -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        try:
            assert torch.empty(8).isnan().all()
            model = shard(make_model())
            optimizer = sgd(model)
            for _ in range(3):
                loss = loss_of(model, dist.get_rank())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert loss.isfinite()
            for parameter in model.parameters():
                assert getattr(parameter, "_local_tensor", parameter).isfinite().all()
        finally:
            torch.use_deterministic_algorithms(False)
        stats = zcomm.stats()
        assert stats.reduce_scatter.calls + stats.all_reduce.calls > 0

    run(body, size, nodes=[0, 1, 1][:size], options=options(min_bytes=1))
