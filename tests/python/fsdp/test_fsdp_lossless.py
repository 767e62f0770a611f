"""Exact weights by lossless differences: the same training as gloo's, bit for bit, for fewer bytes between nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.calls import logged
from support.secondary import train
from support.training import make_batch, make_model, whole
from support.worlds import collect, options, run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.distributed.binding import _c10d
from zcomm.fsdp import Compression, compress
from zcomm.fsdp.secondary_shard import LosslessSecondaryShard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
TWO_NODES = [0, 0, 1, 1]
GRADIENTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"exact": zcomm.exact, "compressed": nullcontext}


def sharded(
    policy: MixedPrecisionPolicy = BF16, *, first: Callable[[nn.Sequential], Any] = lambda model: None, **fields: Any
) -> nn.Sequential:
    """A model of three blocks, after ``first`` has changed it."""
    model = make_model()
    first(model)
    for block in [*model, model]:
        fully_shard(block, mp_policy=policy, **fields)
    return model


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter) for parameter in model.parameters()]


def assert_same_training(one: tuple[list[float], list[torch.Tensor]], other: tuple[list[float], Any]) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("steps", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
@pytest.mark.parametrize("gradients", GRADIENTS)
@pytest.mark.parametrize("nodes", [TWO_NODES, [0, 1, 2, 3], [0, 0, 0, 1]], ids=["2x2", "4x1", "3+1"])
def test_training_equals_that_with_exact_weights(nodes: list[int], gradients: str, steps: int) -> None:
    """Exact gradients are gloo's: zcomm.exact() hands every call to it."""

    def body() -> None:
        with GRADIENTS[gradients]():
            plain = sharded()
            compress(plain, weights="exact")
            expected = train(plain, adamw(plain), steps, micro_batches=2)
        model = sharded()
        secondary = compress(model, weights="lossless")
        with zcomm.override(reduce_scatter="exact") if gradients == "exact" else nullcontext():
            losses = train(model, adamw(model), steps, micro_batches=2)
        assert_same_training((losses, parameters_of(model)), (expected, parameters_of(plain)))
        for stats in secondary.stats().values():  # forward and backward of two micro-batches
            assert (stats.gathers_inter_node, stats.gathers_intra_node, stats.gathers_plain) == (steps, 3 * steps, 0)
            assert stats.generation == steps

    run(body, 4, nodes=nodes, options=options(), seconds=300)


def test_another_format_of_the_group_crosses_nodes_no_more() -> None:
    """Differences are the same ones."""

    def body() -> None:
        model = sharded()
        secondary = compress(model, weights="lossless")
        loss = model(make_batch(dist.get_rank())[0]).sum()
        with zcomm.override(all_gather="int4:64"):
            loss.backward()
        for stats in secondary.stats().values():
            assert (stats.gathers_inter_node, stats.gathers_intra_node, stats.gathers_plain) == (1, 1, 0)
        assert zcomm.stats().all_gather.calls == sum(stats.gathers for stats in secondary.stats().values())

    run(body, 4, nodes=TWO_NODES, options=options())


def test_bytes_between_nodes_follow_the_learning_rate() -> None:
    def body() -> None:
        model = sharded()
        secondary = compress(model, weights="lossless")
        optimizer = adamw(model, lr=0.0)
        block = secondary.stats
        train(model, optimizer, steps=1)
        assert all(stats.bits_per_weight > 16 for stats in block().values())  # whole weights and headers
        bits = {}
        for lr in (1e-1, 1e-2, 1e-3, 1e-5, 0.0):
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = lr, 0.0
            train(model, optimizer, steps=3)
            bits[lr] = block()["0"].bits_per_weight  # of 18090 weights; headers are 0.1 bit of a shard
        assert bits[1e-2] > bits[1e-3] > bits[1e-5] > bits[0.0]
        assert bits[1e-3] < 10  # the same batch in each step: AdamW moves every weight by the whole rate
        assert bits[0.0] < 0.2

    run(body, 4, nodes=TWO_NODES, options=options())


def test_frozen_weights_and_adapters_in_one_unit_and_loaded_weights() -> None:
    def body() -> None:
        def freeze(model: nn.Sequential) -> None:
            model.requires_grad_(False)
            model[0][2].requires_grad_(True)

        plain, model = sharded(first=freeze), sharded(first=freeze)
        secondary = compress(model, weights="lossless")
        results = []
        for one, context in ((plain, zcomm.exact()), (model, zcomm.override(reduce_scatter="exact"))):
            with context:
                losses = train(one, adamw(one), steps=3)
                one.load_state_dict({name: value.detach() * 0.5 for name, value in one.state_dict().items()})
                losses += train(one, adamw(one), steps=3)
            results.append((losses, parameters_of(one)))
        assert_same_training(*results)
        frozen = secondary.stats()["1"]
        assert (frozen.gathers_inter_node, frozen.generation) == (2, 2)  # once, and what was loaded

    run(body, 4, nodes=TWO_NODES, options=options())


def test_on_and_off_while_training_and_formats_of_their_own() -> None:
    def body() -> None:
        plain, model = sharded(), sharded()
        with zcomm.exact():
            expected = train(plain, adamw(plain), steps=8)
        secondary = compress(model, weights="lossless")

        def switch(step: int) -> None:
            nonlocal secondary
            if step == 1:
                secondary.disable()
            if step == 3:
                secondary = compress(model, weights="lossless")
            if step == 5:
                compress(model)
                secondary = compress(model, weights="lossless")

        optimizer = adamw(model)
        with zcomm.override(reduce_scatter="exact"):
            losses = train(model, optimizer, steps=2, stop=switch)
            with zcomm.exact():
                losses += train(model, optimizer, steps=2, stop=lambda step: switch(step + 2))
            losses += train(model, optimizer, steps=4, stop=lambda step: switch(step + 4))
        assert_same_training((losses, parameters_of(model)), (expected, parameters_of(plain)))

        # A module with a format of its own is not exact, and the others are.
        lossy = compress(model[1], weights="int8:64")
        train(model, optimizer, steps=2)
        assert secondary.stats().keys() == {"0", "2"} and lossy.stats().keys() == {"1"}
        assert lossy.stats()["1"].generation == 0 < secondary.stats()["0"].generation
        assert lossy.stats()["1"].memory_bytes < secondary.stats()["0"].memory_bytes
        assert (lossy.stats()["1"].weights, secondary.stats()["0"].weights) == ("int8:64", "lossless")
        lossy.disable()
        assert not lossy.stats() and secondary.stats().keys() == {"0", "2"}

    run(body, 4, nodes=TWO_NODES, options=options())


def test_checkpoints_and_training_that_goes_on_from_them(tmp_path: Path) -> None:
    """Saved with differences, the weights are exact; a run resumed with or without them is the one that went on."""

    def body() -> None:
        def start(differences: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = sharded()
            if differences:
                compress(model, weights="lossless")
            return model, adamw(model)

        with zcomm.override(reduce_scatter="exact"):
            model, optimizer = start(True)
            train(model, optimizer, steps=2)
            exact = {name: whole(value) for name, value in model.state_dict().items()}
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            assert all(torch.equal(full[name], value) for name, value in exact.items())
            saved_model, saved_optimizer = get_state_dict(model, optimizer)
            dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=tmp_path)
            expected = train(model, optimizer, steps=3), parameters_of(model)
            for differences in (True, False):
                again, again_optimizer = start(differences)
                with nullcontext() if differences else zcomm.override(all_gather="exact"):
                    train(again, again_optimizer, steps=1)  # of other weights, which holders then have
                    loaded_model, loaded_optimizer = get_state_dict(again, again_optimizer)
                    dcp.load({"model": loaded_model, "optimizer": loaded_optimizer}, checkpoint_id=tmp_path)
                    set_state_dict(
                        again, again_optimizer, model_state_dict=loaded_model, optim_state_dict=loaded_optimizer
                    )
                    losses = train(again, again_optimizer, steps=3)
                assert_same_training((losses, parameters_of(again)), expected)

    run(body, 4, nodes=TWO_NODES, options=options())


@pytest.mark.job
def test_hybrid_shards_and_compiled_blocks() -> None:
    """Weights are sharded over two nodes, and replicated in two such groups."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

        def compile_blocks(model: nn.Sequential) -> None:
            for block in model:
                block.compile(backend="aot_eager")

        plain, model = (sharded(first=compile_blocks, mesh=mesh) for _ in range(2))
        with zcomm.exact():
            expected = train(plain, adamw(plain), steps=4)
        secondary = compress(model, weights="lossless")
        with zcomm.override(reduce_scatter="exact"):
            losses = train(model, adamw(model), steps=4)
        assert_same_training((losses, parameters_of(model)), (expected, parameters_of(plain)))
        assert [stats.generation for stats in secondary.stats().values()] == [4, 4, 4]

    run(body, 4, nodes=[0, 1, 0, 1], options=options())


def test_on_a_gpu_a_step_encodes_what_has_changed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU tensors, whose gathers need no sizes: what would be prepared is what is gathered then."""
    prepared: list[dict[Any, torch.Tensor]] = []
    gather = LosslessSecondaryShard._gather_across

    def prepare(group: Any, gathers: Any, *, async_op: bool) -> Any:
        prepared.append({one: shard.clone() for one, shard, _ in gathers})
        return SimpleNamespace(wait=lambda: None)

    def checked_gather(self: LosslessSecondaryShard, call: Any, held: Any, version: Any) -> Any:
        work = gather(self, call, held, version)
        assert torch.equal(next(batch[held] for batch in reversed(prepared) if held in batch), call.shard)
        return work

    def body() -> None:
        monkeypatch.setattr(LosslessSecondaryShard, "needs_sizes", True)
        monkeypatch.setattr(LosslessSecondaryShard, "_gather_across", checked_gather)
        monkeypatch.setattr(_c10d.ProcessGroup, "prepare", prepare)
        model = sharded()
        model[1].requires_grad_(False)
        compress(model, weights="lossless", check=False)  # of host memory, which a GPU does not have
        weights = list(model[0].parameters())
        optimizers = [adamw(model[2]), torch.optim.SGD(weights[:1], lr=0.1), torch.optim.SGD(weights[1:], lr=0.1)]
        for step in range(4):
            train(model, optimizers[0], steps=1)
            for optimizer in optimizers[1:]:
                optimizer.step()
            # Each module prepares by itself at first; later all changed modules at once, for all optimizers.
            assert [len(batch) for batch in prepared] == [1, 1, 1] + [2] * step
        with torch.no_grad():
            model[1][0].weight.mul_(2)  # noticed without an optimizer
        train(model, optimizers[0], steps=1)
        assert len(prepared[-1]) == 3

    run(body, 4, nodes=TWO_NODES, options=options())


def shard_of(secondary: Compression) -> Any:
    return secondary._in_force()[0].secondary


@pytest.mark.parametrize("what", ["a write", "another generation", "a gather that is skipped", "a rank that is killed"])
def test_what_goes_wrong_is_an_error_on_every_receiver(what: str) -> None:
    def body() -> None:
        model = sharded()
        secondary = compress(model, weights="lossless")
        optimizer = adamw(model)
        train(model, optimizer, steps=2)
        if dist.get_rank() == 3:
            shard = shard_of(secondary)
            if what == "a write":
                for slot in shard.memory.view(2, -1):  # its own, and that of rank 1
                    slot[20] ^= 1
            elif what == "another generation":
                shard.forget()
            elif what == "a gather that is skipped":
                shard.gather = lambda call: call.run(shard._bound, shard.intra_node, again=True)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, steps=1)

    outcomes = collect(body, 4, nodes=TWO_NODES, options=options(), group_seconds=10, grace=15)
    for rank, outcome in enumerate(outcomes):
        if what == "a rank that is killed" and rank == 3:
            continue
        assert outcome.error is not None, f"rank {rank}"
        assert not outcome.stuck
    if what == "a write":
        assert "generation 2 is not generation 3" in outcomes[1].error + outcomes[3].error
        assert "differences of slot" in outcomes[1].error + outcomes[3].error
    if what == "a gather that is skipped":
        for rank in (2, 3):
            assert "all_gather bfloat16[4 x 4607] by differences, of weights that may" in outcomes[rank].error
            assert "gather_secondary bfloat16[4 x 4607] by differences, of weights that have" in outcomes[rank].error
    if what == "another generation":
        for rank in (1, 2, 3):
            assert "of weights that may have changed, generation 2" in outcomes[rank].error
            assert "of weights that may have changed, generation 0" in outcomes[rank].error


def test_lossless_whatever_the_options_and_the_mesh_have() -> None:
    """Of weights that cannot be watched, and in a group whose format is exact."""

    def body() -> None:
        plain, model = (sharded(reshard_after_forward=2) for _ in range(2))
        compress(plain, weights="exact", gradients="exact")
        secondary = compress(model, weights="lossless", gradients="exact", exempt=["*"])
        expected = train(plain, adamw(plain), steps=3), parameters_of(plain)
        assert_same_training((train(model, adamw(model), steps=3), parameters_of(model)), expected)
        for stats in secondary.stats().values():
            assert (stats.generation, stats.gathers_inter_node, stats.gathers_plain) == (3, 3, 3)

    for all_gather in ("int4:64", "exact"):
        run(body, 4, nodes=TWO_NODES, options=options(all_gather=all_gather))


def test_what_cannot_be_sent_is_refused() -> None:
    def body() -> None:
        for dtype, name in ((torch.float32, "Float"), (torch.float64, "Double")):
            model = sharded(MixedPrecisionPolicy(param_dtype=dtype))
            compress(model, weights="lossless")
            with pytest.raises(
                ValueError,
                match=rf"weights: 0 cannot .*expected BFloat16, Half or .* got {name}.*MixedPrecisionPolicy",
            ):
                model(make_batch(0)[0].to(dtype))
            with zcomm.exact():
                model(make_batch(0)[0].to(dtype))

    run(body, 2, nodes=[0, 1], options=options())


def test_whole_weights_are_told() -> None:
    """Those of a mesh after the forward pass, and beyond max_bytes."""

    def body() -> None:
        lines = logged()
        model = sharded(reshard_after_forward=2)
        compress(model, weights="lossless")
        train(model, adamw(model), steps=2)
        counted = [
            line for line in lines if "not differences, as they are shards of a mesh after the forward pass" in line
        ]
        assert len(counted) == len(set(counted)) > 0
        with (
            zcomm.override(strict=True),
            pytest.raises(RuntimeError, match=r"strict=True, but .* as they are shards of a mesh after the forward"),
        ):
            train(model, adamw(model), steps=1)
        model = sharded()
        compress(model, weights="lossless", max_bytes=0)
        with (
            zcomm.override(strict=True),
            pytest.raises(RuntimeError, match="not differences, as there is no room in max_bytes"),
        ):
            model(make_batch(0)[0])

    run(body, 4, nodes=[0, 1, 2, 3], options=options())
