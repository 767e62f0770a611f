"""The TCP connections of outer steps: how many there are, that they change no bit, and who may change them."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from support import outer as sites
from support.calls import gather, mine
from support.expected import assert_same_bits
from support.training import make_model
from support.worlds import collect, run


def _sockets() -> int:
    """Return the connections of this process."""
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(name) and os.readlink(name).startswith("socket:") for name in names)


def _train(connections: int) -> tuple[int, torch.Tensor]:
    """Return the sockets that the first outer step has opened, and the values after a training."""
    model = make_model()
    outer = sites.outer_step(model, every=2, delay=1, connections=connections)
    sites.train(model, outer, dist.get_rank(), 1, 1)  # compares the sites, over connections of their own
    before = _sockets()
    sites.train(model, outer, dist.get_rank(), 2, 12)
    opened = _sockets() - before
    outer.synchronize()
    return opened, sites.flat(model)


def test_connections_are_opened_each_way_and_change_no_bit() -> None:
    (opened, one), _ = run(lambda: _train(1), 2, nodes=[0, 1])
    many = run(lambda: _train(4), 2, nodes=[0, 1])
    assert [more - opened for more, _ in many] == [2 * 3] * 2
    for _, values in many:
        assert_same_bits(values, one, "parameters")


def test_a_group_keeps_the_connections_of_its_first_call() -> None:
    def body() -> None:
        gather(mine())
        for connections in (1, None):
            sites.outer_step(make_model(), connections=connections)
        with pytest.raises(ValueError, match=r"^connections: expected 1, which the group has .*, got 8"):
            sites.outer_step(make_model(), connections=8)

    run(body, 2, nodes=[0, 1])


def test_sites_that_differ_are_told_so_before_they_connect() -> None:
    def body() -> None:
        outer = sites.outer_step(model := make_model(), connections=1 + dist.get_rank())
        with pytest.raises(ValueError, match="expected all sites to have the same arguments, got others at site 1"):
            sites.train(model, outer, dist.get_rank(), 1, 1)

    run(body, 2, nodes=[0, 1])


def test_a_site_that_vanishes_is_an_error_for_the_others() -> None:
    def body() -> None:
        outer = sites.outer_step(model := make_model(), every=2, connections=4)
        sites.train(model, outer, dist.get_rank(), 1, 3)
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match="rank"):
            sites.train(model, outer, dist.get_rank(), 4, 20)

    outcomes = collect(body, 3, nodes=[0, 1, 2], group_seconds=4.0, grace=40.0)
    assert [(outcome.finished, outcome.error) for outcome in outcomes[:2]] == [(True, None)] * 2, outcomes
