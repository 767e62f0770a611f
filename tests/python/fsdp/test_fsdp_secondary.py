"""Secondary shards: the same training, bit for bit, with weights that cross nodes once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.secondary import memory_bytes, sharded, train
from support.training import make_batch, make_model, whole
from support.worlds import options, run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.fsdp import Compression, compress


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, foreach=True),
        "AdamW, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False),
        "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    }


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def inter_node_bytes() -> int:
    return zcomm.stats().all_gather.inter_node_bytes


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1]], ids=str)
def test_the_same_bits_as_without_and_every_step_is_noticed(name: str, nodes: list[int]) -> None:
    def body() -> None:
        results = []
        for secondary in (False, True):
            model, _ = sharded(secondary)
            losses = train(model, optimizers()[name](model.parameters()), steps=4, micro_batches=2)
            results.append((losses, parameters_of(model)))
        (losses, parameters), (losses_again, parameters_again) = results
        assert losses == losses_again
        assert all(torch.equal(a, b) for a, b in zip(parameters, parameters_again, strict=True))

    run(body, len(nodes), nodes=nodes, options=options())


def test_weights_cross_nodes_once_for_each_optimizer_step() -> None:
    def body() -> None:
        model, secondary = sharded(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro_batches in (1, 4):
            before = inter_node_bytes()
            train(model, optimizer, steps=3, micro_batches=micro_batches)
            moved = inter_node_bytes() - before
            if micro_batches == 1:
                once = moved
            assert moved == once
        modules = secondary.stats().values()
        for stats in modules:  # 15 micro-batches, forward and backward
            assert (stats.gathers_inter_node, stats.gathers_intra_node, stats.gathers_plain) == (6, 24, 0)
        dist.barrier()
        assert sum(stats.gathered_inter_node_bytes for stats in modules) == inter_node_bytes()
        assert sum(stats.gathered_intra_node_bytes for stats in modules) == zcomm.stats().all_gather.intra_node_bytes

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


@pytest.mark.parametrize("name", optimizers())
def test_frozen_weights_may_be_in_the_optimizer(name: str) -> None:
    """``AdamW(model.parameters())`` has them: no optimizer of torch changes a parameter without a gradient."""

    def body() -> None:
        model, secondary = sharded(True)
        optimizer = optimizers()[name](model.parameters())
        train(model, optimizer, steps=1)
        model[0].requires_grad_(False)
        kept = [parameter.grad for parameter in model[0].parameters()]
        assert kept == [None] * len(kept)
        before = secondary.stats()["0"].gathers_inter_node
        train(model, optimizer, steps=3)
        assert secondary.stats()["0"].gathers_inter_node == before + 1  # of the step before it was frozen
        # A gradient of its own is stepped with, frozen or not.
        for parameter in model[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        train(model, optimizer, steps=1)
        assert secondary.stats()["0"].gathers_inter_node == before + 2

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_frozen_weights_cross_nodes_once_for_good() -> None:
    def body() -> None:
        model, secondary = sharded(True)
        inputs, _ = make_batch(dist.get_rank())
        model.requires_grad_(False)
        first = model(inputs)
        before = inter_node_bytes()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(3):
                    assert torch.equal(model(inputs), first)
        assert inter_node_bytes() == before
        assert memory_bytes(secondary) > 0

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_every_way_to_change_weights_is_noticed() -> None:
    def change_in_place(model: nn.Module, _: Compression) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    def load(model: nn.Module, _: Compression) -> None:
        model.load_state_dict({name: value.detach() * 2 for name, value in model.state_dict().items()})

    def assign(model: nn.Module, _: Compression) -> None:
        model.load_state_dict({name: value.detach() * 3 for name, value in model.state_dict().items()}, assign=True)

    def change_local(model: nn.Module, _: Compression) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().add_(0.125)

    def swap(model: nn.Module, secondary: Compression) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        secondary.invalidate()  # PyTorch did not count the change

    def body() -> None:
        model, secondary = sharded(True)
        plain, _ = sharded(False)
        inputs, _ = make_batch(dist.get_rank())
        for change in (change_in_place, load, assign, change_local, swap):
            with torch.no_grad():
                assert torch.equal(model(inputs), plain(inputs)), change
                change(model, secondary)
                change(plain, secondary)
                assert torch.equal(model(inputs), plain(inputs)), change

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_before_fully_shard_nested_and_several_models() -> None:
    def body() -> None:
        model = make_model()
        secondary = compress(model, exempt=())
        for block in [*model, model]:
            fully_shard(block, reshard_after_forward=True)
        other, other_secondary = sharded(True)
        plain, _ = sharded(False)
        inputs, _ = make_batch(dist.get_rank())
        for _ in range(2):
            assert torch.equal(model(inputs), plain(inputs))
            assert torch.equal(other(inputs), plain(inputs))
        assert all(stats.gathers_inter_node == 1 for stats in secondary.stats().values())
        assert len(secondary.stats()) == len(other_secondary.stats()) == 3  # the root has no parameters of its own
        secondary.disable()
        assert memory_bytes(secondary) == 0 and not secondary.stats()
        bare = make_model()
        for block in [*bare, bare]:
            fully_shard(block)
        assert torch.equal(model(inputs), bare(inputs))
        assert memory_bytes(other_secondary) > 0

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_mixed_precision_and_asynchronous_gathers() -> None:
    def body() -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        results = []
        for secondary in (False, True):
            model, _ = sharded(secondary, mp_policy=policy)
            model._set_unshard_async_op(True)
            results.append(train(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=3, micro_batches=2))
        assert results[0] == results[1]

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_what_the_options_leave_exact_is_gathered_as_before() -> None:
    def body() -> None:
        model, secondary = sharded(True)
        plain, _ = sharded(False)
        inputs, _ = make_batch(dist.get_rank())
        with zcomm.exact():
            for _ in range(2):
                assert torch.equal(model(inputs), plain(inputs))
        assert memory_bytes(secondary) == 0
        with zcomm.override(all_gather="int4:64"):  # another format is another shard
            assert torch.equal(model(inputs), plain(inputs))
        assert torch.equal(model(inputs), plain(inputs))

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_checkpoints_are_exact_and_training_goes_on_from_them(tmp_path: Path) -> None:
    """Promise 7, with secondary shards on."""

    def body() -> None:
        def start() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, _ = sharded(True)
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

        model, optimizer = start()
        train(model, optimizer, steps=2, micro_batches=2)
        exact = {name: whole(value) for name, value in model.state_dict().items()}
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert all(torch.equal(full[name], value) for name, value in exact.items())

        saved_model, saved_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=tmp_path)
        again, again_optimizer = start()
        train(again, again_optimizer, steps=1)  # these secondary shards must not be used later
        loaded_model, loaded_optimizer = get_state_dict(again, again_optimizer)
        dcp.load({"model": loaded_model, "optimizer": loaded_optimizer}, checkpoint_id=tmp_path)
        set_state_dict(again, again_optimizer, model_state_dict=loaded_model, optim_state_dict=loaded_optimizer)
        assert train(model, optimizer, steps=3) == train(again, again_optimizer, steps=3)
        assert all(torch.equal(a, b) for a, b in zip(parameters_of(model), parameters_of(again), strict=True))

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_nothing_outlives_the_model() -> None:
    """Nor does a copy of it."""
    model = nn.Linear(2, 2)
    original = weakref.ref(model)
    secondary = weakref.ref(compress(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert secondary() is not None
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    assert secondary() is None and original() is None
    copied(torch.ones(2, 2))
    optimizer.step()


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="max_bytes: expected 0 or more, or None, got -1"):
        compress(nn.Linear(2, 2), max_bytes=-1)
    with pytest.raises(ValueError, match="keep_in_node: expected True with weights='lossless'"):
        compress(nn.Linear(2, 2), weights="lossless", keep_in_node=False)


@pytest.mark.parametrize("weights", ["int8:64", "lossless"])
def test_micro_batches_stay_in_the_node_though_another_mesh_gathers_in_between(weights: Any) -> None:
    """The backward pass gathers in the mesh of ``reshard_after_forward``, by another plan."""

    def body() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
        for layer in [*model, model]:
            fully_shard(layer, reshard_after_forward=2)
        compression = compress(model, weights=weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name in "01":
            stats = compression.stats()[name]
            assert (stats.gathers_inter_node, stats.gathers_intra_node) == (3, 3), stats

    run(body, 4, nodes=[0, 0, 1, 1], options=options(min_bytes=1))
