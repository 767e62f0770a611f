"""Weights that FSDP2 gathers as bytes, codes and their scales: kept in nodes, and sent as lossless differences."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import logged
from support.narrow_weights import narrow
from support.training import whole
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.fsdp import Compression, compress

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDTH, STEPS = 96, 6  # rows that 2, 3 and 4 ranks divide, as extensions of FSDP2 need


def make_model(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(width, 3))
    narrow(model)
    for block in [*model, model]:
        fully_shard(block, mp_policy=BF16)
    return model


def train(model: nn.Module, steps: int = STEPS, lr: float = 1e-3) -> tuple[list[float], list[torch.Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    losses = []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for _ in range(2):  # micro-batches
            inputs = torch.randn(8, WIDTH, generator=generator)
            loss = (model(inputs).float() - inputs[:, :3].sin()).square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [whole(parameter) for parameter in model.parameters()]


def expected(**settings: Any) -> tuple[list[float], list[torch.Tensor]]:
    with zcomm.exact():
        return train(make_model(), **settings)


def compressed(model: nn.Module, weights: Any, **settings: Any) -> Compression:
    compression = compress(model, weights=weights, gradients="exact", **settings)
    compress(model[2], weights="exact", gradients="exact")  # gathered as bfloat16
    return compression


def assert_same(one: tuple[list[float], list[torch.Tensor]], other: tuple[list[float], list[torch.Tensor]]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 2], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("weights", ["int8:256", "lossless"])
def test_bytes_cross_nodes_once_for_a_step_and_the_training_is_that_with_exact_weights(
    weights: Any, nodes: list[int]
) -> None:
    def body() -> None:
        model = make_model()
        compression = compressed(model, weights)
        assert_same(train(model), expected())
        for name, stats in compression.stats().items():
            assert (stats.gathers_inter_node, stats.gathers_intra_node) == (STEPS, 3 * STEPS), (name, stats)
            assert stats.gathers_plain == 0
            assert stats.generation == (STEPS if weights == "lossless" else 0)

    run(body, len(nodes), nodes=nodes, options=options(), seconds=100)


def test_at_a_small_rate_differences_take_a_tenth_of_the_bytes() -> None:
    def body() -> None:
        sent = {}
        for weights in ("int8:256", "lossless"):
            model = make_model()
            compression = compressed(model, weights)
            train(model, steps=1, lr=1e-5)
            before = compression.stats()
            train(model, steps=4, lr=1e-5)
            after = compression.stats()
            sent[weights] = {
                name: after[name].gathered_inter_node_bytes - before[name].gathered_inter_node_bytes for name in "01"
            }
        for name in "01":
            assert sent["lossless"][name] < 0.1 * sent["int8:256"][name], sent
        assert after["0"].bits_per_weight < 0.8

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_where_they_are_left_to_torch() -> None:
    """In one node there is nothing to keep; below the smallest size, and by the user's word, calls stay torch's."""

    def body(context: Any) -> None:
        model = make_model()
        compression = compressed(model, "lossless")
        with context():
            assert_same(train(model, steps=2), expected(steps=2))
        for name in "01":
            stats = compression.stats()[name]
            assert (stats.gathers, stats.gathers_plain) == (0, 8), (name, stats)

    run(lambda: body(nullcontext), 2, nodes=[0, 0], options=options())
    run(lambda: body(nullcontext), 2, nodes=[0, 1], options=options(min_bytes=1 << 30))
    run(lambda: body(zcomm.exact), 2, nodes=[0, 1], options=options())


@pytest.mark.parametrize("weights", ["int8:256", "lossless"])
def test_max_bytes_and_changed_weights(weights: Any) -> None:
    def body() -> None:
        model = make_model()
        compression = compressed(model, weights, max_bytes=0)
        assert_same(train(model, steps=2), expected(steps=2))
        assert all(compression.stats()[name].gathers_beyond_limit == 8 for name in "01")
        compression = compressed(model, weights)
        inputs = torch.ones(1, WIDTH)
        with torch.no_grad():
            before = model(inputs).clone()
            assert torch.equal(model(inputs), before)
            for parameter in model.parameters():
                parameter.data.mul_(2)  # type: ignore[attr-defined,unused-ignore]
            changed = model(inputs)
            with zcomm.exact():
                assert torch.equal(changed, model(inputs))
            assert not torch.equal(changed, before)

    run(body, 2, nodes=[0, 1], options=options())


def linear(rows: int, columns: int, weights: Any, dtype: torch.dtype = torch.uint8) -> tuple[nn.Module, Compression]:
    """A frozen module that FSDP2 gathers as bytes without an extension."""
    model = nn.Module()
    model.register_parameter("codes", nn.Parameter(torch.arange(rows * columns).view(rows, -1).to(dtype), False))
    fully_shard(model)
    return model, compress(model, weights=weights, exempt=())


def gathered(model: Any) -> torch.Tensor:
    model.unshard()
    values: torch.Tensor = model.codes.clone()
    model.reshard()
    return values


@pytest.mark.parametrize("strict", [False, True])
def test_an_odd_number_of_bytes_is_left_to_torch_with_a_line(strict: bool) -> None:
    def body() -> None:
        lines = logged()
        model, compression = linear(2, 33, "lossless")
        for _ in range(2):
            assert torch.equal(gathered(model), torch.arange(66).view(2, 33).to(torch.uint8))
        assert [line for line in lines if "odd number of bytes" in line] == [
            f"{next(iter(compression.stats()))} gathers an odd number of bytes: nodes do not keep them"
        ]
        with zcomm.exact():
            even, _ = linear(2, 32, "lossless")
            gathered(even)
        assert len(lines) == 1

    run(body, 2, nodes=[0, 1], options=options(strict=strict))


@pytest.mark.parametrize("weights", ["bf16", "int8:256", "lossless"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_format_keeps_bytes(weights: Any, dtype: torch.dtype) -> None:
    def body() -> None:
        model, compression = linear(4, 512, weights, dtype)
        expected = torch.arange(2048).view(4, 512).to(dtype).view(torch.uint8)
        for _ in range(3):
            assert torch.equal(gathered(model).view(torch.uint8), expected)
        (stats,) = compression.stats().values()
        assert (stats.gathers_inter_node, stats.gathers_intra_node, stats.gathers_plain) == (1, 2, 0)

    run(body, 2, nodes=[0, 1], options=options())


@pytest.mark.parametrize("nodes", [[0, 1], [0, 0]], ids=str)
@pytest.mark.parametrize("keep_in_node", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 6])  # 0: an extension's; 6 are no whole floats of each rank
def test_floats_among_bytes_are_told(nodes: list[int], keep_in_node: bool, num_bytes: int) -> None:
    def body() -> None:
        model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 512, bias=False)).bfloat16()
        if num_bytes == 0:
            narrow(model[0])
        else:
            model.register_parameter("codes", nn.Parameter(torch.zeros(num_bytes, dtype=torch.uint8), False))
        fully_shard(model)
        lines = logged()
        compress(model, weights="int8:256", keep_in_node=keep_in_node)
        inputs = torch.ones(1, 64, dtype=torch.bfloat16)
        with torch.no_grad(), zcomm.exact():
            model(inputs)
        assert lines == []
        for _ in range(2):
            model.reshard()
            with torch.no_grad(), zcomm.override(strict=False):
                model(inputs)
        told = [line for line in lines if "mixes float parameters with byte tensors" in line]
        assert len(told) == 1 and len(lines) <= 2, lines
        model.reshard()
        with (
            torch.no_grad(),
            zcomm.override(strict=True),
            pytest.raises(RuntimeError, match=r"strict=True, but .* mixes float parameters with byte tensors"),
        ):
            model(inputs)

    run(body, 2, nodes=nodes, options=options())
