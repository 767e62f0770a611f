"""FSDP1: which of its calls are compressed by default, and what its opt-in reaches beyond training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.expected import HALF_STEP
from support.trainers import fsdp1
from support.training import loss_of, make_model, plain
from support.worlds import options, run
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import zcomm


def test_weights_and_gradients_of_a_pass_are_compressed() -> None:
    def body() -> None:
        model = fsdp1()()
        loss_of(model, dist.get_rank()).backward()
        stats = zcomm.stats()
        assert stats.all_gather.calls >= 3 and not stats.all_gather.exact  # three parts
        assert stats.reduce_scatter.calls == 3 and not stats.reduce_scatter.exact

    run(body, 2, options=zcomm.Options(min_bytes=1))


@pytest.mark.promise(7)
@pytest.mark.parametrize("strategy", list(ShardingStrategy)[:2], ids=lambda strategy: strategy.name)
def test_what_is_not_a_pass_is_exact(strategy: ShardingStrategy) -> None:
    """A full state dict and summoned parameters have the weights' own bits, also after a forward pass that has left
    gathered ones in memory."""

    def body() -> None:
        model = fsdp1(sharding_strategy=strategy)()
        want = make_model().state_dict()
        for _ in range(2):
            loss_of(model, dist.get_rank())
            assert zcomm.stats().all_gather.calls > 0
            with FullyShardedDataParallel.summon_full_params(model):
                summoned = {plain(name): value.clone() for name, value in model.named_parameters()}
            loss_of(model, dist.get_rank())
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            for found in (summoned, {plain(name): value for name, value in state.items()}):
                assert found.keys() == want.keys() or dist.get_rank() > 0
                assert all(torch.equal(value, want[name]) for name, value in found.items())

    run(body, 2, options=zcomm.Options(min_bytes=1))


def test_weights_of_odd_sizes_are_gathered_within_half_a_step() -> None:
    """The padding between them is not part of the scale of a block."""

    def body() -> None:
        model = fsdp1()()
        loss_of(model, dist.get_rank())  # FSDP1 makes up its mind at the first forward pass
        gathered = []
        for format in ("exact", "int8:256"):
            with zcomm.override(all_gather=format), FullyShardedDataParallel.summon_full_params(model):
                gathered.append({name: parameter.clone() for name, parameter in model.named_parameters()})
        exact, compressed = gathered
        error = max(float((compressed[name] - exact[name]).abs().max()) for name in exact)
        largest = max(float(tensor.abs().max()) for tensor in exact.values())
        assert 0 < error <= largest / 127 * HALF_STEP * 1.001

    run(body, 3, options=options(forms="in_place,list"))


def test_with_its_gathers_compressed_a_full_state_dict_is_exact_inside_exact() -> None:
    """FSDP1 gathers a full state dict by the calls that gather its weights in training."""

    def body() -> None:
        model = fsdp1()()
        states = []
        for format in ("exact", "int8:256"):
            with zcomm.override(all_gather=format):
                states.append(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        want = make_model().state_dict()
        if dist.get_rank() == 0:
            exact, compressed = ({plain(key): value for key, value in state.items()} for state in states)
            assert all(torch.equal(exact[key], value) for key, value in want.items())
            assert not all(torch.equal(compressed[key], value) for key, value in want.items())

    run(body, 2, options=options(forms="in_place,list"))
