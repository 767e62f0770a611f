"""Promise 7 for checkpoints: what is saved is exact, and training goes on from it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.expected import digest
from support.trainers import ddp, fsdp1, fsdp2
from support.training import Tensors, assert_same_tensors, loss_of, make_model, plain, whole_tensors
from support.worlds import options, run
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import zcomm

FULL = StateDictOptions(full_state_dict=True)  # not cpu_offload: of CPU tensors FSDP1 would give views of freed memory
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Training = tuple[nn.Module, torch.optim.Optimizer]


def secondary() -> nn.Module:
    model = fsdp2()()
    if dist.get_backend() == "zcomm":
        zcomm.fsdp.compress(model)
    return model


TWO_NODES = [0, 0, 1, 1]
# FSDP1 gathers a full state dict as it gathers weights in training: what is compressed there is to be named exact here.
TRAINERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "FSDP2": (fsdp2(), {}),
    "FSDP2, secondary shards": (secondary, {}),
    "HSDP": (fsdp2((2, 2)), {}),
    "FSDP1": (fsdp1(), {}),
    "FSDP1, lists": (fsdp1(), {"forms": "in_place,list"}),
    "DDP": (ddp, {"all_reduce": "int8:128"}),
}
NODES = {name: [0, 1] for name in TRAINERS} | {"FSDP2, secondary shards": TWO_NODES, "HSDP": TWO_NODES}


def start(wrap: Callable[[], nn.Module]) -> Training:
    model = wrap()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(training: Training, steps: int) -> list[float]:
    model, optimizer = training
    losses = []
    for _ in range(steps):
        loss = loss_of(model, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save(training: Training, folder: Path) -> None:
    model, optimizer = get_state_dict(*training)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(training: Training, folder: Path) -> None:
    model, optimizer = get_state_dict(*training)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(*training, model_state_dict=model, optim_state_dict=optimizer)


def renamed(state: Tensors) -> Tensors:
    return {plain(key): value for key, value in state.items()}


def local(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


@pytest.mark.promise(7)
@pytest.mark.parametrize("name", TRAINERS)
def test_before_training_checkpoints_are_those_of_gloo(name: str, tmp_path: Path) -> None:
    """Full and sharded state dicts of all ranks, and what a checkpoint holds: the initial weights, to the last bit."""
    (wrap, fields), nodes = TRAINERS[name], NODES[name]

    def body(folder: Path) -> list[dict[str, list[str]]]:
        model = wrap()
        with torch.no_grad():
            loss_of(model, dist.get_rank())  # its compressed gathers must not be seen
        with zcomm.exact():
            states = [get_model_state_dict(model), get_model_state_dict(model, options=FULL)]
        dcp.save(states[0], checkpoint_id=folder)
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder, folder / "whole.pt")
            assert_same_tensors(
                {plain(key): value for key, value in torch.load(folder / "whole.pt").items()}, initial, ""
            )
        return [{key: [digest(tensor) for tensor in local(value)] for key, value in state.items()} for state in states]

    initial = {key: value.clone() for key, value in make_model().state_dict().items()}
    gloo = run(lambda: body(tmp_path / "gloo"), len(nodes), nodes=nodes, backend="gloo")
    ours = run(lambda: body(tmp_path / "zcomm"), len(nodes), nodes=nodes, options=options(**fields))
    assert ours == gloo


@pytest.mark.promise(7)
@pytest.mark.parametrize("name", [name for name in TRAINERS if "secondary" not in name])  # see test_fsdp_secondary
def test_training_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """A checkpoint during training holds the weights, and resuming gives the same losses and weights."""
    wrap, fields = TRAINERS[name]

    def body() -> None:
        training = start(wrap)
        train(training, 2)
        exact = whole_tensors(training[0])
        with zcomm.exact():
            save(training, tmp_path)
            full = get_model_state_dict(training[0], options=FULL)
        if dist.get_rank() == 0 or name == "DDP":
            assert_same_tensors(renamed(full), exact, "full state dict")
        again = start(wrap)
        train(again, 1)  # these weights and secondary shards must not be used later
        with zcomm.exact():
            load(again, tmp_path)
        assert_same_tensors(whole_tensors(again[0]), exact, "loaded")
        assert train(again, 3) == train(training, 3)
        assert_same_tensors(whole_tensors(again[0]), whole_tensors(training[0]), "after more steps")

    run(body, len(NODES[name]), nodes=NODES[name], options=options(**fields))


@pytest.mark.parametrize("name", ["FSDP2, secondary shards", "FSDP1"])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)], ids=str)
def test_a_checkpoint_serves_another_number_of_ranks(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Saved by some ranks, loaded and saved by others, loaded by the first: as if nothing had happened."""
    wrap, fields = TRAINERS[name]
    nodes = {2: [0, 1], 4: TWO_NODES}

    def first() -> tuple[list[float], Any]:
        training = start(wrap)
        train(training, 2)
        save(training, tmp_path / "first")
        full = get_model_state_dict(training[0], options=FULL)
        if dist.get_rank() == 0:
            torch.save(full, tmp_path / "full.pt")
        return train(training, 2), whole_tensors(training[0])

    def resharded() -> None:
        full = torch.load(tmp_path / "full.pt")
        training = start(wrap)
        load(training, tmp_path / "first")
        save(training, tmp_path / "second")
        assert_same_tensors(whole_tensors(training[0]), renamed(full), "loaded")
        from_full = start(wrap)
        load(from_full, tmp_path / "first")  # of the optimizer
        set_model_state_dict(from_full[0], full, options=FULL)
        assert train(training, 2) == train(from_full, 2)

    def back() -> tuple[list[float], Any]:
        training = start(wrap)
        load(training, tmp_path / "second")
        return train(training, 2), whole_tensors(training[0])

    def on(size: int, body: Callable[[], Any]) -> list[Any]:
        return run(body, size, nodes=nodes[size], options=options(**fields))

    want = on(sizes[0], first)
    on(sizes[1], resharded)
    for (losses, weights), (want_losses, want_weights) in zip(on(sizes[0], back), want, strict=True):
        assert losses == want_losses
        assert_same_tensors(weights, want_weights, "after more steps")


@pytest.mark.promise(7)
@pytest.mark.parametrize("name", ["FSDP2", "FSDP1", "DDP"])
def test_states_that_rank_0_sends_are_not_rounded(name: str) -> None:
    """Weights and optimizer states arrive as rank 0 has them, though the options compress broadcasts."""
    wrap, fields = TRAINERS[name]

    def states(training: Training) -> Any:
        with zcomm.exact():
            model, optimizer = get_state_dict(*training, options=FULL)
        state = optimizer["state"].items()
        return model, {key: {name: value.clone() for name, value in of.items()} for key, of in state}, optimizer

    def body() -> None:
        training = start(wrap)
        train(training, 2)
        model, want, optimizer = states(training)
        again = start(wrap)
        train(again, 1)
        full = (dict(model), optimizer) if dist.get_rank() == 0 else ({}, {})  # torch changes the dict
        set_model_state_dict(again[0], full[0], options=FROM_RANK_0)
        set_optimizer_state_dict(*again, full[1], options=FROM_RANK_0)
        got_model, got, _ = states(again)
        assert_same_tensors(got_model, model, "weights")
        for key, tensors in want.items():
            assert_same_tensors(got[key], tensors, key)
        assert zcomm.stats().broadcast.calls == 0
        dist.broadcast(torch.ones(64), src=0)
        assert zcomm.stats().broadcast.calls == 1

    run(body, options=options(exchanges="int8:128", **fields))


def test_a_checkpoint_that_is_saved_beside_the_training(tmp_path: Path) -> None:
    """Its thread has a group for itself, and calls at the same time as the training. Both are as without the other."""

    def body() -> None:
        alone, beside = start(secondary), start(secondary)
        wanted = train(alone, 3)
        after = [whole.clone() for whole in whole_tensors(alone[0]).values()]
        train(alone, 9)
        group = dist.new_group()
        assert train(beside, 3) == wanted
        saving = dcp.async_save(beside[0].state_dict(), checkpoint_id=tmp_path, process_group=group)
        train(beside, 9)
        saving.result()
        assert_same_tensors(whole_tensors(beside[0]), whole_tensors(alone[0]), "trained")
        loaded = beside[0].state_dict()
        dcp.load(loaded, checkpoint_id=tmp_path)
        for one, other in zip(whole_tensors(beside[0]).values(), after, strict=True):
            assert torch.equal(one, other)

    run(body, 4, nodes=TWO_NODES, options=options(min_bytes=1))
