"""Never silent, and errors are errors: what goes wrong on one rank is heard, by name, on all of them, in time."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, OPT_INS, gather, gather_in_place, mine, scatter
from support.worlds import Outcome, collect, options, run

import zcomm
import zcomm.distributed.backend
from zcomm.distributed.groups import backend_of

IN_TIME = 15.0  # for ranks to end after the first; of GROUP_SECONDS, 20, so none ends by a timeout
SOON = 2.0  # a group's timeout where a test waits for it


def fails(action: Callable[[], Any]) -> str:
    """The message of the error that ``action()`` raises."""
    try:
        action()
    except (RuntimeError, ValueError) as error:  # DistBackendError is a RuntimeError
        return str(error)
    raise AssertionError("nothing was raised")


DISAGREEMENTS: dict[str, tuple[Any, Any]] = {
    "all_gather": ("int8:256", "int4:64"),
    "min_bytes": (1, 2),
    "strict": (True, False),
    "node_size": (1, 2),
    "chunk_bytes": (4096, 8192),
}


@pytest.mark.promise(8)
@pytest.mark.parametrize("field", DISAGREEMENTS)
def test_ranks_that_disagree_on_options_are_told_the_difference(field: str) -> None:
    """Every rank raises at its first collective, whatever it is; other groups are not affected."""

    def body() -> None:
        given = DISAGREEMENTS[field][dist.get_rank()]
        group = dist.new_group([0, 1], pg_options=zcomm.Options(**{field: given}))
        message = fails(lambda: dist.all_reduce(torch.ones(2), group=group))
        assert "options" in message
        for value in DISAGREEMENTS[field]:
            assert f"{field}={value!r}" in message
        assert len(message) < 200, "the others are left out"
        assert f"rank {1 - dist.get_rank()}" in message
        gather(mine())

    run(body)


@pytest.mark.promise(8)
def test_ranks_that_disagree_on_the_version_are_told() -> None:
    def body() -> None:
        zcomm.distributed.backend.__version__ = ("1.0", "2.0")[dist.get_rank()]
        group = dist.new_group([0, 1])
        message = fails(lambda: gather(mine(), group=group))
        assert "version" in message and "1.0" in message and "2.0" in message
        gather(mine())  # the world goes on; and no rank leaves while the other still connects

    run(body)


def strange(call: str) -> Any:
    """Different calls by name."""
    return {
        "all_gather": lambda: gather(mine()),
        "a longer one": lambda: gather(mine(2 * NUM)),
        "bfloat16": lambda: gather(mine(dtype=torch.bfloat16)),
        "int4": lambda: gather_as("int4:32"),
        "reduce_scatter": lambda: scatter(mine(2 * NUM)),
        "AVG": lambda: scatter(mine(2 * NUM), dist.ReduceOp.AVG),
        "all_reduce": lambda: dist.all_reduce(mine(2 * NUM)),
    }[call]()


def gather_as(format: str) -> None:
    with zcomm.override(all_gather=format):
        gather(mine())


@pytest.mark.promise(8)
@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ("all_gather", "a longer one", (f"{NUM}]", f"{2 * NUM}]")),
        ("all_gather", "bfloat16", ("float32", "bfloat16")),
        ("all_gather", "int4", ("int8:256", "int4:32")),
        ("all_gather", "reduce_scatter", ("all_gather", "reduce_scatter")),
        ("reduce_scatter", "all_reduce", ("reduce_scatter", "all_reduce")),
        ("reduce_scatter", "AVG", ("times 1", "times 0.5")),
    ],
)
def test_ranks_that_call_different_things_are_told_both(first: str, second: str, named: tuple[str, ...]) -> None:
    """Every rank that exchanges bytes with one that calls something else raises, and quotes both calls."""

    def body() -> str:
        gather(mine(64))
        return fails(lambda: strange(second if dist.get_rank() == 1 else first))

    for message in run(body, 2, options=options(all_reduce="int8:128/int4:128", min_bytes=1)):
        assert "called different things" in message
        for text in named:
            assert text in message


@pytest.mark.parametrize("collective", ["broadcast", "gather", "scatter"])
def test_ranks_that_name_different_roots_are_told_both(collective: str) -> None:
    """Those that need nothing from the others learn it in their next call."""

    def calls() -> None:
        rank = dist.get_rank()
        root = 1 if rank == 2 else 0
        every = [torch.ones(NUM) for _ in range(3)] if rank == root else None
        if collective == "broadcast":
            dist.broadcast(torch.ones(NUM), root)
        elif collective == "gather":
            dist.gather(torch.ones(NUM), every, root)
        else:
            dist.scatter(torch.empty(NUM), every, root)
        gather(mine())

    way = "to" if collective == "gather" else "from"
    for message in run(lambda: fails(calls), 3, options=options(exchanges="int8:128")):
        assert "called different things" in message
        assert all(f'"{collective} {way} {root} ' in message for root in (0, 1)), message


def test_a_rank_that_comes_late_calls_nothing_else() -> None:
    """A wait that is long enough to be looked into, again and again, ends well."""

    def body() -> None:
        for late in (0, 1):
            if dist.get_rank() == late:
                time.sleep(1.8)
            gather(mine())
            scatter(mine(2 * NUM))

    run(body)


def ended(outcomes: list[Outcome], but: int) -> list[str]:
    """The errors of all ranks other than ``but``, none of which hung; what an error says tells a timeout."""
    errors = []
    for rank, outcome in enumerate(outcomes):
        if rank != but:
            assert not outcome.stuck and outcome.error, f"rank {rank}: {outcome}"
            errors.append(outcome.error)
    return errors


@pytest.mark.promise(9)
@pytest.mark.parametrize("tcp", [False, True], ids=["file store", "store on rank 0"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hierarchical", [False, True], ids=["flat", "hierarchical"])
def test_a_killed_peer_is_noticed(tcp: bool, victim: int, hierarchical: bool) -> None:
    """SIGKILL in the middle of a call: every other rank raises at once, also those that do not talk to the victim."""

    def body() -> None:
        gather(mine())
        if dist.get_rank() == victim:
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        while True:
            scatter(torch.ones(dist.get_world_size() * NUM * 8))

    fields = options(node_size=2 if hierarchical else None)
    outcomes = collect(body, 4, options=fields, tcp=tcp, grace=IN_TIME)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    for error in ended(outcomes, but=victim):
        assert error.count("lost rank") == 1 and error.count("gave up") <= 1, error


@pytest.mark.promise(9)
@pytest.mark.parametrize("first", [False, True], ids=["later", "at the first call"])
def test_a_peer_that_never_calls_times_out(first: bool) -> None:
    """Every rank that waits raises after the timeout, and says for whom it waited."""

    def body() -> str:
        if not first:
            gather(mine())
        if dist.get_rank() == 1:
            time.sleep(2 * SOON)
            return "rank 1"
        return fails(lambda: gather(mine()))

    for message in run(body, 3, group_seconds=SOON):
        assert "rank 1" in message or "ranks [1]" in message


@pytest.mark.promise(8)
@pytest.mark.parametrize("first", [False, True], ids=["later", "the first compressed call"])
def test_a_call_that_went_another_way_times_out_with_advice(first: bool) -> None:
    """One rank calls under exact(), the other not: the message points there."""

    def body() -> str:
        if not first:
            gather(mine())
        if dist.get_rank() == 1:
            with zcomm.exact():
                return fails(lambda: gather(mine()))
        return fails(lambda: gather(mine()))

    message = run(body, group_seconds=SOON)[0]
    assert "rank 0" in message and "zcomm.exact()" in message


@pytest.mark.promise(9)
def test_a_rank_that_raises_takes_the_others_along() -> None:
    """The rank's connections close as it ends: the others raise at once and name it."""

    def body() -> None:
        gather(mine())
        if dist.get_rank() == 1:
            raise LookupError("on purpose")
        gather(mine())

    outcomes = collect(body, 3, grace=IN_TIME)
    assert outcomes[1].error == "LookupError: on purpose"
    for error in ended(outcomes, but=1):
        assert error.count("lost rank 1") == 1 and error.count("gave up") <= 1, error


@pytest.mark.promise(9)
@pytest.mark.parametrize("how", ["group.abort", "_abort_process_group"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "at the first call"])
def test_abort_from_another_thread(how: str, first: bool) -> None:
    """The call that waits raises, here and on the peers, and all later ones do; well before any timeout."""

    def body() -> None:
        if not first:
            gather(mine())
        group, rank, whole = dist.group.WORLD, dist.get_rank(), torch.ones(2 * NUM)
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            call = lambda: gather_in_place(whole, group)  # noqa: E731
            abort = group.abort if how == "group.abort" else dist.distributed_c10d._abort_process_group
            threading.Timer(1.0, lambda: (abort(), store.set("aborted", ""))).start()
            message = fails(call)
            assert "abort" in message or "shut down" in message, message
            time.sleep(1)  # an exit would explain the end of the other rank, too
            fails(call)
        elif not first:
            store.wait(["aborted"])
            message = fails(lambda: gather(mine()))
            assert "rank 0" in message and "abort" in message, message

    for outcome in collect(body, grace=IN_TIME):
        assert not outcome.stuck and outcome.error is None, outcome


def test_after_a_failure_the_group_says_so_and_a_new_one_works() -> None:
    """Pending calls all fail, later ones at once; the process can go on with a new group."""

    def body() -> None:
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        flights = []
        for size in (NUM, 2 * NUM if rank else NUM, NUM):
            whole = torch.ones(2 * size)
            flights.append(gather_in_place(whole, group, async_op=True))
        flights[0].wait()
        assert "called different things" in fails(flights[1].wait)
        assert "failed before" in fails(flights[2].wait)
        assert flights[2].is_completed() and not flights[2].is_success()
        assert "different things" in fails(flights[1].get_future().wait)
        whole = torch.ones(2 * NUM)
        assert "different things" in fails(lambda: gather_in_place(whole, group))
        dist.destroy_process_group(group)
        dist.barrier()
        again = dist.new_group([0, 1])
        gather_in_place(whole, again)
        assert zcomm.stats(again).all_gather.calls == 1
        dist.destroy_process_group()

    run(body)


def test_each_direction_has_a_connection_and_an_abort_closes_both() -> None:
    def body() -> None:
        def sockets() -> int:
            return sum(os.readlink(file.path).startswith("socket:") for file in os.scandir("/proc/self/fd"))

        dist.barrier()
        exact = sockets()
        gather(mine())
        listening = 1
        assert sockets() - exact == 2 * 2 + listening
        dist.barrier()
        # One after the other, so that some peers have gone when a rank closes what it has to the others.
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        store.wait([f"{peer} aborted" for peer in range(rank)])
        backend: Any = backend_of()
        backend.abort()
        assert sockets() == exact + listening
        store.set(f"{rank} aborted", "")
        store.wait([f"{peer} aborted" for peer in range(3)])  # the exact connections close with the process

    run(body, 3)


@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_a_group_that_has_ended_makes_no_calls(end: str) -> None:
    def body() -> None:
        gather(mine())
        before = zcomm.stats().all_gather.calls
        getattr(backend_of(), end)()
        calls = [
            lambda: gather(mine()),
            lambda: gather(mine(4)),
            dist.barrier,
            lambda: dist.reduce(mine(), 0),
            lambda: dist.send(mine(), 1 - dist.get_rank()),
            lambda: dist.recv(mine(4), 1 - dist.get_rank()),
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match="the process group was shut down"):
                call()
        assert zcomm.stats().all_gather.calls == before

    run(body, options=options(exchanges="int8:128"))


@pytest.mark.promise(9)
def test_wrong_arguments_leave_other_groups_alone() -> None:
    """strict and shape errors on one rank are local: nobody is lost."""

    def body() -> None:
        if dist.get_rank() == 0:
            fails(lambda: dist.all_gather_single(torch.empty(5), torch.empty(2)))
        gather(mine())

    run(body, options=options(**OPT_INS))


def test_a_group_ends_although_gloo_is_in_a_callback() -> None:
    """The last reference to a group is dropped with Python's lock held, while Gloo's thread, which it joins, runs a
    callback in Python."""

    def body() -> None:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.wait(["callback is set"])
            dist.all_reduce(torch.ones(8))
            dist.destroy_process_group()
            return
        backend: Any = backend_of()
        entered = threading.Event()

        def stay(_: Any) -> None:
            entered.set()
            time.sleep(2)  # until the destructor waits for this thread

        work = dist.all_reduce(torch.ones(8), async_op=True)
        assert work is not None
        work.get_future().then(stay)
        store.set("callback is set", "")
        assert entered.wait(IN_TIME)
        del work
        dist.destroy_process_group()
        alone = object()
        assert sys.getrefcount(backend) == sys.getrefcount(alone)
        del backend

    for outcome in collect(body, grace=IN_TIME):
        assert not outcome.stuck and outcome.error is None, outcome
