"""`compress="auto"` by training steps: all ranks take the way in which steps are faster. Clocks are planted."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, gather_in_place, logged, newly_counted
from support.decisions import FAST_LINK, SLOW_LINK, table
from support.expected import assert_same_bits
from support.fsdp_model import NODES, batch, sharded, whole
from support.worlds import options, run
from torch.distributed.fsdp import MixedPrecisionPolicy

import zcomm
import zcomm.distributed.backend
from zcomm.distributed import groups
from zcomm.distributed.stats import StepDecision

BLOCK = 4  # steps
MANY_STEPS = 14 * BLOCK  # of a trial whose times have no spread, and some more


def optimizer() -> torch.optim.Optimizer:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


@dataclass
class Trainer:
    """One rank whose steps take planted times: those with exact calls, and those with compressed ones."""

    exact_ns: int = 2000
    compressed_ns: int = 1000
    started_ns: int = 0
    table: str | None = None
    sizes: list[int] = field(default_factory=lambda: [NUM, NUM + 64])
    end_step: Callable[[], Any] = field(default_factory=lambda: optimizer().step)
    ways: list[bool] = field(default_factory=list)  # of steps, whether compressed

    def __post_init__(self) -> None:
        self.now = self.started_ns
        zcomm.distributed.backend.perf_counter_ns = lambda: self.now
        self.group = dist.new_group(pg_options=zcomm.Options(compress="auto", decisions=self.table))

    def call(self, num: int) -> None:
        group_data = [data(rank, num) for rank in range(dist.get_world_size())]
        mine = torch.cat(group_data)
        way = newly_counted(lambda: gather_in_place(mine, self.group), self.group)
        (self.is_compressed,) = [name == "all_gather: compressed" for name in way]

    def take_steps(self, count: int = MANY_STEPS) -> None:
        for _ in range(count):
            for num in self.sizes:
                self.call(num)
            self.ways.append(self.is_compressed)
            self.now += self.compressed_ns if self.is_compressed else self.exact_ns
            self.end_step()

    @property
    def decision(self) -> StepDecision | None:
        return zcomm.stats(self.group).by_steps


def same_on_all_ranks(found: list[Any]) -> Any:
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("faster", ["exact", "compressed"])
def test_all_ranks_take_the_way_of_the_faster_steps(faster: str) -> None:
    """Also if their clocks differ wildly: the slowest rank counts, and is another one for each way."""

    def body() -> tuple[list[bool], StepDecision | None]:
        logging.getLogger("zcomm").setLevel(logging.INFO)
        lines = logged()
        other = 1_000_000 if faster == "exact" else 3_000
        trainer = Trainer(5_000, other, 0) if dist.get_rank() == 0 else Trainer(10, 20, 1 << 60)
        trainer.take_steps()
        stats = zcomm.stats(trainer.group)
        assert trainer.ways[-1] == (faster == "compressed")
        assert {(one.by, one.compressed) for one in stats.decisions} == {("steps", trainer.ways[-1])}
        wanted = "5 us +- 0 us with exact calls and " + ("3 us" if faster == "compressed" else "1 ms")
        assert f"by steps: {faster}, as a step takes {wanted}" in str(stats)
        assert str(stats.by_steps) in zcomm.report(trainer.group).decisions
        assert not [name for name in stats.to_dict() if "by_steps" in name]
        told = [line for line in lines if "compress='auto': by steps" in line]
        assert len(told) == (1 if dist.get_rank() == 0 else 0)
        return trainer.ways, trainer.decision

    ways, decision = same_on_all_ranks(run(body))
    times = (5e-6, 3e-6) if faster == "compressed" else (5e-6, 1e-3)
    assert (decision.exact_seconds, decision.compressed_seconds) == pytest.approx(times)
    runs = [len(list(steps)) for _, steps in groupby(ways)]
    assert 2 * BLOCK in runs and set(runs[2:-2]) == {2 * BLOCK}


def test_calls_are_not_rehearsed_once_steps_are_known() -> None:
    def body() -> tuple[int, list[str]]:
        trainer = Trainer()
        trainer.take_steps()
        before = zcomm.stats(trainer.group).rehearsals.calls
        trainer.call(8 * NUM)
        assert trainer.is_compressed
        stats = zcomm.stats(trainer.group)
        assert "compressed, by steps" in str(stats.decisions[-1])
        return stats.rehearsals.calls - before, [one.by for one in stats.decisions]

    assert same_on_all_ranks(run(body)) == (0, ["steps"] * 2)


def test_another_shape_of_steps_is_decided_anew() -> None:
    def body() -> tuple[bool, bool, bool]:
        trainer = Trainer()
        trainer.take_steps()
        trainer.exact_ns = 500  # nobody looks again
        trainer.take_steps()
        first = trainer.ways[-1]
        trainer.sizes = [NUM]
        was_undecided = False
        for _ in range(8):  # ranks compare steps ever more rarely
            trainer.take_steps(MANY_STEPS // 2)
            was_undecided |= trainer.decision is None
        return first, was_undecided, trainer.ways[-1]

    assert same_on_all_ranks(run(body)) == (True, True, False)


def test_a_trial_ends_though_sizes_vary_after_some_steps() -> None:
    def body() -> tuple[list[bool], StepDecision | None]:
        trainer, draw = Trainer(), random.Random(1)
        trainer.take_steps(20)
        for _ in range(3 * MANY_STEPS):
            trainer.sizes = [NUM, NUM + 64 * draw.randrange(1, 400)]
            trainer.take_steps(1)
        return trainer.ways, trainer.decision

    ways, decision = same_on_all_ranks(run(body))
    assert decision is not None and decision.compressed and ways[-1]


def test_a_trial_is_given_up_if_a_rank_ends_steps_elsewhere() -> None:
    def body() -> tuple[list[bool], StepDecision | None, bool]:
        trainer = Trainer()
        trainer.take_steps(BLOCK + 6)
        if dist.get_rank() == 1:
            trainer.end_step = lambda: None
        trainer.take_steps()
        return trainer.ways, trainer.decision, "steps" in {one.by for one in zcomm.stats(trainer.group).decisions}

    ways, decision, by_steps = same_on_all_ranks(run(body))
    assert len(set(ways[:-BLOCK])) == 2 and len(set(ways[-BLOCK:])) == 1
    assert decision is None and not by_steps


def test_without_steps_calls_decide() -> None:
    def body() -> set[str]:
        trainer = Trainer(end_step=lambda: None)
        trainer.take_steps()
        assert len(set(trainer.ways)) == 1 and trainer.decision is None
        return {one.by for one in zcomm.stats(trainer.group).decisions}

    assert same_on_all_ranks(run(body)) == {"calls"}


def test_calls_decide_where_only_some_ranks_have_steps() -> None:
    def body() -> tuple[list[bool], StepDecision | None]:
        trainer = Trainer() if dist.get_rank() == 0 else Trainer(end_step=lambda: None)
        trainer.take_steps()
        return trainer.ways, trainer.decision

    ways, decision = same_on_all_ranks(run(body))
    assert len(set(ways)) == 1 and decision is None


@pytest.mark.parametrize("link", ["slow", "fast"], ids=["slow link", "fast link"])
def test_a_table_comes_before_steps(link: str, tmp_path: Path) -> None:
    file = table(tmp_path, SLOW_LINK if link == "slow" else FAST_LINK)

    def body() -> tuple[set[bool], set[str], StepDecision | None]:
        trainer = Trainer(table=file)
        trainer.take_steps()
        return set(trainer.ways), {one.by for one in zcomm.stats(trainer.group).decisions}, trainer.decision

    assert same_on_all_ranks(run(body)) == ({link == "slow"}, {"table"}, None)


def two_optimizers() -> Callable[[], None]:
    first, second = optimizer(), optimizer()
    return lambda: (first.step(), second.step())  # type: ignore[func-returns-value,return-value]


def marked_by_hand() -> Callable[[], None]:
    return lambda: zcomm.codec.set_step(0)


@pytest.mark.parametrize("ends", [two_optimizers, marked_by_hand])
def test_steps_are_found(ends: Callable[[], Callable[[], None]]) -> None:
    def body() -> list[bool]:
        trainer = Trainer(end_step=ends())
        trainer.take_steps()
        assert trainer.decision is not None and trainer.decision.compressed
        return trainer.ways

    runs = [len(list(steps)) for _, steps in groupby(same_on_all_ranks(run(body)))]
    assert 2 * BLOCK in runs and set(runs[2:-2]) == {2 * BLOCK}


SETTINGS = {
    "secondary shards": {"keep_in_node": True},
    "lossless": {"weights": "lossless", "gradients": "exact"},
    "mixed": {},  # gradients are narrower than what is reduced
}


@pytest.mark.parametrize(("settings", "nodes"), [("secondary shards", NODES), ("lossless", [0, 1]), ("mixed", [0, 1])])
def test_fsdp2_trains_through_a_trial(settings: str, nodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With lossless weights and exact gradients a training has the bits of an exact one, though the way changes."""
    monkeypatch.setattr(zcomm.distributed.backend, "perf_counter_ns", count(step=1000).__next__)
    half = settings == "lossless"
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if settings == "mixed" else MixedPrecisionPolicy()

    def train(group_is_exact: bool) -> list[torch.Tensor]:
        model = sharded(lambda model: model.to(torch.bfloat16) if half else None, mp_policy=precision)
        if not group_is_exact:
            zcomm.fsdp.compress(model, **SETTINGS[settings])
        steps = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(MANY_STEPS):
            inputs = batch().to(torch.bfloat16) if half else batch()
            model(inputs).float().square().mean().backward()
            steps.step()
            steps.zero_grad()
        return [whole(parameter) for parameter in model.parameters()]

    def body() -> tuple[bool, list[torch.Tensor]]:
        trained = train(False)
        stats = zcomm.stats()
        assert stats.by_steps is not None and {one.by for one in stats.decisions} == {"steps"}
        assert stats.all_gather.calls + stats.reduce_scatter.calls > 0
        assert stats.all_gather.exact["format_exact"].calls > 0
        if half:
            with zcomm.exact():
                exactly = train(True)
            for one, other in zip(trained, exactly, strict=True):
                assert_same_bits(one, other, "trained")
        return stats.by_steps.compressed, trained

    found = run(body, len(nodes), options=options(compress="auto"), nodes=nodes)
    assert len({compressed for compressed, _ in found}) == 1
    for _, trained in found[1:]:
        for one, other in zip(trained, found[0][1], strict=True):
            assert_same_bits(one, other, "trained")


def one_weight() -> torch.optim.Optimizer:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def test_steps_are_those_of_one_optimizer_and_of_the_next_once_it_is_gone() -> None:
    def body() -> None:
        (group,) = groups.living
        one_weight().step()  # and it is gone
        gc.collect()
        first, other = one_weight(), one_weight()
        for _ in range(2):
            first.step()
            other.step()
        assert group._steps == 3

    run(body, options=options())
