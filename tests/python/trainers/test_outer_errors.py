"""The outer step's errors: sites that vanish, are late or differ, wrong arguments, and states of another one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import outer as sites
from support.training import make_model
from support.worlds import collect, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcomm


@pytest.mark.parametrize("format", ["exact", "int4:64"])
@pytest.mark.parametrize("steps", [0, 6])
def test_a_site_that_vanishes_is_an_error_for_the_others(steps: int, format: str) -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=4, delay=2, format=format)
        sites.train(model, outer, dist.get_rank(), 1, steps)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank"):
            sites.train(model, outer, dist.get_rank(), steps + 1, 20)

    outcomes = collect(body, 3, group_seconds=4.0, grace=40.0)
    assert [(outcome.finished, outcome.error) for outcome in outcomes[:2]] == [(True, None)] * 2, outcomes


@pytest.mark.parametrize("steps", [0, 6])
def test_an_exact_site_that_is_late_is_an_error_for_the_others(steps: int) -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=4, delay=2, format="exact")
        sites.train(model, outer, dist.get_rank(), 1, steps)
        if dist.get_rank() == 1:
            time.sleep(6)
        with pytest.raises(dist.DistBackendError, match="lost a rank"):
            sites.train(model, outer, dist.get_rank(), steps + 1, 12)

    run(body, 2, group_seconds=2.0)


@pytest.mark.parametrize("format", ["exact", "int4:64"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_default_dtype_is_no_one_elses(dtype: torch.dtype, format: str) -> None:
    """Parameters are float32, and so is what is sent."""

    def body() -> None:
        model = make_model()
        torch.set_default_dtype(dtype)
        outer = sites.outer_step(model, every=4, delay=2, format=format)
        for _ in range(8):
            with torch.no_grad():
                next(model.parameters()).add_(dist.get_rank())
            outer.step()
        outer.synchronize()

    run(body, 2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "every": ({"every": 0}, r"every: expected at least 1, got 0"),
    "fragments": ({"every": 3, "fragments": 4}, r"fragments: expected 1 to 3.* got 4"),
    "delay": ({"every": 4, "delay": 4}, r"delay: expected 0 to every - 1 = 3, got 4"),
    "keep": ({"keep": 1.5}, r"keep: expected 0 to 1, got 1.5"),
    "format": ({"format": "int5:64"}, r"format: expected"),
    "random bits": ({"format": "int4:64:stochastic"}, r"format: expected one format that rounds to nearest"),
    "two formats": ({"format": "int8:64/int4:64"}, r"format: expected one format"),
    "connections": ({"connections": 0}, r"connections: expected 1 to 64, got 0"),
    "max_rate": ({"max_rate": "fast"}, r"max_rate: expected a rate"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sites.outer_step(make_model(), **arguments)


OF_OTHER_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "every": ({"every": 2.3}, r"every: expected int, got 2.3"),
    "a bool": ({"every": True}, r"every: expected int, got True"),
    "fragments": ({"fragments": 2.0}, r"fragments: expected int, got 2.0"),
    "delay": ({"delay": None}, r"delay: expected int, got None"),
    "a format": ({"error_feedback": "int8:128"}, r"error_feedback: expected .* got 'int8:128'"),
    "a number": ({"error_feedback": 3}, r"error_feedback: expected bool \| zcomm.feedback.ErrorFeedback, got 3"),
    "keep": ({"keep": "half"}, r"keep: expected int \| float, got 'half'"),
    "no format": ({"format": None}, r"format: expected str, got None"),
    "connections": ({"connections": "4"}, r"connections: expected int \| None, got '4'"),
    "max_rate": ({"max_rate": 5}, r"max_rate: expected str \| None, got 5"),
    "None": ({"error_feedback": None}, r"error_feedback: expected bool \| zcomm.feedback.ErrorFeedback, got None"),
}


@pytest.mark.parametrize(("arguments", "message"), OF_OTHER_TYPES.values(), ids=OF_OTHER_TYPES)
def test_arguments_of_other_types_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        sites.outer_step(make_model(), **arguments)


def test_parameters_that_are_not_float32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer: expected parameters of float32 .* got torch.bfloat16 on cpu"):
        sites.outer_step(make_model().bfloat16())


def test_another_backend_is_refused() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="expected the backend 'zcomm'"):
            sites.outer_step(make_model())

    run(body, 2, backend="gloo")


def test_a_format_is_never_silently_dropped() -> None:
    """What is around the call may not change it, and nor may the group's own options."""

    def body() -> None:
        model = make_model()
        for around in (zcomm.exact(), zcomm.override(all_gather="int8:64")):
            with around, pytest.raises(RuntimeError, match=r"format: expected 'int4:64' to hold"):
                sites.outer_step(model)
        outer = sites.outer_step(model, every=2)
        with zcomm.exact():
            sites.train(model, outer, dist.get_rank(), 1, 2)
        stats = zcomm.stats()
        assert stats.reduce_scatter.calls == stats.all_gather.calls == 1

    run(body, 2, options=zcomm.Options(min_bytes=1 << 30, compress="auto", strict=True))


def test_sites_that_differ_are_told_so() -> None:
    def body() -> None:
        for what, arguments, scale in (
            ("values after the last outer step", {}, 1 + dist.get_rank()),
            ("arguments", {"every": 10 + dist.get_rank()}, 1),
        ):
            model = make_model()
            with torch.no_grad():
                model[0][0].weight.mul_(scale)
            outer = sites.outer_step(model, **arguments)
            with pytest.raises(ValueError, match=f"expected all sites to have the same {what}, got others at site 1"):
                outer.step()

    run(body, 2)


def _stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the outer optimizer a state, as a checkpoint does, and leave the parameters alone."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def test_outer_optimizers_that_differ_are_told_so() -> None:
    kinds = (sites.nesterov, torch.optim.Adam, lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.5)))

    def body() -> None:
        second = dist.get_rank() == 1
        for make in kinds:
            for what in ("lr", "arguments", "state"):
                model = make_model()
                optimizer = make(model.parameters())
                group = optimizer.param_groups[0]
                if second and what == "lr":
                    group["lr"] = group["lr"] * 0.5
                if second and what == "arguments":
                    group["nesterov" if "nesterov" in group else "betas"] = (0.5, 0.5)
                if second and what == "state":
                    _stepped(model, optimizer)
                outer = zcomm.outer.OuterStep(optimizer)
                wanted = "state" if what == "state" else "arguments"
                message = f"expected all sites to have the same {wanted} of the outer optimizer, got others at site 1"
                with pytest.raises(ValueError, match=message):
                    outer.step()

    run(body, 2)


def test_outer_optimizers_that_only_look_different_are_taken() -> None:
    """Neither the place of an object in memory nor the order of a dict says that sites differ."""

    def body() -> None:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _stepped(model, optimizer)
        mine = [[object() for _ in range(1 + dist.get_rank())] for _ in range(3)]
        optimizer.param_groups[0]["hook"] = mine[-1][-1]
        for state in optimizer.state.values():
            items = sorted(state.items(), reverse=dist.get_rank() == 1)
            state.clear()
            state.update(items)
            state["bits"] = torch.tensor([1, 2, 3], dtype=torch.uint8)  # an odd number of bytes
            state["more"] = [torch.ones(2, dtype=torch.float64), torch.zeros(0)]
        outer = zcomm.outer.OuterStep(optimizer, every=2)
        sites.train(model, outer, dist.get_rank(), 1, 3)
        outer.synchronize()

    run(body, 2)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "FSDP2"])
def test_sites_that_part_later_are_told_so_where_they_synchronize(is_sharded: bool) -> None:
    def body() -> None:
        shards = 2 if is_sharded else 1
        mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("sites", "shards"))
        group, site = mesh.get_group("sites"), mesh.get_local_rank("sites")
        for what in ("arguments of the outer optimizer", "state of the outer optimizer", "values"):
            model = make_model()
            if is_sharded:
                fully_shard(model, mesh=mesh["shards"])
            optimizer = sites.nesterov(model.parameters())
            outer = zcomm.outer.OuterStep(optimizer, every=2, fragments=2, group=group)
            sites.train(model, outer, site, 1, 4)
            outer.synchronize()
            if site == 1 and what.startswith("arguments"):
                optimizer.param_groups[0]["lr"] = 0.5
            if site == 1 and what.startswith("state"):
                optimizer.state.clear()
            if site == 1 and what == "values":
                outer._fragments[1].values.add_(0.01)
            sites.train(model, outer, site, 5, 8)
            for _ in range(2):  # neither does a second call make them agree
                with pytest.raises(ValueError, match=f"expected all sites to have the same {what}"):
                    outer.synchronize()

    run(body, 4 if is_sharded else 2, options=zcomm.Options(all_gather="exact", reduce_scatter="exact"))


def test_another_state_is_refused() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=4, delay=2)
        sites.train(model, outer, dist.get_rank(), 1, 4)
        state = outer.state_dict()
        with pytest.raises(RuntimeError, match="state: expected no fragments under way, got 1"):
            outer.load_state_dict(state)
        with pytest.raises(ValueError, match=r"state: expected one of .*'every': 5"):
            sites.outer_step(model, every=5).load_state_dict(state)
        with pytest.raises(ValueError, match=r"state: expected one of .*'every': 4.*, got None"):
            sites.outer_step(model, every=4).load_state_dict({})
        other = sites.outer_step(model[0], every=4, delay=2)
        with pytest.raises(ValueError, match=r"state: expected one of .*'elements': .18157.*got"):
            other.load_state_dict(state)

    run(body, 2)


def test_the_state_of_another_rank_is_refused() -> None:
    def body() -> None:
        states: list[Any] = [None, None]
        dist.all_gather_object(states, sites.outer_step(make_model()).state_dict())
        outer = sites.outer_step(make_model())
        rank = dist.get_rank()
        with pytest.raises(ValueError, match=f"state: expected that of rank {rank}, got that of rank {1 - rank}"):
            outer.load_state_dict(states[1 - rank])
        outer.load_state_dict(states[rank])

    run(body, 2)


def test_parameters_that_the_optimizer_got_later_are_refused() -> None:
    def body() -> None:
        optimizer = sites.nesterov(make_model().parameters())
        outer = zcomm.outer.OuterStep(optimizer, every=2)
        outer.step()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        for call in (outer.step, outer.synchronize):
            with pytest.raises(ValueError, match=r"optimizer: expected the 10 parameters that it had .* got 11"):
                call()

    run(body, 2)


def test_a_group_that_is_none_is_refused() -> None:
    def body() -> None:
        with pytest.raises(TypeError, match="group: expected a ProcessGroup, got 5"):
            sites.outer_step(make_model(), group=5)

    run(body, 1)
