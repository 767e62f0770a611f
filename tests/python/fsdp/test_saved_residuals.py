"""Residuals in checkpoints, and whose they are."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.expected import assert_same_bits
from support.fsdp_model import NODES, batch, sharded, whole
from support.worlds import options, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm.fsdp import compress


def test_fsdp2_resumes_bit_for_bit() -> None:
    def body() -> None:
        def start() -> tuple[nn.Module, torch.optim.Optimizer, zcomm.codec.ErrorFeedback]:
            model = sharded()
            feedback = zcomm.codec.ErrorFeedback()
            compress(model, gradients="int8:64/int4:32", error_feedback=feedback)
            return model, torch.optim.SGD(model.parameters(), lr=0.01), feedback

        def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
            losses = []
            for _ in range(count):
                loss = model(batch()).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses

        model, optimizer, feedback = start()
        steps(model, optimizer, 2)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        residuals = pickle.loads(pickle.dumps(feedback.state_dict()))
        going_on = steps(model, optimizer, 3)
        # At most a byte and a 64th for each element that this rank sums for the other node, half of its gradients.
        elements = sum(parameter.numel() for parameter in model.parameters()) / 2
        assert 0 < feedback.memory_bytes() < 1.3 * elements
        assert set(feedback.residual_bytes()) == {f"{name}/rank {dist.get_rank()}" for name in ("0", "1", "2")}

        again, again_optimizer, again_feedback = start()
        again.load_state_dict(weights)
        again_feedback.load_state_dict(residuals)
        assert steps(again, again_optimizer, 3) == going_on
        for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
            assert_same_bits(whole(ours), whole(theirs))

    run(body, 4, nodes=NODES, options=options())


def test_residuals_of_hsdp_are_those_of_a_rank_of_the_world() -> None:
    """Replicas have the same rank in their shards' groups, and other residuals."""

    def body() -> None:
        layer, feedback = nn.Linear(256, 256), zcomm.codec.ErrorFeedback()
        fully_shard(layer, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        compress(layer, gradients="int4:32", error_feedback=feedback)
        layer(torch.ones(1, 256)).sum().backward()
        assert list(feedback.state_dict()["residuals"]) == [f"FSDPLinear/rank {dist.get_rank()}"]

    run(body, 4, options=options())


def test_a_checkpoint_that_leaves_residuals_out_is_refused(tmp_path: Path) -> None:
    """torch.distributed.checkpoint loads only the names that an object has, a new one none."""

    def fed(steps: int) -> zcomm.codec.ErrorFeedback:
        feedback = zcomm.codec.ErrorFeedback()
        for _ in range(steps):
            feedback.use("Linear/rank 0", "64 values", 96, lambda size: torch.zeros(size, dtype=torch.uint8))
        return feedback

    dcp.save({"feedback": fed(1)}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(ValueError, match="state: expected its 1 residuals, got 0"):
        dcp.load({"feedback": fed(0)}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"feedback": fed(1)}, checkpoint_id=tmp_path, no_dist=True)


def test_residuals_of_another_rank_alone_are_refused() -> None:
    def body() -> None:
        def step(feedback: zcomm.codec.ErrorFeedback, steps: int = 1) -> None:
            layer = nn.Linear(256, 256)
            fully_shard(layer)
            compress(layer, gradients="int4:32", error_feedback=feedback)
            for _ in range(steps):
                layer(torch.ones(1, 256)).sum().backward()

        saved = zcomm.codec.ErrorFeedback()
        step(saved)
        states: list[Any] = [None, None]
        dist.all_gather_object(states, saved.state_dict())
        merged = {"format": saved.format, "residuals": states[0]["residuals"] | states[1]["residuals"]}
        of_all, of_rank_0 = zcomm.codec.ErrorFeedback(), zcomm.codec.ErrorFeedback()
        of_all.load_state_dict(merged)
        step(of_all, steps=2)
        of_rank_0.load_state_dict(states[0])
        if dist.get_rank() == 1:
            use = functools.partial(of_rank_0.use, "FSDPLinear/rank 1", "64 values", 96)
            wanted = r"state that was loaded is of 'FSDPLinear/rank 0', this reduction is of 'FSDPLinear/rank 1'"
            with pytest.raises(ValueError, match=wanted):
                use(torch.empty)
            of_rank_0.reset()
            use(lambda size: torch.empty(size, dtype=torch.uint8))

    run(body, 2, options=options(), nodes=[0, 1])


WRONG_STATES: dict[str, tuple[Any, type[Exception], str]] = {
    "None": (None, TypeError, "expected dict, got NoneType"),
    "a list": ([], TypeError, "expected dict, got list"),
    "a text": ("int8:128", TypeError, "expected dict, got str"),
    "nothing": ({}, ValueError, "expected one of ErrorFeedback, got a dict of {}"),
    "an optimizer's": ({"state": {}, "param_groups": []}, ValueError, "got a dict of 'state', 'param_groups'"),
    "no residual": ({"format": "int8:128", "residuals": {"a": None}}, ValueError, "expected bytes, .* for 'a'"),
    "no bytes": (
        {"format": "int8:128", "residuals": {"a": {"data": torch.ones(4), "layout": "four", "calls": 1}}},
        ValueError,
        "expected bytes, .* for 'a'",
    ),
    "no calls": (
        {"format": "int8:128", "residuals": {"a": {"data": torch.ones(4, dtype=torch.uint8), "layout": "four"}}},
        ValueError,
        "expected bytes, .* for 'a'",
    ),
    "another format": ({"format": "bf16", "residuals": {}}, ValueError, "expected residuals in 'int8:128', got 'bf16'"),
}


@pytest.mark.parametrize(("state", "error", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_wrong_state_leaves_the_residuals_alone(state: Any, error: type[Exception], message: str) -> None:
    feedback = zcomm.codec.ErrorFeedback()
    data, _ = feedback.use("a", "four", 4, lambda size: torch.full((size,), 7, dtype=torch.uint8))
    with pytest.raises(error, match=f"^state: .*{message}"):
        feedback.load_state_dict(state)
    kept, is_empty = feedback.use("a", "four", 4, lambda size: torch.empty(size, dtype=torch.uint8))
    assert kept is data and not is_empty


def test_a_state_that_does_not_fit_a_graph_leaves_all_residuals_alone() -> None:
    feedback = zcomm.codec.ErrorFeedback()

    def use(key: str, is_captured: bool = False) -> tuple[torch.Tensor, bool]:
        return feedback.use(key, "four", 4, lambda size: torch.full((size,), 7, dtype=torch.uint8), is_captured)

    for _ in range(2):
        data, other = use("graph")[0], use("other")[0]
    use("graph", is_captured=True)
    state = feedback.state_dict()
    state["residuals"]["graph"]["layout"] = "five"
    with pytest.raises(ValueError, match="was loaded for 'graph' is of five"):
        feedback.load_state_dict(state)
    assert data.tolist() == [7] * 4
    kept, is_empty = use("other")
    assert kept is other and not is_empty
