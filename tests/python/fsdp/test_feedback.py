"""Error feedback, through LocalWorld, FSDP2 and DDP."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.calls import logged
from support.fsdp_model import batch, sharded
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm.fsdp import compress
from zcomm.testing import LocalRank, LocalWorld


def test_lost_gradients_arrive_later() -> None:
    """Promise 3 over many calls: the sum of what arrived differs from the sum of what was sent by one step at most."""
    calls, n = 40, 256
    world = LocalWorld("2x2")
    inputs = np.random.default_rng(0).normal(size=(world.size, world.size * n)).astype(np.float32)

    def total(rank: LocalRank, feedback: zcomm.codec.ErrorFeedback | None) -> np.ndarray[Any, Any]:
        sums = np.zeros(n)
        for _ in range(calls):
            sums += rank.reduce_scatter(
                inputs[rank.rank], np.empty(n, np.float32), "exact/int4:32", factor=1.0, feedback=feedback
            )
        return sums

    wanted = calls * inputs.sum(axis=0, dtype=np.float64).reshape(world.size, n)
    scale = np.abs(inputs).max() * 2 / 7 * 1.2  # of a sum over a node, with its residual
    with_feedback = np.stack(world.run(lambda rank: total(rank, zcomm.codec.ErrorFeedback("bf16"))))
    without = np.stack(world.run(lambda rank: total(rank, None)))
    assert np.abs(with_feedback - wanted).max() <= scale
    assert np.abs(without - wanted).max() > 5 * scale


def test_a_residual_starts_over_and_is_restored() -> None:
    world = LocalWorld("2x1")
    inputs = np.random.default_rng(1).normal(size=(world.size, 64)).astype(np.float32)

    def outputs(rank: LocalRank, feedback: zcomm.codec.ErrorFeedback, calls: int) -> list[bytes]:
        reduce = rank.reduce_scatter
        return [
            reduce(inputs[rank.rank], np.empty(32, np.float32), "int4:32", feedback=feedback).tobytes()
            for _ in range(calls)
        ]

    def body(rank: LocalRank) -> None:
        feedback = zcomm.codec.ErrorFeedback()
        first = outputs(rank, feedback, 3)
        feedback.reset()
        assert outputs(rank, feedback, 3) == first
        assert len(set(first)) == 3
        feedback = zcomm.codec.ErrorFeedback(decay=0.5)
        outputs(rank, feedback, 2)
        saved = pickle.loads(pickle.dumps(feedback.state_dict()))
        going_on = outputs(rank, feedback, 2)
        again = zcomm.codec.ErrorFeedback(decay=0.5)
        again.load_state_dict(saved)
        assert outputs(rank, again, 2) == going_on
        assert feedback.memory_bytes() == sum(feedback.residual_bytes().values()) == 48  # a scale and padding, 32 codes
        feedback.reset()
        assert feedback.memory_bytes() == 0

    world.run(body)


def test_replays_of_a_graph_see_a_reset_and_a_loaded_state() -> None:
    """They know an address, not the object that lies there."""
    feedback = zcomm.codec.ErrorFeedback("int8:32")

    def bytes_of(num_bytes: int) -> np.ndarray[Any, Any]:
        return np.empty(num_bytes, np.uint8)

    def use(is_captured: bool) -> tuple[np.ndarray[Any, Any], bool]:
        found: tuple[np.ndarray[Any, Any], bool] = feedback.use("a", "64 values", 96, bytes_of, is_captured)
        return found

    with pytest.raises(RuntimeError, match="expected a call of 'a' before a CUDA graph captures it, got none"):
        use(is_captured=True)
    data, empty = use(is_captured=False)
    assert empty  # what was refused has written nothing
    data[:] = 7
    saved = feedback.state_dict()
    assert use(is_captured=True)[1] is False
    feedback.reset()
    assert not data.any() and feedback.memory_bytes() == data.nbytes
    again, empty = use(is_captured=False)
    assert again is data and empty
    feedback.load_state_dict(saved)
    assert (data == 7).all() and use(is_captured=False)[0] is data
    feedback.load_state_dict({"format": "int8:32", "residuals": {}})
    assert not data.any()
    with pytest.raises(ValueError, match="of 60 values, 96 bytes, this reduction is 64 values, 96 bytes"):
        feedback.load_state_dict(
            {"format": "int8:32", "residuals": {"a": {"data": data, "layout": "60 values", "calls": 1}}}
        )


@pytest.mark.parametrize("format", sorted(zcomm.formats().keys() - {"exact"}))
def test_a_wire_of_zeros_holds_zeros(format: str) -> None:
    wire = np.zeros(zcomm.codec.wire_bytes(format, "float32", 100), np.uint8)
    assert not zcomm.codec.decode(wire, format, np.ones(100, np.float32)).any()


def test_a_state_of_another_layout_is_refused() -> None:
    world = LocalWorld("2x1")
    inputs = np.zeros(64, np.float32)
    feedback = [zcomm.codec.ErrorFeedback() for _ in range(2)]
    world.run(
        lambda rank: rank.reduce_scatter(inputs, np.empty(32, np.float32), "int4:32", feedback=feedback[rank.rank])
    )
    other = zcomm.codec.ErrorFeedback()
    other.load_state_dict(feedback[0].state_dict())
    with pytest.raises(
        ValueError, match=r"the state that was loaded for 'reduce_scatter/rank 0' is of .*int4:32.*int4:64"
    ):
        world.ranks[0].reduce_scatter(np.zeros(64, np.float32), np.empty(32, np.float32), "int4:64", feedback=other)
    with pytest.raises(ValueError, match=r"int4:32.*int4:64"):  # as the first time
        world.ranks[0].reduce_scatter(np.zeros(64, np.float32), np.empty(32, np.float32), "int4:64", feedback=other)
    with pytest.raises(ValueError, match="is of 'reduce_scatter/rank 0', this reduction is of 'reduce_scatter/rank 1'"):
        world.ranks[1].reduce_scatter(np.zeros(64, np.float32), np.empty(32, np.float32), "int4:32", feedback=other)
    with pytest.raises(ValueError, match="state: expected residuals in 'bf16', got 'int8:128'"):
        zcomm.codec.ErrorFeedback("bf16").load_state_dict(feedback[0].state_dict())


def test_modules_of_the_same_name_have_residuals_of_their_own() -> None:
    def body() -> None:
        totals = []
        for formats, feedback in [("exact", None), ("int4:32", None), ("int4:32", zcomm.codec.ErrorFeedback())]:
            model = sharded()
            for block in (model[0], model[1]):
                compress(block, weights="exact", gradients=formats, error_feedback=feedback)
                block.set_gradient_divide_factor(4.0)  # each call has a ReduceOp of its own
            for _ in range(20):
                model(batch()).square().sum().backward()
            totals.append(
                torch.cat([p.grad.to_local().flatten() for p in (*model[0].parameters(), *model[1].parameters())])
            )
        residuals = feedback.state_dict()["residuals"]
        assert {key.split("/")[0]: one["calls"] for key, one in residuals.items()} == {
            "FSDPBlock": 20,
            "FSDPBlock#2": 20,
        }
        errors = [float((total - totals[0]).norm() / totals[0].norm()) for total in totals]
        assert errors[2] < errors[1] / 5

    run(body, 2, nodes=[0, 1], options=options(all_gather="exact", reduce_scatter="exact"))


def test_a_model_made_anew_starts_without_the_residuals_of_the_one_that_is_gone() -> None:
    def body() -> None:
        def gradient(feedback: zcomm.codec.ErrorFeedback, scale: float) -> torch.Tensor:
            torch.manual_seed(0)
            layer = nn.Linear(256, 256)
            fully_shard(layer)
            compress(layer, gradients="eden2:32", error_feedback=feedback)
            inputs = torch.randn(3, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
            (scale * layer(inputs).square()).sum().backward()
            grad: torch.Tensor = layer.weight.grad.to_local().clone()  # type: ignore[union-attr]
            return grad

        kept = zcomm.codec.ErrorFeedback()
        gradient(kept, 100.0)
        gc.collect()
        assert torch.equal(gradient(kept, 1.0), gradient(zcomm.codec.ErrorFeedback(), 1.0))
        assert {one["calls"] for one in kept.state_dict()["residuals"].values()} == {1}

    run(body, 2, options=options(), nodes=[0, 1])


def test_a_residual_in_a_graph_starts_over_for_a_new_owner() -> None:
    class Owner:
        pass

    feedback = zcomm.codec.ErrorFeedback("int8:32")

    def use(owner: Owner, is_captured: bool = False) -> tuple[np.ndarray[Any, Any], bool]:
        key = f"{feedback.claim(owner, 'a')}/rank 0"
        found: tuple[np.ndarray[Any, Any], bool] = feedback.use(
            key, "64 values", 96, lambda size: np.ones(size, np.uint8), is_captured
        )
        return found

    first = Owner()
    use(first)
    data, _ = use(first, is_captured=True)
    del first
    second = Owner()
    again, empty = use(second)
    assert again is data and empty and not data.any()
    assert not use(second)[1]
    data[:] = 7
    state = feedback.state_dict()
    del second
    feedback.load_state_dict(state)
    assert use(Owner())[0] is data and (data == 7).all()  # what was loaded is the new owner's


def test_an_owner_keeps_its_key_when_another_goes() -> None:
    class Owner:
        pass

    feedback, first, second = zcomm.codec.ErrorFeedback("int8:32"), Owner(), Owner()
    assert [feedback.claim(owner, "a") for owner in (first, second, second)] == ["a", "a#2", "a#2"]
    del first
    assert [feedback.claim(second, name) for name in ("a", "longer.a")] == ["a#2"] * 2


def test_what_a_parameter_has_lost_is_not_added_to_another() -> None:
    """Both have one size, and train in turn."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        first, second = fully_shard(model)
        zcomm.fsdp.compress(
            model, weights="exact", gradients="int4:128", error_feedback=zcomm.codec.ErrorFeedback(), exempt=()
        )
        inputs = torch.randn(8, 64)
        second.weight.requires_grad_(False)
        (100 * model(inputs)).square().sum().backward()
        first.weight.requires_grad_(False)
        second.weight.requires_grad_(True)
        (0 * model(inputs)).sum().backward()
        assert not second.weight.grad.to_local().any()

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_what_a_parameter_has_lost_waits_while_it_is_frozen() -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        parts = list(fully_shard(model))
        feedback = zcomm.codec.ErrorFeedback()
        zcomm.fsdp.compress(model, weights="exact", gradients="int4:128", error_feedback=feedback, exempt=())
        inputs = torch.randn(8, 64)
        for step, factor in enumerate((100, 1, 0)):
            for number, part in enumerate(parts):
                part.weight.requires_grad_(number == step % 2)
            model.zero_grad()
            (factor * model(inputs)).sum().backward()
        assert parts[0].weight.grad.to_local().any()  # of its first gradient: this one is zero
        assert len(feedback.residual_bytes()) == 2

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_a_line_tells_of_a_reduction_that_the_loaded_state_lacks() -> None:
    feedback, told = zcomm.codec.ErrorFeedback(), logged()
    feedback.use("block/rank 0", "float32", 4, lambda size: np.zeros(size, np.uint8))
    state = feedback.state_dict()
    for key in ("block/rank 0", "model.block/rank 0"):
        feedback.load_state_dict(state)
        for used in (key, f"{key}, again"):
            feedback.use(used, "float32", 4, lambda size: np.zeros(size, np.uint8))
    assert told == ["error feedback: nothing was loaded for 'model.block/rank 0'; not used yet: block/rank 0"]


def test_residuals_of_ddp_belong_to_parameters_in_their_order() -> None:
    """DDP's second backward pass may have a bucket of the same size, in another order."""

    def body() -> None:
        def start() -> tuple[nn.Module, zcomm.codec.ErrorFeedback]:
            model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))))
            feedback = zcomm.codec.ErrorFeedback()
            state = zcomm.ddp.CompressState("int4:32", error_feedback=feedback)
            model.register_comm_hook(state, zcomm.ddp.compress_hook)
            return model, feedback

        def steps(model: nn.Module, count: int) -> None:
            for _ in range(count):
                model(torch.ones(1, 64)).sum().backward()

        def calls(feedback: zcomm.codec.ErrorFeedback) -> list[int]:
            return [one["calls"] for one in feedback.state_dict()["residuals"].values()]

        model, feedback = start()
        steps(model, 2)  # the first buckets, and the first of those that stay
        assert calls(feedback) == []
        steps(model, 3)
        assert calls(feedback) == [3]
        again, resumed = start()
        resumed.load_state_dict(feedback.state_dict())
        steps(again, 3)
        assert calls(resumed) == [3 + 2]

    run(body, 2, nodes=[0, 1], options=options())


def test_ddp_with_error_feedback_follows_the_exact_sum() -> None:
    def body() -> None:
        torch.manual_seed(0)
        totals = []
        for formats, feedback in [("exact", None), ("int4:32", None), ("int4:32", zcomm.codec.ErrorFeedback())]:
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(64, 64, bias=False), broadcast_buffers=False)
            if formats != "exact":
                # The inside format, in which the mean is gathered, is no part of the comparison.
                state = zcomm.ddp.CompressState(f"exact/{formats}", error_feedback=feedback)
                model.register_comm_hook(state, zcomm.ddp.compress_hook)
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
            total = torch.zeros(64, 64)
            for _ in range(30):
                model(inputs).square().sum().backward()
                total += model.module.weight.grad
                model.zero_grad()
            totals.append(total)
        exact, plain, fed_back = totals
        replicas: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(replicas, fed_back)
        assert all(torch.equal(replica, fed_back) for replica in replicas)
        step = float(exact.abs().max()) / 30 * 2 / 7
        assert float((fed_back - exact).abs().max()) < 3 * step < float((plain - exact).abs().max())

    run(body, 2, nodes=[0, 1], options=options())


def test_random_bits_depend_on_step_call_and_rank() -> None:
    def body() -> None:
        shard = torch.full((4096,), 0.3)
        shard[::32] = 7.0

        def gather() -> torch.Tensor:
            whole = torch.empty(2 * 4096)
            own = whole[dist.get_rank() * 4096 :][:4096]
            own.copy_(shard)
            dist.all_gather_into_tensor(whole, own)
            return whole

        first, second = gather(), gather()
        assert not torch.equal(first, second)  # calls
        assert not torch.equal(first[:4096], first[4096:])  # ranks
        zcomm.codec.set_step(0)
        assert torch.equal(gather(), first)
        assert torch.equal(gather(), second)
        zcomm.codec.set_step(1)
        third = gather()
        assert not torch.equal(third, first)  # steps
        # The mean of 8192 codes 0 or 1 that are 1 with probability 0.3: 6 standard errors, 1 of 5e8 runs is outside.
        ones = first[torch.arange(8192) % 32 != 0]
        assert set(ones.unique().tolist()) == {0.0, 1.0}
        assert abs(float(ones.mean()) - 0.3) < 6 * (0.3 * 0.7 / ones.numel()) ** 0.5
        other = dist.new_group(pg_options=options(all_gather="int4:32:stochastic"))
        zcomm.codec.set_step(-1, other)  # any number
        whole = torch.empty(2 * 4096)
        own = whole[dist.get_rank() * 4096 :][:4096]
        own.copy_(shard)
        dist.all_gather_into_tensor(whole, own, group=other)
        assert not torch.equal(whole, first)
        once = whole.clone()
        zcomm.codec.set_step(-1)  # of all groups
        own.copy_(shard)
        dist.all_gather_into_tensor(whole, own, group=other)
        assert torch.equal(whole, once) and not torch.equal(gather(), first)

    run(body, 2, options=options(all_gather="int4:32:stochastic"))


def test_wrong_arguments() -> None:
    for arguments, message in [
        ({"format": "exact"}, "format: expected a lossy one that rounds to nearest, got 'exact'"),
        (
            {"format": "int8:32:stochastic"},
            "format: expected a lossy one that rounds to nearest, got 'int8:32:stochastic'",
        ),
        ({"format": "int5:32"}, "got 'int5:32'"),
        ({"decay": 1.5}, "decay: expected 0 to 1, got 1.5"),
        ({"format": 5}, "format: expected a lossy one that rounds to nearest, got 5"),
        ({"decay": "a"}, "decay: expected 0 to 1, got 'a'"),
    ]:
        with pytest.raises(ValueError, match=message):
            zcomm.codec.ErrorFeedback(**arguments)
    with pytest.raises(ValueError, match=r"state: expected one of ErrorFeedback, got a dict of \{\}"):
        zcomm.codec.ErrorFeedback().load_state_dict({})
    for arguments, message in [
        ({"error_feedback": True}, r"error_feedback: expected zcomm.feedback.ErrorFeedback \| None, got True"),
        ({"process_group": "a"}, r"process_group: expected .*ProcessGroup \| None, got 'a'"),
    ]:
        with pytest.raises(TypeError, match=message):
            zcomm.ddp.CompressState(**arguments)
