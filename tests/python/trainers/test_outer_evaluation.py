"""Evaluations of an OuterStep leave the training as it is, to the bit, and synchronize() ends it once."""

from __future__ import annotations

import copy
import functools
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import outer as sites
from support.expected import assert_same_bits
from support.training import make_model
from support.worlds import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcomm

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.7),
    "momentum": functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9),
    "Nesterov, weight decay": functools.partial(
        torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
PROGRAMS, STEPS = 3, 17


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = (300, 64, 129)
        self.parts = torch.nn.ParameterList(torch.randn(size, generator=generator) for size in sizes)


def _evaluate(model: torch.nn.Module, outer: zcomm.outer.OuterStep) -> None:
    """All sites get the same bits within, and their own back."""
    before = [(parameter, parameter.grad, parameter.detach().clone()) for parameter in model.parameters()]
    with outer.averaged():
        sites.assert_replicas_agree(sites.flat(model))
    for parameter, gradient, values in before:
        assert parameter.grad is gradient
        assert_same_bits(parameter.detach(), values, "own parameter")


def _train(make: Make, arguments: dict[str, Any], events: dict[int, list[str]]) -> torch.Tensor:
    """Return the parameters and the outer optimizer's state after a training, with ``events`` after its steps."""

    def begin() -> tuple[torch.nn.Module, torch.optim.Optimizer, zcomm.outer.OuterStep]:
        model = Small()
        optimizer = make(model.parameters())
        return model, optimizer, zcomm.outer.OuterStep(optimizer, **arguments)

    parts = begin()
    for step in range(STEPS + 1):
        if step:
            sites.train(*parts[::2], dist.get_rank(), step, step)
        for event in events.get(step, []):
            if event == "evaluation":
                _evaluate(*parts[::2])
            else:
                file = io.BytesIO()
                torch.save([part.state_dict() for part in parts], file)
                parts = begin()
                for part, state in zip(parts, torch.load(io.BytesIO(file.getvalue()), weights_only=True), strict=True):
                    part.load_state_dict(state)
    model, optimizer, outer = parts
    trained = sites.flat(model)
    outer.synchronize()
    state = [each for _, one in sorted(optimizer.state_dict()["state"].items()) for _, each in sorted(one.items())]
    tensors = [each.flatten() for each in state if isinstance(each, torch.Tensor)]
    return torch.cat([trained, sites.flat(model), *tensors])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_evaluation_changes_the_training(make: Make) -> None:
    def body() -> None:
        choose = random.Random(7)  # the same at all sites
        for _ in range(PROGRAMS):
            every = choose.randint(1, 6)
            arguments = {
                "every": every,
                "fragments": choose.randint(1, min(every, 3)),
                "delay": choose.randint(0, every - 1),
                "keep": choose.choice((0.0, 0.25)),
                "format": choose.choice(("exact", "int4:64", "eden2:64")),
            }
            kinds = ("evaluation", "evaluation", "checkpoint")
            events = {step: choose.choices(kinds, k=choose.choice((0, 0, 1, 2))) for step in range(STEPS + 1)}
            with_them, without = _train(make, arguments, events), _train(make, arguments, {})
            assert_same_bits(with_them, without, f"after {arguments}, {events}")

    run(body, 2)


@pytest.mark.parametrize("arguments", [{}, {"delay": 3}, {"fragments": 4, "delay": 5, "keep": 0.25}], ids=str)
def test_synchronize_makes_no_outer_step_of_nothing(arguments: dict[str, Any]) -> None:
    """Each call made one on a pseudo-gradient of zero, in which momentum went on alone."""

    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=8, format="exact", **arguments)
        first = sites.flat(model)
        outer.synchronize()
        assert_same_bits(sites.flat(model), first, "parameters before the first step")
        sites.train(model, outer, dist.get_rank(), 1, 18)
        outer.synchronize()
        optimizer_before, before = copy.deepcopy(outer._optimizer.state_dict()), sites.flat(model)
        sites.assert_replicas_agree(before)
        for _ in range(3):
            outer.synchronize()
            assert_same_bits(sites.flat(model), before, "parameters")
        for old, new in zip(*(_momenta(one) for one in (optimizer_before, outer._optimizer.state_dict())), strict=True):
            assert_same_bits(new, old, "momentum")

    run(body, 2)


def _momenta(state: dict[str, Any]) -> list[torch.Tensor]:
    return [one["momentum_buffer"] for one in state["state"].values()]


def test_synchronize_after_a_scheduled_outer_step_leaves_its_values() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=8, format="exact")
        sites.train(model, outer, dist.get_rank(), 1, 16)
        wanted = sites.definition(2, 16, [list(range(10))], 8)[dist.get_rank()]
        outer.synchronize()
        assert_same_bits(sites.flat(model), wanted, "parameters")

    run(body, 2)


@pytest.mark.parametrize("reshard", [None, False])
def test_an_evaluation_under_fsdp2_is_of_the_mean(reshard: bool | None) -> None:
    """Two sites of two ranks; whole parameters that a forward pass leaves in place are those of before."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "shards"))
        site = mesh.get_local_rank("sites")
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 5))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh["shards"], reshard_after_forward=reshard)
        outer = sites.outer_step(model, every=4, format="exact", group=mesh.get_group("sites"))
        inputs = torch.ones(1, 8)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1 + site)
            own = model(inputs)
            assert torch.equal(own, torch.full((1, 5), (8.0 * (1 + site) + 1 + site) * 8 * (1 + site) + 1 + site))
            with outer.averaged():
                assert torch.equal(model(inputs), torch.full((1, 5), (8 * 1.5 + 1.5) * 8 * 1.5 + 1.5))
            assert torch.equal(model(inputs), own)

    run(body, 4, options=zcomm.Options(all_gather="exact", reduce_scatter="exact"))


def test_an_evaluation_ends_before_the_training_goes_on() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=4)
        sites.train(model, outer, dist.get_rank(), 1, 2)
        state, own = outer.state_dict(), sites.flat(model)
        with outer.averaged():
            calls: list[Callable[[], Any]] = [
                outer.step, outer.synchronize, outer.state_dict, lambda: outer.load_state_dict(state),
                lambda: outer.averaged().__enter__(),
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(RuntimeError, match=r"outer step: expected this call after averaged\(\)"):
                    call()
            assert outer.stats().inner_steps == 2
        with pytest.raises(KeyError), outer.averaged():
            raise KeyError("of the evaluation")
        assert_same_bits(sites.flat(model), own, "own parameters")
        outer.step()

    run(body, 2)


def test_an_evaluation_tells_sites_that_differ_and_counts_its_bytes() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=4, fragments=2)
        with outer.averaged():
            stats = outer.stats()
            assert (stats.reductions, stats.in_flight) == (2, 0)
            assert 0 < stats.sent_bytes < stats.exact_bytes / 6
        outer._fragments[1].values.add_(dist.get_rank())
        with pytest.raises(ValueError, match="expected all sites to have the same values"), outer.averaged():
            pass

    run(body, 2)
