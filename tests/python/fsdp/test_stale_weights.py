"""Weights that change in any way are those of the next gather, with secondary shards of either kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import WIDTH, Block, make_batch, make_model
from support.weight_changes import (
    WAYS,
    data_copy,
    load_state_dict_that_assigns,
    step,
)
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.fsdp import Compression, compress

WEIGHTS = pytest.mark.parametrize("weights", ["int8:256", "lossless"])
TWO_NODES = [0, 0, 1, 1]


def sharded(weights: str, **fields: Any) -> tuple[nn.Module, Compression]:
    """Each rank has some of each module."""
    torch.manual_seed(0)
    block = Block(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    model = nn.Sequential(block, nn.Linear(WIDTH, 8))
    for block in [*model, model]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, compress(model, weights=weights, **fields)


@WEIGHTS
def test_every_way_to_change_weights(weights: str, tmp_path: Path) -> None:
    """All ranks write alike: the next gather has the new values, as after ``invalidate()``."""

    def body() -> None:
        inputs, _ = make_batch(dist.get_rank())
        with torch.no_grad():
            for name, change in WAYS.items():
                model, secondary = sharded(weights)
                before = model(inputs)
                assert torch.equal(model(inputs), before)
                change(model, tmp_path / name)
                got = model(inputs)
                intra_node = [stats.gathers_intra_node for stats in secondary.stats().values()]
                assert torch.equal(model(inputs), got)
                assert [stats.gathers_intra_node - 1 for stats in secondary.stats().values()] == intra_node, name
                secondary.invalidate()
                assert torch.equal(model(inputs), got), f"{name}: the weights before it were gathered"
                unchanged = name.startswith("dcp_load")  # loads the saved values
                assert torch.equal(got, before) == unchanged, f"{name} changed nothing"

    assert len(WAYS) >= 30
    run(body, 4, nodes=TWO_NODES, options=options(), seconds=200, group_seconds=60)


@WEIGHTS
def test_without_the_check_uncounted_changes_need_invalidate(weights: str) -> None:
    def body() -> None:
        model, secondary = sharded(weights, check=False)
        inputs, _ = make_batch(dist.get_rank())
        with torch.no_grad():
            before = model(inputs)
            data_copy(model, Path())
            assert torch.equal(model(inputs), before)
            compress(model[1], weights=weights, check=False)  # its settings are of another call then
            before = model(inputs)
            data_copy(model, Path())
            secondary.invalidate()
            found = model(inputs)
            assert not torch.equal(found, before)
            assert zcomm.stats().rehearsals.calls == 0  # nor do ranks agree
            compress(model, weights=weights)
            assert torch.equal(model(inputs), found)

    run(body, 4, nodes=TWO_NODES, options=options())


def sharded_on_three_ranks(weights: str) -> tuple[nn.Module, Compression]:
    """Rank 3 has nothing of the second module."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 3, bias=False))
    for block in [*model, model]:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, compress(model, weights=weights)


@WEIGHTS
def test_exchanged_parameters_are_noticed_by_ranks_that_have_nothing_of_them(weights: str) -> None:
    def body() -> None:
        model, secondary = sharded_on_three_ranks(weights)
        inputs = torch.randn(4, 64)
        with torch.no_grad():
            for _ in range(3):
                load_state_dict_that_assigns(model, Path())
                model(inputs)
        assert {stats.gathers_inter_node for stats in secondary.stats().values()} == {3}

    run(body, 4, nodes=TWO_NODES, options=options())


@WEIGHTS
@pytest.mark.parametrize("first_use", ["forward", "a part", "another method", "unshard"])
def test_enabled_before_fully_shard(weights: str, first_use: str) -> None:
    """The first gather of each module is what those after it are: with lossless differences exact."""

    class Model(nn.Sequential):
        def features(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in self:
                inputs = layer(inputs)
            return inputs

    def body() -> None:
        torch.manual_seed(0)
        model = Model(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)).bfloat16()
        secondary = compress(model, weights=weights)
        fully_shard(model[0])
        fully_shard(model)
        torch.distributed.fsdp.register_fsdp_forward_method(model, "features")
        wanted = [whole(parameter) for parameter in model.parameters()]
        seen: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(model):
            layer.register_forward_pre_hook(lambda layer, _, n=number: seen.update({n: layer.weight.detach().clone()}))
        inputs = torch.randn(2, 128).bfloat16()
        if first_use == "forward":
            model(inputs)
        elif first_use == "another method":
            model.features(inputs)
        elif first_use == "a part":
            model[0](inputs)
        else:
            model.unshard()
            seen[1] = model[1].weight.detach().clone()
        assert seen
        for number, weight in seen.items():
            assert torch.equal(weight, wanted[number]) == (weights == "lossless")
        assert sum(stats.gathers_inter_node for stats in secondary.stats().values()) == len(seen)

    run(body, 4, nodes=TWO_NODES, options=options())


def whole(parameter: Any) -> torch.Tensor:
    with zcomm.exact():
        result: torch.Tensor = parameter.full_tensor().detach().clone()
    return result


def test_a_model_that_is_not_sharded_is_an_error_at_the_first_step() -> None:
    def body() -> None:
        model, other = nn.Linear(4, 4), nn.Linear(4, 4)
        compress(model)
        step(torch.optim.SGD(other.parameters()), other.parameters())
        with pytest.raises(RuntimeError, match="expected a model to whose modules fully_shard is applied"):
            step(torch.optim.SGD(model.parameters()), model.parameters())

    run(body)


def test_a_write_to_any_parameter_of_a_module_is_noticed() -> None:
    def body() -> None:
        model: Any = nn.Linear(64, 64).bfloat16()
        fully_shard(model, reshard_after_forward=True)
        compression = compress(model, exempt=())
        inputs = torch.randn(2, 64).bfloat16()
        with torch.no_grad():
            model(inputs)
            model.bias.data.add_(1)
            found = model(inputs)
            compression.invalidate()
            assert torch.equal(model(inputs), found)

    run(body, 4, nodes=[0, 0, 1, 1], options=options(min_bytes=1))


def test_a_step_of_some_parameters_of_a_module_is_noticed_without_hashes() -> None:
    def body() -> None:
        model = make_model()
        for block in [*model, model]:
            fully_shard(block)
        compression = compress(model, check=False, exempt=())
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        optimizer = torch.optim.SGD(matrices, lr=0.5, foreach=True)  # which counts no version
        inputs, targets = make_batch(dist.get_rank())
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        found = model(inputs)
        compression.invalidate()
        assert torch.equal(model(inputs), found)

    run(body, 4, nodes=[0, 0, 1, 1], options=options(min_bytes=1))


@WEIGHTS
def test_modules_may_exchange_their_parameters(weights: str) -> None:
    """Module.to() and its like exchange DTensors, which torch refuses where a weak reference to one exists."""

    def load(model: nn.Module) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()})
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def body() -> None:
        inputs, _ = make_batch(dist.get_rank())
        with torch.no_grad():
            for exchange in (nn.Module.cpu, nn.Module.float, load):
                model, secondary = sharded(weights)
                before = model(inputs)
                exchange(model)
                assert torch.equal(model(inputs), before)
                exchange(model)
                data_copy(model, Path())
                got = model(inputs)
                secondary.invalidate()
                assert torch.equal(model(inputs), got) and not torch.equal(got, before)

    run(body, 2, nodes=[0, 1], options=options())
