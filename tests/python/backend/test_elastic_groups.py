"""Groups whose members change: torch's reconfigure(), with members that leave, return, are killed, or are new."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import data, expect, gather, gathered, mine
from support.expected import assert_same_bits
from support.members import FAILED, SOON, Board, Crowd, join, reconfigure
from support.worlds import collect, run
from torch.nn.parallel import DistributedDataParallel

import zcomm
import zcomm.ddp
from zcomm.distributed import elastic
from zcomm.distributed.binding import TORCH
from zcomm.feedback import ErrorFeedback

pytestmark = pytest.mark.skipif(TORCH < (2, 14), reason="requires torch 2.14, whose groups can be reconfigured")

ROUNDS = int(os.environ.get("TESTS_ROUNDS", "12"))


def assert_works(ranks: int) -> None:
    """Exact calls, compressed ones, and messages, among the present members."""
    assert dist.get_world_size() == ranks
    rank = dist.get_rank()
    total = torch.tensor(2.0**rank)
    with zcomm.exact():
        dist.all_reduce(total)
    assert total == 2.0**ranks - 1
    assert_same_bits(gather(mine()), gathered(0, size=ranks) if ranks > 1 else data(0, len(mine())))
    if ranks > 1:
        message = mine() if rank == 0 else torch.empty_like(mine())
        dist.broadcast(message, 0)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, message.numpy().tobytes())
        assert len(set(everyone)) == 1


def come(board: Board, number: int, **fields: Any) -> tuple[int, list[str]]:
    """Makes this process a member. Returns its number, and the handles of as many."""
    me = int(os.environ["RANK"])
    join(board, me, **fields)
    return me, [board.read(f"handle {each}") for each in range(number)]


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path)


def test_members_leave_return_and_change_places(board: Board) -> None:
    def body() -> None:
        me, handles = come(board, 3)
        calls = 0
        for number, present in enumerate([[0, 1, 2], [2, 0], [1, 2, 0], [1], [0, 2]]):
            if me in present:
                reconfigure(number, [handles[each] for each in present])
                assert dist.get_rank() == present.index(me)
                assert_works(len(present))
                calls += len(present) > 1
                assert zcomm.stats().all_gather.calls == calls  # those before count, too
            board.meet(f"round {number}", me, 3)
        reconfigure(99, set(handles))
        assert dist.get_rank() == sorted(handles).index(handles[me])
        assert_works(3)

    run(body, 3, backend=None, launched=True)


def test_a_killed_member_is_named_and_another_one_takes_its_place(board: Board) -> None:
    def body() -> str:
        me, handles = come(board, 4)
        if me < 3:
            reconfigure(0, handles[:3])
            assert_works(3)
        board.meet("first", me, 4)
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        text = ""
        if me != 3:
            with pytest.raises(dist.DistBackendError) as caught:
                dist.all_reduce(mine())
            text = str(caught.value)
        reconfigure(1, [handles[each] for each in (3, 2, 0)])
        assert_works(3)
        return text

    outcomes = collect(body, 4, backend=None, launched=True)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for me in (0, 2):
        assert "rank 1" in outcomes[me].value, outcomes[me]
    assert outcomes[3].error is None, outcomes[3].trace


def test_work_under_way_ends_with_the_members_that_it_is_of(board: Board) -> None:
    def body() -> None:
        me, handles = come(board, 3)
        reconfigure(0, handles)
        if me == 0:  # the others never make these calls
            compressed = dist.all_reduce(mine(), async_op=True)
            with zcomm.exact():
                exact = dist.all_reduce(torch.ones(1), async_op=True)
        board.meet("begun", me, 3)
        if me < 2:
            reconfigure(1, handles[:2])
            assert_works(2)
        if me == 0:
            for work in (compressed, exact):
                expect(RuntimeError, "", work.wait)

    run(body, 3, backend=None, launched=True)


def test_a_plan_of_earlier_members_is_refused(board: Board) -> None:
    def body() -> None:
        _, handles = come(board, 2)
        reconfigure(0, handles)
        backend: Any = zcomm.distributed.groups.backend_of()  # type: ignore[attr-defined]
        values = mine()
        plan = backend.plan(values, op=dist.ReduceOp.SUM)
        plan.run(values, op=dist.ReduceOp.SUM)
        reconfigure(1, handles[::-1])
        expect(RuntimeError, "was shut down, or has other members now", lambda: plan.run(values, op=dist.ReduceOp.SUM))
        assert_works(2)

    run(body, 2, backend=None, launched=True)


def test_what_is_wrong_is_told_and_the_next_attempt_works(board: Board) -> None:
    def body() -> None:
        me, handles = come(board, 2)
        own = handles[me]
        before = "group: expected reconfigure() before its first call"
        expect(RuntimeError, before, lambda: dist.all_reduce(torch.ones(1)))
        expect(ValueError, "group: expected reconfigure() before its first use", zcomm.stats)
        expect(ValueError, "handles: expected this member's", lambda: reconfigure(1, [handles[1 - me]]))
        expect(ValueError, "handles: expected each member once", lambda: reconfigure(2, [own, own]))
        expect(ValueError, "members of zcomm groups, got 'gloo:0'", lambda: reconfigure(3, [own, "gloo:0"]))
        if me == 0:
            missing = "ranks [1] did not come to the start of group"
            expect(RuntimeError, missing, lambda: reconfigure(4, [own, "localhost:1/gone"], SOON))
            answer = "rank 0 of the new members, localhost:1/gone, does not answer"
            expect(RuntimeError, answer, lambda: reconfigure(5, ["localhost:1/gone", own], SOON))
        board.meet("told", me, 2)
        reconfigure(6, handles)
        assert_works(2)
        expect(ValueError, "uuid: expected one that this group has not used, got 6", lambda: reconfigure(6, handles))
        assert_works(2)  # a refused one leaves the members alone
        if me == 0:
            expect(RuntimeError, missing, lambda: reconfigure(7, handles, SOON))
            expect(RuntimeError, "was shut down, or has other members now", lambda: dist.all_reduce(mine()))
        board.meet("failed", me, 2)
        reconfigure(8, handles)
        assert_works(2)

    run(body, 2, backend=None, launched=True)


def test_options_of_members_are_compared(board: Board) -> None:
    def body() -> None:
        _, handles = come(board, 2, all_reduce=("int8:64", "int8:128")[int(os.environ["RANK"])])
        reconfigure(0, handles)
        expect(RuntimeError, "ranks disagree on the options", lambda: dist.all_reduce(mine()))

    run(body, 2, backend=None, launched=True)


def test_an_aborted_group_has_members_again(board: Board) -> None:
    def body() -> None:
        _, handles = come(board, 2)
        reconfigure(0, handles)
        assert_works(2)
        dist.group.WORLD.abort()  # type: ignore[union-attr]
        reconfigure(1, handles)
        assert_works(2)

    run(body, 2, backend=None, launched=True)


def test_ddp_goes_on_with_those_that_are_left(board: Board) -> None:
    """Replicas stay equal to the bit, with error feedback, whose residuals of another rank are forgotten."""

    def body() -> None:
        me, handles = come(board, 3)
        reconfigure(0, handles)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(200, 50))
        feedback = ErrorFeedback()
        model.register_comm_hook(zcomm.ddp.CompressState("int8:64", error_feedback=feedback), zcomm.ddp.compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(seed: int) -> None:
            for step in range(3):
                generator = torch.Generator().manual_seed(100 * seed + 10 * step + me)
                optimizer.zero_grad()
                model(torch.randn(8, 200, generator=generator)).square().mean().backward()
                optimizer.step()
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, model.module.weight.detach().numpy().tobytes())
            assert len(set(everyone)) == 1

        train(0)
        held = feedback.memory_bytes()
        assert held > 0
        for number, present in enumerate([[2, 0], [0, 2]], 1):
            if me in present:
                reconfigure(number, [handles[each] for each in present])
                train(number)
                assert feedback.memory_bytes() <= 1.1 * held  # none of an earlier rank stays

    run(body, 3, backend=None, launched=True)


def test_gpu_tensors_are_refused() -> None:
    from zcomm.distributed import backend

    made: Any = object.__new__(backend._Group)
    made._is_elastic = True
    expect(RuntimeError, "enable_reconfigure: expected CPU tensors, got some on a GPU", made._make_exact_cuda)
    expect(RuntimeError, "enable_reconfigure: expected CPU tensors, got some on a GPU", made._meet_for_nccl)


def test_the_store_is_where_gloo_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert elastic.address_of_interface() is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert elastic.address_of_interface() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    text = "GLOO_SOCKET_IFNAME: expected an interface with an IPv4 address, got 'none0'"
    expect(ValueError, text, elastic.address_of_interface)


def test_an_elastic_group_forwards_all_that_zcomm_makes() -> None:
    folder = Path(__file__).resolve().parents[3] / "python/c10d/group"
    plain, forwarded = (
        set(re.findall(r"\b(\w+)\([^;{}]*\)(?:\s*const)?\s+override\b", (folder / name).read_text()))
        for name in ("process_group.hpp", "elastic_group.hpp")
    )
    of_gpus = {"getMemAllocator", "suspend", "resume", "getMemoryStats", "eagerConnectSingleDevice"}
    assert plain - forwarded == of_gpus | {"supportsCoalescing"}  # torch's default, no, as without GPUs
    assert forwarded - plain == {"supportsReconfigure", "get_reconfigure_handle", "reconfigure"}


def test_members_come_and_are_killed_at_random(board: Board) -> None:
    """In half of the rounds one is killed meanwhile. The others end their calls, and go on with equal values."""
    draw = random.Random(ROUNDS)
    crowd, failures = Crowd(board), 0
    source = crowd.add()
    try:
        for _ in range(ROUNDS):
            while len(crowd.members) < draw.randint(2, 5):
                crowd.add()
            present = draw.sample(sorted(crowd.members), draw.randint(1, len(crowd.members)))
            present += [] if source in present else [source]
            crowd.begin(present, source)
            if len(present) > 1 and draw.random() < 0.5:
                time.sleep(draw.choice([0, 0.02, 0.1, 0.2]))
                killed = draw.choice(present)
                crowd.kill(killed)
                present.remove(killed)
                results = crowd.results(present)
                failures += sum(text.startswith(FAILED) for text in results.values())
                source = min(present, key=lambda handle: results[handle].startswith(FAILED))
                crowd.begin(present, source)
            results = crowd.results(present)
            assert not any(text.startswith(FAILED) for text in results.values()), results
            assert len(set(results.values())) == 1
            source = present[0]
    finally:
        crowd.end()
    assert failures > 0  # some were killed during a call
