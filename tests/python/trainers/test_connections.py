"""The number of TCP connections between far sites: what decides it, its sockets, and that it changes no bit."""

from __future__ import annotations

import os
import resource
import signal
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support import outer as sites
from support.calls import gather, logged, mine
from support.expected import assert_same_bits
from support.training import make_model
from support.worlds import collect, run

from zcomm.distributed import backend
from zcomm.distributed.groups import backend_of
from zcomm.outer.connections import Connections

STEPS = 18  # outer steps: more than all trials take
FAR, NEAR = 0.05, 0.0001
FAST = {1: 1.0, 4: 0.5, 16: 0.25}  # seconds of a reduction by the number of connections


class _Timed(Connections):
    """Times a reduction by a table instead of a clock: seconds by the number of connections."""

    seconds: ClassVar[dict[int, float]] = {}
    round_trip = FAR
    total = 0.0
    measured: ClassVar[list[int]] = []
    begun_together: ClassVar[int] = 0

    def _waited(self, backend: Any) -> tuple[float, int]:
        super()._waited(backend)
        _Timed.total += self.seconds[backend.connections]
        self.measured.append(backend.connections)
        return _Timed.total, len(self.measured)

    def _begin_together(self) -> None:
        _Timed.begun_together += 1
        super()._begin_together()

    def _round_trip(self) -> float:
        return self._slowest(self.round_trip)


def _sockets() -> int:
    """Return the connections of this process."""
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(name) and os.readlink(name).startswith("socket:") for name in names)


def _train(seconds: dict[int, float], round_trip: float = FAR) -> tuple[int, int, torch.Tensor]:
    """Return the number of connections after a training, the sockets opened since its second step, and the values."""
    _Timed.seconds, _Timed.round_trip = seconds, round_trip
    model = make_model()
    outer = sites.outer_step(model, every=2, fragments=1, delay=1)
    outer._connections = _Timed(None)
    sites.train(model, outer, dist.get_rank(), 1, 3)
    before = _sockets()
    sites.train(model, outer, dist.get_rank(), 4, 2 * STEPS)
    outer.synchronize()
    return outer.stats().connections, _sockets() - before, sites.flat(model)


@pytest.mark.parametrize(
    ("seconds", "number", "tried"),
    [
        ([{1: 1.0, 4: 0.9, 16: 0.1}] * 2, 1, [1, 4]),
        ([{1: 1.0, 4: 0.5, 16: 0.45}] * 2, 4, [1, 4, 16]),
        ([FAST] * 2, 16, [1, 4, 16]),
        ([{1: 1.0, 4: 0.1, 16: 0.01}, {1: 1.0, 4: 0.9, 16: 0.9}], 1, [1, 4]),  # the slowest rank decides
    ],
    ids=["one fills the link", "four do", "sixteen do", "ranks differ"],
)
def test_more_connections_stay_where_they_are_faster(
    seconds: list[dict[int, float]], number: int, tried: list[int]
) -> None:
    def body() -> torch.Tensor:
        chosen, opened, values = _train(seconds[dist.get_rank()])
        assert chosen == backend_of().connections == number
        assert opened == 2 * (number - 1)  # one of each direction
        assert list(dict.fromkeys(_Timed.measured)) == tried
        assert _Timed.begun_together == 5 * len(tried)  # each reduction of the trial
        return values

    def with_one() -> torch.Tensor:
        chosen, opened, values = _train({}, NEAR)
        assert (chosen, opened, _Timed.measured) == (1, 0, [])
        return values

    values = run(body, 2, nodes=[0, 1])
    assert_same_bits(values[0], values[1], "parameters of two sites")
    assert_same_bits(values[0], run(with_one, 2, nodes=[0, 1])[0], "parameters")


def test_more_files_than_a_process_may_open_are_not_tried() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 64 + 12, most))
        lines = logged()
        assert _train(FAST)[:2] == (1, 0)
        told = [line for line in lines if line.startswith("4 TCP connections between sites are not tried")]
        assert len(told) == dist.get_rank()

    run(body, 2, nodes=[0, 1])


def test_a_change_that_fails_on_one_rank_is_an_error_on_all() -> None:
    def body() -> None:
        make = backend._make_gloo

        def failing(store: Any, rank: int, size: int, options: Any, devices: Any = None) -> Any:
            made = make(store, rank, size, options, devices)
            if devices is not None and len(devices) > 2 and rank == 1:
                raise RuntimeError("no such luck")
            return made

        backend._make_gloo = failing
        with pytest.raises(RuntimeError, match="no such luck" if dist.get_rank() == 1 else "rank"):
            _train(FAST)
        with pytest.raises(RuntimeError, match="no such luck"):
            gather(mine())

    run(body, 2, nodes=[0, 1])


def test_another_outer_step_of_the_group_takes_what_was_chosen() -> None:
    def body() -> None:
        assert _train(FAST)[0] == 16
        assert _train(FAST)[:2] == (16, 0)

    run(body, 2, nodes=[0, 1])


@pytest.mark.parametrize("has_chosen", [True, False], ids=["over many connections", "while they are tried"])
def test_a_site_that_vanishes_is_an_error_for_the_others(has_chosen: bool) -> None:
    def body() -> None:
        if has_chosen:
            _train(FAST)
        _Timed.seconds = FAST
        outer = sites.outer_step(model := make_model(), every=2)
        outer._connections = _Timed(None)
        sites.train(model, outer, dist.get_rank(), 1, 3)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank"):
            sites.train(model, outer, dist.get_rank(), 4, 20)

    outcomes = collect(body, 3, nodes=[0, 1, 2], group_seconds=4.0, grace=40.0)
    assert [(outcome.finished, outcome.error) for outcome in outcomes[:2]] == [(True, None)] * 2, outcomes
