"""FSDP2 on a GPU: lossless weights train as exact ones do, and fused steps have the bits of copied ones."""

from __future__ import annotations

import pytest
import torch
from support.gpu_world import DEVICE, dist, run, synchronize, zcomm
from support.training import make_batch, make_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from zcomm.fsdp import compress

STEPS, FROZEN = 12, 1
TWO_NODES = {"ZCOMM_NODE_SIZE": "1", "ZCOMM_MIN_BYTES": "1"}


def sharded() -> nn.Sequential:
    model = make_model().to(DEVICE)
    model[FROZEN].requires_grad_(False)
    mesh = dist.init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for block in [*model, model]:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model


def train(model: nn.Module, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            inputs, targets = (each.to(DEVICE) for each in make_batch(dist.get_rank()))
            loss = (model(inputs).float() - targets).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [p.detach().cpu() for p in whole]


def test_training_equals_that_with_exact_weights_and_the_host_waits_once_for_a_step() -> None:
    def body() -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        with zcomm.override(all_gather="exact", reduce_scatter="exact"):
            exact = sharded()
            expected = train(exact)
        model = sharded()
        secondary = compress(model, weights="lossless")
        with zcomm.override(reduce_scatter="exact"):
            losses = train(model)
        synchronize()
        assert losses == expected
        pairs = zip(whole_parameters(model), whole_parameters(exact), strict=True)
        assert all(torch.equal(got, want) for got, want in pairs)
        stats = secondary.stats()
        for name, one in stats.items():
            across = 1 if name == str(FROZEN) else STEPS
            assert (one.gathers_inter_node, one.generation, one.gathers_plain) == (across, across, 0), (name, one)
        # Each module by itself in the first step, then once for all.
        group = model[0][0].weight.device_mesh.get_group()
        waits = zcomm.stats(group).all_gather.host_waits
        assert waits == (len(stats) + STEPS - 1 if DEVICE.type == "cuda" else 0)

    run(body, 2, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **TWO_NODES}, options=None)


@pytest.mark.cuda_only
def test_a_stray_write_is_found() -> None:
    def body() -> None:
        model = sharded()
        secondary = compress(model, weights="lossless")
        train(model, steps=2)
        synchronize()
        if dist.get_rank() == 0:
            secondary._in_force()[0].secondary.memory[20] ^= 1
        with pytest.raises(RuntimeError, match=r"differences of slot \d: .*generation"):
            for _ in range(50):
                train(model, steps=1)
                synchronize()
        # A process that ends takes those of its peers along that are in an exact call of NCCL's.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"found {dist.get_rank()}", "")
        store.wait([f"found {rank}" for rank in range(dist.get_world_size())])

    run(body, 2, env={**TWO_NODES, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, options=None, group_seconds=20.0)


def test_fused_steps_have_the_bits_of_copied_ones() -> None:
    def body() -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        results = []
        for fused in (True, False):
            model = sharded()
            compression = compress(model, weights="int8:256", gradients="int8:128/int4:64", fused=fused)
            results.append((train(model), whole_parameters(model)))
            stats = compression.stats()
            assert all(one.reduces_fused == (one.reduces if fused else 0) for one in stats.values()), stats
            assert all(one.gathers_fused == (one.gathers if fused else 0) for one in stats.values()), stats
            assert all(one.reduces > 0 for name, one in stats.items() if name != str(FROZEN)), stats
        (losses, fused_parameters), (expected, copied_parameters) = results
        assert losses == expected
        assert all(torch.equal(got, want) for got, want in zip(fused_parameters, copied_parameters, strict=True))

    run(body, 2, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **TWO_NODES}, options=None)
