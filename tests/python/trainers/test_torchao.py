"""torchao's float8 training with all-gathers in float8: the codes cross nodes as lossless differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.training import whole
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.fsdp import compress

pytestmark = pytest.mark.slow
WIDTH, STEPS = 256, 5


@pytest.fixture(autouse=True)
def _torchao() -> None:
    tiny_llama.require("torchao")


def make_model() -> nn.Sequential:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    for module in (model[0], model[2], model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model


def train(model: nn.Module, precomputes_scales: bool) -> tuple[list[float], list[torch.Tensor]]:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(16, WIDTH, generator=generator)).float().square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        if precomputes_scales:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return losses, [whole(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("precomputes_scales", [False, True])
@pytest.mark.parametrize("weights", ["int8:256", "lossless"])
def test_float8_gathers_keep_their_bits_and_cross_nodes_once(weights: Any, precomputes_scales: bool) -> None:
    def body() -> None:
        with zcomm.exact():
            expected = train(make_model(), precomputes_scales)
        model = make_model()
        compression = compress(model, weights=weights, gradients="exact")
        losses, parameters = train(model, precomputes_scales)
        assert losses == expected[0]
        assert all(torch.equal(got, want) for got, want in zip(parameters, expected[1], strict=True))
        for name in "02":
            stats = compression.stats()[name]
            assert (stats.gathers_inter_node, stats.gathers_intra_node) == (STEPS, STEPS), (name, stats)
            if weights == "lossless":
                assert 0 < stats.bits_per_weight < 0.8, (name, stats)

    run(body, 4, nodes=[0, 0, 1, 1], options=options(), seconds=100)
