"""Ranks agree about changed weights: a write may reach the rows of some ranks only, or be made by one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.row_changes import SOME_ROWS, full
from support.training import WIDTH, make_batch
from support.weight_changes import WAYS
from support.worlds import collect, options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.fsdp import Compression, compress

WEIGHTS = pytest.mark.parametrize("weights", ["int8:256", "lossless"])
NODES = [[0, 0, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1, 2, 2, 3]]
UNEVEN = ("foreach_mul_of_data", "dcp_load_into_a_state_dict")  # where some ranks have no rows


class Model(nn.Module):
    """Units with a row for each rank and more, with rows for two ranks, and with one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.low = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 5.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.low(self.wide(inputs.to(self.scale.dtype))) * self.scale
        return result


def sharded(weights: str, **fields: Any) -> tuple[Model, Compression]:
    model = Model()
    for unit in (model.wide, model.low, model):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
    return model, compress(model, weights=weights, exempt=(), **fields)


@WEIGHTS
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_every_rank_has_the_new_values_whichever_rows_were_written(
    weights: str, nodes: list[int], tmp_path: Path
) -> None:
    """The next gather has the values that the one after ``invalidate()`` has, and differs from the one before."""

    def body() -> None:
        inputs, _ = make_batch(0)  # the same on all ranks: their outputs are alike
        with torch.no_grad():
            for name, change in {**SOME_ROWS, **{way: WAYS[way] for way in UNEVEN}}.items():
                model, compression = sharded(weights)
                before = model(inputs)
                kept = [full(parameter) for parameter in model.parameters()]
                assert torch.equal(model(inputs), before)
                change(model, tmp_path / name)
                is_changed = any(
                    not torch.equal(full(p).bfloat16(), old.bfloat16())
                    for p, old in zip(model.parameters(), kept, strict=True)
                )
                got = model(inputs)
                compression.invalidate()
                assert torch.equal(model(inputs), got), f"{name}: the weights before it were gathered"
                assert is_changed != name.startswith("dcp_load"), f"{name} changed nothing"
                if weights == "lossless":
                    assert torch.equal(got, before) != is_changed, name

    run(body, len(nodes), nodes=nodes, options=options(min_bytes=1), seconds=200, group_seconds=60)


@pytest.mark.parametrize("writer", [0, 3])
@pytest.mark.parametrize("counted", [True, False])
def test_a_write_of_one_rank_before_the_backward_pass_has_the_bits_of_gloo(writer: int, counted: bool) -> None:
    def gradients(model: Model) -> list[torch.Tensor]:
        inputs, _ = make_batch(dist.get_rank())
        loss = model(inputs).float().square().mean()
        if dist.get_rank() == writer:
            with torch.no_grad():
                values = model.wide.weight.to_local()
                (values if counted else values.data).mul_(1.5)
        loss.backward()
        return [full(parameter.grad) for parameter in model.parameters()]

    def body() -> None:
        model, compression = sharded("lossless", gradients="exact")
        got = gradients(model)
        crossed = {name: stats.gathers_inter_node for name, stats in compression.stats().items()}
        assert crossed["wide"] == 2 and crossed["low"] == 1, crossed
        compression.disable()
        model = Model()
        for unit in (model.wide, model.low, model):
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
        with zcomm.exact():
            wanted = gradients(model)
        assert all(map(torch.equal, got, wanted))

    run(body, 4, nodes=[0, 0, 1, 1], options=options(min_bytes=1))


def test_ranks_agree_once_for_each_gather_that_may_stay_in_the_node() -> None:
    """Not after a step of an optimizer, which all ranks know of."""

    def body() -> None:
        model, compression = sharded("int8:256")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs, _ = make_batch(dist.get_rank())
        for _ in range(3):
            model(inputs).float().square().mean().backward()
            optimizer.step()
        stats = compression.stats().values()
        assert [(unit.gathers_inter_node, unit.gathers_intra_node) for unit in stats] == [(3, 3)] * 3
        assert zcomm.stats().rehearsals.calls == 9

    run(body, 4, nodes=[0, 0, 1, 1], options=options(min_bytes=1))


def test_ranks_that_gather_different_modules_are_told_so() -> None:
    """No rank takes an answer about another module for one about its own."""

    def body() -> None:
        model, _ = sharded("int8:256")
        inputs, _ = make_batch(0)
        with torch.no_grad():
            model(inputs)
            (model.wide if dist.get_rank() == 0 else model.low)(inputs.bfloat16())

    outcomes = collect(body, 4, nodes=[0, 1, 2, 3], options=options(min_bytes=1), grace=20.0)
    for rank, outcome in enumerate(outcomes):
        module, others = ("wide", [1, 2, 3]) if rank == 0 else ("low", [0])
        assert f"weights of {module}, but ranks {others} of its group gather another" in (outcome.error or ""), outcomes
