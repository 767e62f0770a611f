"""Sites that come and go: those that are present have equal bits, and nothing of an absent one is counted."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import outer
from support import sites as runs
from support.calls import expect
from support.members import Board
from support.training import make_model
from support.worlds import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zcomm


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_sites_that_are_lost_and_new_ones(board: Board) -> None:
    """One of three is killed. Another one comes, with other parameters, and ends with the bits of those that stayed."""
    with runs.Sites(board, pause=0.02, least=3) as sites:
        for name in "abc":
            sites.start(name)
        sites.wait("a", lambda event: event["sites"] == 3 and event["inner_steps"] > 20)
        sites.kill("b")
        sites.wait("a", lambda event: event["sites"] == 2 and event["inner_steps"] > 20)
        sites.start("d", functools.partial(runs.make, seed=5))
        sites.wait("d", lambda event: event["sites"] == 3)
        logs = sites.finish("a", "c", "d")
    assert logs["d"][0]["inner_steps"] > 20  # the others' number
    assert {event["sites"] for event in logs["a"]} == {3, 2}
    assert {events[-1]["sites"] for events in logs.values()} == {3}
    assert runs.assert_equal_values({**logs, "b": sites.events("b")}) > 60
    last = [events[-1] for events in logs.values()]
    assert last[0]["model"] is not None and len({event["model"] for event in last}) == 1
    assert 6 * last[0]["sent"] < last[0]["exact"]


def test_a_site_that_was_taken_for_lost_returns(board: Board) -> None:
    """A site stops for longer than the meeting point's patience. Afterwards it has the others' bits."""
    with runs.Sites(board, pause=0.02, timeout=3.0, least=3) as sites:
        for name in "abc":
            sites.start(name)
        sites.wait("a", lambda event: event["inner_steps"] > 20)
        os.kill(sites.processes["b"].pid, signal.SIGSTOP)
        told = sites.wait("a", lambda event: event["sites"] == 2)
        os.kill(sites.processes["b"].pid, signal.SIGCONT)
        sites.wait("b", lambda event: event["sites"] == 3 and event["membership"] > told["membership"])
        logs = sites.finish("a", "b", "c")
    assert {events[-1]["sites"] for events in logs.values()} == {3}
    assert runs.assert_equal_values(logs) > 60
    assert len({events[-1]["model"] for events in logs.values()}) == 1


def test_names_order_ranks(board: Board) -> None:
    """Sites do not come in the order of their names. One is killed. When it returns, it has its old rank."""
    with runs.Sites(board, pause=0.02) as sites:
        for size, name in enumerate("cab", 1):
            sites.start(name)
            told = sites.wait("c", lambda event, size=size: event["sites"] == size)
        sites.kill("a")
        told = sites.wait("c", lambda event: event["sites"] == 2 and event["membership"] > told["membership"])
        sites.start("a")
        for rank, name in enumerate("abc"):
            event = sites.wait(name, lambda event: event["sites"] == 3 and event["membership"] > told["membership"])
            assert event["rank"] == rank
        logs = {name: sites.events(name) for name in "abc"}
    assert {(event["sites"], event["rank"]) for event in logs["c"]} == {(1, 0), (2, 1), (3, 2)}
    assert runs.assert_equal_values(logs) > 0


def test_the_meeting_point_may_be_lost(board: Board) -> None:
    with runs.Sites(board, pause=0.02, least=2) as sites:
        for name in "ab":
            sites.start(name)
        sites.wait("a", lambda event: event["inner_steps"] > 10)
        (board.folder / "port").unlink()
        sites.meet()
        reached = sites.events("a")[-1]["inner_steps"]
        sites.wait("a", lambda event: event["inner_steps"] > reached + 20)
        sites.start("c")
        told = sites.wait("c", lambda event: event["sites"] == 3)
        sites.kill("b")
        sites.wait("a", lambda event: event["sites"] == 2 and event["membership"] > told["membership"])
        logs = sites.finish("a", "c")
    assert logs["a"][-1]["sites"] == 2
    assert runs.assert_equal_values({**logs, "b": sites.events("b")}) > 20
    assert len({events[-1]["model"] for events in logs.values()}) == 1


def test_a_site_with_other_arguments_is_refused(board: Board) -> None:
    with runs.Sites(board, pause=0.02) as sites:
        sites.start("a")
        sites.wait("a", lambda event: event["inner_steps"] > 8)
        sites.start("b", functools.partial(runs.make, every=5))
        sites.processes["b"].join(20)
        assert "RuntimeError: sites: this one is refused: the sites that are present train with" in sites.error("b")
        assert "'every': 4" in sites.error("b") and "'every': 5" in sites.error("b")
        sites.start("c", functools.partial(runs.make, connections=2))
        sites.processes["c"].join(20)
        assert "connections=2" in sites.error("c") and "protocol" in sites.error("c")
        assert {event["sites"] for event in sites.finish("a")["a"]} == {1}


def test_a_loaded_state_is_that_of_all(board: Board) -> None:
    """A site loads the state of a training that was further."""

    def save(sites: zcomm.outer.Sites) -> Any:
        model, outer_step = runs.make(sites)
        outer.train(model, outer_step, 7, 1, 30)
        torch.save(outer_step.state_dict(), board.folder / "state")
        return model, outer_step

    def load(sites: zcomm.outer.Sites) -> Any:
        model, outer_step = runs.make(sites)
        outer_step.load_state_dict(torch.load(board.folder / "state"))
        return model, outer_step

    # Its last fragment is under way in the state.
    with runs.Sites(board, steps=30) as sites:
        sites.start("a", save)
        sites.join("a")
    (board.folder / "port").unlink()
    with runs.Sites(board, steps=120, pause=0.02, least=2) as sites:
        sites.start("b")
        sites.start("c", load)
        logs = {name: sites.join(name) for name in "bc"}
    assert logs["c"][0]["inner_steps"] == 30
    after = [event["inner_steps"] for event in logs["b"]]
    assert any(later - sooner > runs.EVERY for sooner, later in itertools.pairwise(after))  # b took it over
    assert len({events[-1]["model"] for events in logs.values()}) == 1


ROUNDS = int(os.environ.get("TESTS_ROUNDS", "3"))


def test_any_schedule_of_leaving_and_returning(board: Board) -> None:
    draw = random.Random(0)
    with runs.Sites(board, pause=0.01) as sites:
        names = map(chr, itertools.count(ord("\u0100")))  # one letter each, as many as there are rounds
        living: list[str] = []
        for _ in range(ROUNDS):
            while len(living) < draw.randint(2, 4):
                living.append(next(names))
                sites.start(living[-1], functools.partial(runs.make, seed=ord(living[-1])))
            size = len(living)
            for name in living:
                sites.wait(name, lambda event, size=size: event["sites"] == size)
            time.sleep(draw.random())
            killed = draw.sample(living, draw.randint(1, len(living) - 1))
            for name in killed:
                sites.kill(name)
                living.remove(name)
        logs = {path.name.removeprefix("log "): sites.events(path.name.removeprefix("log ")) for path in board.logs()}
    assert runs.assert_equal_values(logs) > 10 * ROUNDS


def test_a_mean_that_begins_anew_is_of_those_that_have_trained() -> None:
    """Rank 2 comes while a fragment is under way. It adds nothing to the mean, and makes it no smaller."""

    def body() -> None:
        rank = dist.get_rank()
        two, alone = dist.new_group([0, 1]), dist.new_group([2])
        model = make_model()
        step = outer.outer_step(model, every=8, delay=3, format="exact", group=two if rank < 2 else alone)
        if rank < 2:
            outer.train(model, step, rank, 1, 9)
        start, gone = step._fragments[0].values.clone(), step._fragments[0].values - outer.flat(model)
        step.regroup(dist.group.WORLD)
        outer.train(model, step, rank, 10, 12)
        sums = gone.clone()
        dist.all_reduce(sums)  # of rank 2: zeros
        wanted = start - outer.LR * (1 + outer.MOMENTUM) * sums / 2
        torch.testing.assert_close(step._fragments[0].values, wanted)

    run(body, 3)


def test_sites_that_have_taken_values_over_count_once_they_have_trained() -> None:
    """Ranks 2 and 3 come one after the other, while a fragment is under way."""

    def body() -> None:
        rank = dist.get_rank()
        two, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        alone = dist.new_group([rank], use_local_synchronization=True)
        model = make_model()
        step = outer.outer_step(model, every=8, delay=7, format="exact", group=two if rank < 2 else alone)
        if rank < 2:
            outer.train(model, step, rank, 1, 9)
        start, gone = step._fragments[0].values.clone(), step._fragments[0].values - outer.flat(model)
        if rank < 3:
            step.regroup(three)
        step.regroup(dist.group.WORLD)
        while not step._fragments[0].stepped_at:
            outer.train(model, step, rank, 10, 10)
        dist.all_reduce(gone)  # of ranks 2 and 3: zeros
        torch.testing.assert_close(step._fragments[0].values, start - outer.LR * (1 + outer.MOMENTUM) * gone / 2)

    run(body, 4)


def test_a_fragment_that_begins_anew_is_not_begun_twice() -> None:
    """It is due again before the mean that began late has come."""

    def body() -> None:
        model = make_model()
        step = outer.outer_step(model, every=12, delay=11)
        outer.train(model, step, dist.get_rank(), 1, 20)
        step.regroup()
        outer.train(model, step, dist.get_rank(), 21, 60)
        assert step._fragments[0].stepped_at == 59  # began at 20, 36 and 48
        outer.assert_replicas_agree(step._fragments[0].values)

    run(body, 2)


def test_what_is_under_way_waits_for_an_attempt_that_succeeds() -> None:
    def body() -> None:
        rank, model = dist.get_rank(), make_model()
        step = outer.outer_step(model, every=8, delay=3, format="exact", group=dist.new_group([0, 1]))
        outer.train(model, step, rank, 1, 9)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zcomm.outer.step, "take_over", lost)
            expect(dist.DistBackendError, "a site is lost", step.regroup)
        step.regroup()
        assert step.stats().in_flight == 1

    def lost(*_: Any) -> None:
        raise dist.DistBackendError("a site is lost")

    run(body, 2)


def test_sites_that_have_parted_are_told_and_mended(board: Board) -> None:
    def part(sites: zcomm.outer.Sites) -> Any:
        model, outer_step = runs.make(sites)
        outer_step._fragments[0].values[3] += 1
        return model, outer_step

    with runs.Sites(board, steps=120, pause=0.02, least=2) as sites:
        sites.start("a")
        sites.start("b", part)
        logs = {name: sites.join(name) for name in "ab"}
    assert len({event["membership"] for event in logs["a"]}) == 2  # they have met anew once
    assert len({events[-1]["model"] for events in logs.values()}) == 1


def test_a_change_within_exact_is_compressed(board: Board) -> None:
    """An exact() around step() is not for what it sends: docs/outer.md."""

    def wrap(sites: zcomm.outer.Sites) -> Any:
        model, outer_step = runs.make(sites)
        zcomm.exact().__enter__()
        return model, outer_step

    with runs.Sites(board, pause=0.02) as sites:
        sites.start("a", wrap)
        sites.wait("a", lambda event: event["inner_steps"] > 8)
        sites.start("b")
        sites.wait("b", lambda event: event["sites"] == 2)
        logs = sites.finish("a", "b")
    assert logs["a"][-1]["sites"] == 2
    assert len({events[-1]["model"] for events in logs.values()}) == 1


def test_a_site_that_is_alone_and_was_silent_goes_on(board: Board) -> None:
    with runs.Sites(board, pause=0.02) as sites:
        sites.start("a")
        sites.wait("a", lambda event: event["inner_steps"] > 8)
        os.kill(sites.processes["a"].pid, signal.SIGSTOP)
        time.sleep(sites.patience + 2)
        os.kill(sites.processes["a"].pid, signal.SIGCONT)
        sites.start("b")
        sites.wait("b", lambda event: event["sites"] == 2)
        logs = sites.finish("a", "b")
    assert logs["b"][-1]["sites"] == 2
    assert len({events[-1]["model"] for events in logs.values()}) == 1


def test_arguments_of_the_outer_optimizer_are_those_of_the_furthest() -> None:
    def body() -> None:
        rank = dist.get_rank()
        model = make_model()
        step = outer.outer_step(model, every=4, group=dist.new_group([rank], use_local_synchronization=True))
        outer.train(model, step, rank, 1, 4 + 4 * rank)
        step._optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        step.regroup(dist.group.WORLD)
        assert step._optimizer.param_groups[0]["lr"] == 0.2
        assert step.stats().inner_steps == 8
        outer.assert_replicas_agree(step._fragments[0].values)

    run(body, 2)


def test_after_a_call_that_failed_sites_meet_anew() -> None:
    def body() -> None:
        model = make_model()
        step = outer.outer_step(model, every=2)
        outer.train(model, step, dist.get_rank(), 1, 4)
        if dist.get_rank() == 2:
            return
        with pytest.raises(dist.DistBackendError):
            outer.train(model, step, dist.get_rank(), 5, 6)
        for call in (step.step, step.synchronize, step.state_dict):
            expect(RuntimeError, "outer step: expected regroup() after a call that failed, got another one", call)
        step.regroup(dist.new_group([0, 1], use_local_synchronization=True))
        outer.train(model, step, dist.get_rank(), 7, 12)
        outer.assert_replicas_agree(step._fragments[0].values, step._group)

    run(body, 3, group_seconds=4.0)


def test_sharded_sites_are_refused() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("sites", "shards"))
        model = make_model()
        fully_shard(model, mesh=mesh["shards"])
        step = outer.outer_step(model, every=2, group=mesh.get_group("sites"))
        expect(RuntimeError, "regroup: expected parameters on a CPU, whole in each site, got others", step.regroup)

    run(body, 2)


def test_wrong_arguments() -> None:
    on_meta = torch.optim.SGD([torch.nn.Parameter(torch.empty(3, device="meta"))])
    sites: Any = object.__new__(zcomm.outer.Sites)
    text = "sites: expected parameters on a CPU, got some on meta"
    expect(ValueError, text, lambda: zcomm.outer.OuterStep(on_meta, sites=sites))
    alone = torch.optim.SGD(make_model().parameters())
    both = dist.ProcessGroup(dist.HashStore(), 0, 1)
    for address in ("localhost:0", "localhost:99999", ":1"):
        expect(ValueError, "meeting: expected 'host:port', got", lambda address=address: zcomm.outer.Sites(address))
    expect(ValueError, "timeout: expected more than 0 seconds, got 0", lambda: zcomm.outer.Sites("a:1", timeout=0))
    for name in ("a\n", "a" * 65):
        text = f"name: expected at most 64 printable characters, got {name!r}"
        expect(ValueError, text, lambda name=name: zcomm.outer.Sites("a:1", name=name))
    one: Any = 1
    expect(TypeError, "name: expected str, got 1", lambda: zcomm.outer.Sites("a:1", name=one))
    text = "sites: expected no group beside it, got both"
    expect(ValueError, text, lambda: zcomm.outer.OuterStep(alone, group=both, sites=sites))
    expect(ValueError, "meeting: expected 'host:port', got 'here'", lambda: zcomm.outer.Sites("here"))
    nobody = "meeting: expected a meeting point at localhost:1, got no answer"
    expect(RuntimeError, nobody, lambda: zcomm.outer.Sites("localhost:1", timeout=1.0))
