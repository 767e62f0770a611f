"""Groups of some ranks: in which order they may be made, what is left of them, and ranks that leave meanwhile."""

from __future__ import annotations

import datetime
import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, gather_in_place, gathered, start_gather
from support.expected import assert_same_bits
from support.worlds import collect, run

import zcomm
from zcomm.distributed import backend

SOON = datetime.timedelta(seconds=5)
CPU = torch.device("cpu")


def assert_works(group: Any, ranks: list[int]) -> None:
    """An exact call and a compressed one have the values of ``ranks``."""
    total = torch.tensor(2.0 ** dist.get_rank())
    dist.all_reduce(total, group=group)
    assert total == sum(2.0**rank for rank in ranks)
    whole, work = start_gather(0, group=group)
    work.wait()
    assert_same_bits(whole, gathered(0, size=len(ranks)) if len(ranks) > 1 else data(0, NUM))


# The lists of each rank, in the order in which it makes them. Ranks that share several make these in one order.
ORDERS: dict[str, list[list[list[int]]]] = {
    "a rank's own group comes first": [[[0], [0, 1]], [[0, 1], [0]], [[0, 1], [0]]],
    "each rank makes its own groups only": [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]],
    "some ranks make more groups": [[[0], [0], [0, 1]], [[0, 1], [1, 2]], [[2], [1, 2]]],
    "groups of the same ranks": [[[0, 1], [0, 1]], [[0, 1], [0, 1]], [[2]]],
}


@pytest.mark.promise(5)
def test_ranks_meet_although_they_make_other_groups() -> None:
    """torch numbers groups by how many a rank has made, so that these ranks meet nobody under Gloo, or strangers."""

    def body() -> None:
        for local in (False, True):
            for order in ORDERS.values():
                made = []
                for ranks in dict(enumerate(order)).get(dist.get_rank(), []):
                    group = dist.new_group(ranks, use_local_synchronization=local)
                    made += [(group, ranks)] if dist.get_rank() in ranks else []
                for group, ranks in made:
                    assert_works(group, ranks)

    run(body, 4)


def test_a_rank_that_makes_other_groups_is_named() -> None:
    def body() -> None:
        ranks = [0, 1] if dist.get_rank() == 0 else [1]
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come to the start of group '1' .*same order"):
                dist.new_group(ranks, timeout=SOON)
        else:
            assert_works(dist.new_group(ranks, timeout=SOON), ranks)

    run(body)


def test_nothing_of_groups_is_left() -> None:
    """Groups with options and timeouts of their own, one after the other, destroyed or aborted."""

    def left() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(backend.groups.living)

    def body() -> None:
        after_two = (0, 0)
        for number in range(10):
            format, timeout = ("int8:64", "int4:64")[number % 2], datetime.timedelta(seconds=20 + number)
            options = zcomm.Options(all_gather=format, min_bytes=1)
            group = dist.new_group([0, 1], timeout=timeout, pg_options=options)
            gather_in_place(torch.ones(2 * NUM), group)
            dist.all_reduce(torch.ones(9), group=group)
            made = group._get_backend(CPU)
            assert (made.options.all_gather, made.options._timeout) == (format, timeout)
            assert zcomm.stats(group).all_gather.calls == 1
            dist.barrier()
            if number % 2:
                group.abort()
            dist.destroy_process_group(group)
            del group, made
            if number == 1:
                after_two = left()
            dist.barrier()
        for _ in range(100):  # threads that ask the store, each with a connection, may still end
            if left() <= after_two:
                break
            time.sleep(0.05)
        assert left() <= after_two

    run(body)


@pytest.mark.promise(9)
def test_a_rank_that_ends_before_the_first_compressed_call_is_named() -> None:
    def body() -> None:
        group = dist.new_group([0, 1, 2], timeout=SOON)
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.set("made", "")
            os.kill(os.getpid(), signal.SIGKILL)
        store.wait(["made"])
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not come to the first compressed call"):
            gather_in_place(torch.ones(3 * NUM), group)

    outcomes = collect(body, 3, env={"TORCH_GLOO_LAZY_INIT": "1"}, grace=20)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.finished for outcome in outcomes] == [True, False, True]


@pytest.mark.promise(9)
@pytest.mark.parametrize("connections", ["exact", "compressed"])
def test_a_rank_that_ends_while_others_connect(connections: str) -> None:
    """Gloo alone would name neither the group nor what to look for."""

    def body() -> None:
        backend._LEAST_TO_CONNECT = datetime.timedelta(seconds=0.5)
        make, made = backend._make_gloo, []

        def leave(*given: Any, **fields: Any) -> Any:
            made.append(given)
            if dist.get_rank() == 2 and len(made) == (1 if connections == "exact" else 2):
                os._exit(7)
            return make(*given, **fields)

        backend._make_gloo = leave
        with pytest.raises(RuntimeError, match="could not connect to all 3 ranks of group '1': one of them has ended"):
            gather_in_place(torch.ones(3 * NUM), dist.new_group([0, 1, 2], timeout=SOON))

    outcomes = collect(body, 3, grace=20)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 7]


def test_gloo_connects_within_the_timeout() -> None:
    """It waits five times what it is given."""

    def body() -> None:
        given = []

        class Watched(dist.ProcessGroupGloo):
            def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
                given.append(options._timeout)
                super().__init__(store, rank, size, options)

        watched: Any = dist
        watched.ProcessGroupGloo = Watched
        for seconds, wanted in ((1800, 360), (12, 5), (3, 3)):
            dist.new_group([0, 1], timeout=datetime.timedelta(seconds=seconds))
            assert given.pop() == datetime.timedelta(seconds=wanted)

    run(body)


def test_exact_calls_have_the_whole_timeout() -> None:
    """Also a barrier, which has Gloo's own timeout."""

    def body() -> None:
        backend._LEAST_TO_CONNECT = datetime.timedelta(seconds=0.5)
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=5))
        for call in (lambda: dist.barrier(group), lambda: dist.all_reduce(torch.ones(9), group=group)):
            if dist.get_rank() == 1:
                time.sleep(1.3)
            call()

    run(body)
