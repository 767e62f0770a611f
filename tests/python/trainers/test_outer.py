"""The outer step: the algorithm's definition, equal replicas, restarts, bytes, and FSDP2 inside of sites."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import outer as sites
from support.expected import assert_same_bits
from support.training import loss_of, make_batch, make_model
from support.worlds import collect, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcomm
from zcomm import codec
from zcomm.codec import ErrorFeedback
from zcomm.outer.averaging import Averaging

EVERY = 8
# Parameters 0 to 9 of the model, by fragments of about equal size: four large matrices are nearly all of it.
PARTS = {1: [list(range(10))], 2: [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], 4: [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9]]}
SCHEDULES = {
    "all at once": {},
    "all at once, later": {"delay": 3},
    "in turns": {"fragments": 4},
    "in turns, later": {"fragments": 4, "delay": 1},
    "in turns, mixed": {"fragments": 2, "delay": 3, "keep": 0.5},
    "two under way": {"fragments": 4, "delay": 5, "keep": 0.25},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_an_exact_format_gives_the_bits_of_the_definition(schedule: dict[str, Any]) -> None:
    steps = 3 * EVERY + 2

    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=EVERY, format="exact", **schedule)
        sites.train(model, outer, dist.get_rank(), 1, steps)
        wanted = sites.definition(2, steps, PARTS[schedule.get("fragments", 1)], EVERY, **others)
        assert_same_bits(sites.flat(model), wanted[dist.get_rank()], "parameters")
        assert outer.stats().sent_bytes == outer.stats().exact_bytes > 0

    others = {name: value for name, value in schedule.items() if name != "fragments"}
    run(body, 2)


@pytest.mark.parametrize("format", ["int4:64", "eden2:64"])
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_agree_to_the_bit(size: int, format: str) -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=EVERY, fragments=4, delay=3, keep=0.5, format=format)
        for first in range(1, 3 * EVERY, 3):
            sites.train(model, outer, dist.get_rank(), first, first + 2)
            sites.assert_replicas_agree(torch.cat(outer.state_dict()["values"]))
        outer.synchronize()
        sites.assert_replicas_agree(sites.flat(model))
        assert outer.stats().in_flight == 0

    run(body, size)


def test_a_mean_is_what_its_encodings_say() -> None:
    """A value is encoded once on its way to the owner of its part, and once as a mean. Feedback keeps both losses."""
    num, format, kept = 4 * 64, "int4:64", "int8:128"
    inputs = torch.randn(5, 2, num, generator=torch.Generator().manual_seed(0))

    def body() -> torch.Tensor:
        averaging = Averaging(num, torch.device("cpu"), format, ErrorFeedback(kept), "test", None)
        means = []
        for values in inputs[:, dist.get_rank()]:
            buffer = averaging.new_buffer()
            buffer.copy_(values)
            averaging.reduce(buffer)
            means.append(averaging.finish().clone())
        return torch.stack(means)

    def lossy(values: torch.Tensor, lost: list[Any]) -> torch.Tensor:
        terms = [(values, "exact"), *lost]
        wire = codec.decode_sum_encode(terms, len(values), format)
        left = codec.decode_sum_encode([*terms, (wire, format, -1.0)], len(values), kept)
        lost[:] = [(left, kept)]
        return codec.decode(wire, format, torch.empty_like(values))

    wanted = torch.empty(5, num)
    half = num // 2
    for owner in (0, 1):
        part = slice(owner * half, (owner + 1) * half)
        of_sums: list[Any] = []
        of_means: list[Any] = []
        for values, mean in zip(inputs, wanted, strict=True):
            arrived = lossy(values[1 - owner, part].contiguous(), of_sums)
            mean[part] = lossy((values[owner, part] + arrived) * 0.5, of_means)
    for means in run(body, 2):
        # The residual of the mean is made of values that were rounded to float32 at another place.
        torch.testing.assert_close(means, wanted, rtol=0, atol=float(inputs.abs().max()) * 2**-20)


def test_what_a_reduction_loses_arrives_later() -> None:
    """Of a constant the mean of many averages is nearer than one average by far, also in two bits."""

    def body() -> None:
        values = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
        exact = values.clone()
        dist.all_reduce(exact, dist.ReduceOp.AVG)
        for format, feedback, most in (("eden2:64", ErrorFeedback("bf16"), 0.15), ("eden2:64", None, 10.0)):
            averaging = Averaging(1000, torch.device("cpu"), format, feedback, "test", None)
            total = torch.zeros(1000)
            for _ in range(50):
                buffer = averaging.new_buffer()
                buffer[:1000] = values
                averaging.reduce(buffer)
                total += averaging.finish()
            error = float((total / 50 - exact).abs().max())
            assert error < most, (format, feedback, error)
            assert feedback is not None or error > 0.3

    run(body, 3)


@pytest.mark.parametrize("kept", ["int8:128", "bf16"])
def test_a_mean_that_was_not_finite_does_not_come_back(kept: str) -> None:
    """Of a NaN nothing remains in later means. Blocks without one keep their bits."""
    num, wrong = 4 * 128, slice(128, 256)  # the block of the residual that has the NaN
    inputs = torch.randn(4, 2, num, generator=torch.Generator().manual_seed(0))

    def means_of(key: str, fault: float) -> torch.Tensor:
        averaging = Averaging(num, torch.device("cpu"), "int4:64", ErrorFeedback(kept), key, None)
        means = []
        for count, values in enumerate(inputs[:, dist.get_rank()]):
            buffer = averaging.new_buffer()
            buffer.copy_(values)
            if count == 1 and dist.get_rank() == 1:
                buffer[wrong.start] += fault
            averaging.reduce(buffer)
            means.append(averaging.finish().clone())
        return torch.stack(means)

    def body() -> None:
        healthy = means_of("healthy", 0.0)
        for fault in (float("nan"), float("inf")):
            means = means_of(f"with {fault}", fault)
            assert not means[1, wrong].isfinite().all()
            assert means[2:].isfinite().all()
            means[:, wrong] = healthy[:, wrong]
            assert_same_bits(means, healthy, "means of other blocks")

    run(body, 2)


KILLED_AT, RESUMED_AFTER, END = 21, 18, 31


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The state is taken while one fragment's means and two others' sums are on their way."""
    arguments: dict[str, Any] = {"every": EVERY, "fragments": 4, "delay": 5, "keep": 0.25, "format": "int4:64"}

    def begin() -> tuple[Any, Any, Any]:
        model = make_model()
        optimizer = sites.nesterov(model.parameters())
        return model, optimizer, zcomm.outer.OuterStep(optimizer, **arguments)

    def uninterrupted() -> torch.Tensor:
        model, _, outer = begin()
        sites.train(model, outer, dist.get_rank(), 1, END)
        return sites.flat(model)

    def killed() -> None:
        model, optimizer, outer = begin()
        sites.train(model, outer, dist.get_rank(), 1, RESUMED_AFTER)
        assert outer.stats().in_flight == 3
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "outer": outer.state_dict()}
        torch.save(state, tmp_path / f"{dist.get_rank()}.pt")
        sites.train(model, outer, dist.get_rank(), RESUMED_AFTER + 1, KILLED_AT)
        os.kill(os.getpid(), signal.SIGKILL)

    def resumed() -> torch.Tensor:
        state = torch.load(tmp_path / f"{dist.get_rank()}.pt", weights_only=True)
        model, optimizer, outer = begin()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        outer.load_state_dict(state["outer"])
        sites.train(model, outer, dist.get_rank(), RESUMED_AFTER + 1, END)
        return sites.flat(model)

    wanted = run(uninterrupted, 2)
    assert [outcome.exit_code for outcome in collect(killed, 2)] == [-signal.SIGKILL] * 2
    for got, want in zip(run(resumed, 2), wanted, strict=True):
        assert_same_bits(got, want, "parameters")


@pytest.mark.parametrize(("format", "times"), [("int8:64", 3.8), ("int4:64", 7), ("eden2:64", 13)])
@pytest.mark.parametrize("nodes", [None, [0, 1, 2, 3]], ids=["one node", "nodes"])
def test_bytes(nodes: list[int] | None, format: str, times: float) -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=2, fragments=2, format=format)
        before = zcomm.stats()
        sites.train(model, outer, dist.get_rank(), 1, 4)
        after, stats = zcomm.stats(), outer.stats()
        counted = [getattr(after, name).wire_bytes - getattr(before, name).wire_bytes for name in used]
        assert stats.reductions == 4
        assert stats.sent_bytes == sum(counted) <= stats.exact_bytes / times
        assert stats.exact_bytes == pytest.approx(2 * 2 * 3 / 4 * 4 * len(sites.flat(model)), abs=16)

    used = ("reduce_scatter", "all_gather")
    run(body, 4, nodes=nodes)


@pytest.mark.parametrize("format", ["exact", "int4:64"])
def test_fsdp2_in_two_sites_of_two_ranks(format: str) -> None:
    """Each rank averages its own shard with its like at the other site; shards of a width of 67 are uneven."""
    steps = 2 * EVERY + 3

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "shards"))
        group, site = mesh.get_group("sites"), mesh.get_local_rank("sites")
        model = make_model()
        for block in model:
            fully_shard(block, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        outer = sites.outer_step(model, every=EVERY, fragments=2, delay=3, format=format, group=group)
        sites.train(model, outer, site, 1, steps)
        if format == "exact":
            wanted = make_model()
            torch.nn.utils.vector_to_parameters(
                sites.definition(2, steps, PARTS[2], EVERY, 3)[site], wanted.parameters()
            )
            for got, want in zip(model.parameters(), wanted.parameters(), strict=True):
                assert_same_bits(got.full_tensor().detach(), want.detach(), "parameter")
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(2 * EVERY):
            loss = loss_of(model, dist.get_rank())
            loss.backward()
            inner.step()
            outer.step()
            inner.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        outer.synchronize()
        sites.assert_replicas_agree(sites.flat(model), group)

    run(body, 4, options=zcomm.Options(all_gather="exact", reduce_scatter="exact"))


@pytest.mark.parametrize("reshard", [None, False])
def test_evaluations_before_and_after_an_outer_step_of_fsdp2(reshard: bool | None) -> None:
    """An evaluation leaves whole parameters in place, which a later one must not use."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("sites", "shards"))
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        for part in (model[0], model):  # the second is the root's own
            fully_shard(part, mesh=mesh["shards"], reshard_after_forward=reshard)
        outer = sites.outer_step(model, every=2, group=mesh.get_group("sites"))
        inputs = torch.ones(1, 8)
        with torch.no_grad():
            model(inputs)
            for parameter in model.parameters():
                parameter.mul_(2 + dist.get_rank())
            outer.step()
            outer.synchronize()
            got = model(inputs)
            for part in (model[0], model):
                part.reshard()
            assert torch.equal(got, model(inputs))

    run(body, 2, options=zcomm.Options(all_gather="exact", reduce_scatter="exact"))


def test_an_evaluation_of_a_model_that_was_used_before_zcomms_first_group() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("sites", "shards"))
        model: Any = fully_shard(torch.nn.Linear(8, 8), mesh=mesh["shards"])
        inputs = torch.ones(1, 8)
        model(inputs).sum().backward()
        model.zero_grad()
        outer = sites.outer_step(model, every=2, group=dist.new_group(backend="zcomm"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2 + dist.get_rank())
            model(inputs)  # the root stays gathered
            outer.step()
            outer.synchronize()
            got = model(inputs)
            model.reshard()
            assert torch.equal(got, model(inputs))

    run(body, 2, backend="gloo")


def test_an_outer_optimizer_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = zcomm.outer.OuterStep(optimizer, every=1, format="exact")
        model(torch.ones(1, 8)).sum().backward()
        with torch.no_grad():
            model.weight.add_(1 + dist.get_rank())
        before = [each.detach().clone() for each in (model.weight, model.weight.grad, model.bias.grad)]
        with monkeypatch.context() as patched, pytest.raises(ValueError, match="once"):
            patched.setattr(optimizer, "step", lambda: exec("raise ValueError('once')"))
            outer.step()
        for was, now in zip(before, (model.weight, model.weight.grad, model.bias.grad), strict=True):
            assert torch.equal(was, now)
        outer.synchronize()
        sites.assert_replicas_agree(sites.flat(model))

    run(body, 2)


def test_the_gradients_and_state_of_the_inner_optimizer_are_left_alone() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=1)
        inputs, targets = make_batch(0)
        (model(inputs) - targets).square().mean().backward()
        before = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in before if gradient is not None]
        outer.step()
        after = [parameter.grad for parameter in model.parameters()]
        assert all(one is other for one, other in zip(before, after, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(copies, after, strict=True))  # type: ignore[arg-type]

    run(body, 2)


def test_fragments_wait_until_the_rate_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0
        slept = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds
            self.slept += seconds

    def body() -> None:
        clock = Clock()
        monkeypatch.setattr(zcomm.outer.rate, "time", clock)
        model = make_model()
        outer = sites.outer_step(model, every=4, fragments=2, format="int4:64", max_rate="100kbit")
        for step in range(1, 21):
            sites.inner_step(model, dist.get_rank(), step)
            clock.now += 0.25
            outer.step()
        stats = outer.stats()
        assert stats.limit_seconds == clock.slept > 0
        # The last fragment's time has only begun.
        assert stats.sent_bytes * (1 - 2 / stats.reductions) <= (clock.now - 100) * 100e3 / 8

    run(body, 2)


def test_a_single_site_sends_nothing() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=EVERY)
        sites.train(model, outer, 0, 1, EVERY)
        assert_same_bits(sites.flat(model), sites.definition(1, EVERY, PARTS[1], EVERY)[0], "parameters")
        assert (outer.stats().reductions, outer.stats().sent_bytes) == (1, 0)

    run(body, 1)


def test_sites_that_load_other_steps_are_told() -> None:
    def body() -> None:
        model = make_model()
        outer = sites.outer_step(model, every=4)
        sites.train(model, outer, dist.get_rank(), 1, 1)
        state = outer.state_dict()
        state["inner_steps"] += dist.get_rank()
        outer.load_state_dict(state)
        with pytest.raises(ValueError, match="same number of inner steps"):
            outer.step()

    run(body)
