"""Messages between two ranks, compressed where the option ``exchanges`` says so, over Gloo."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, mine
from support.expected import assert_same_bits, roundtrip
from support.worlds import Outcome, collect, run

import zcomm

INTRA, INTER = "int8:128", "int4:64"
NODES = [0, 0, 1]
OPTIONS = zcomm.Options(exchanges=f"{INTRA}/{INTER}")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SOON = 15.0  # seconds in which ranks learn that they differ; of a timeout of 20 and more


def arrives(values: torch.Tensor, source: int, to: int) -> torch.Tensor:
    return roundtrip(values, INTRA if NODES[source] == NODES[to] else INTER)


def other() -> int:
    return 1 - dist.get_rank()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_have_the_bits_of_the_codec(dtype: torch.dtype) -> None:
    def body() -> None:
        rank = dist.get_rank()
        num_bytes = 0
        for num in (NUM, NUM + 1, 3 * NUM - 77):
            for source, to in ((0, 1), (1, 2), (2, 0)):
                box = torch.full((num,), -1.0, dtype=dtype)
                if rank == source:
                    dist.send(data(source, num, dtype), to)
                    num_bytes += num * dtype.itemsize
                elif rank == to:
                    assert dist.recv(box, source) == source
                    assert_same_bits(box, arrives(data(source, num, dtype), source, to), f"{num} from {source}")
        sent = zcomm.stats().send_recv
        peer, format = (rank + 1) % 3, INTRA if rank == 0 else INTER
        wires = [zcomm.codec.wire_bytes(format, str(dtype)[6:], num) for num in (NUM, NUM + 1, 3 * NUM - 77)]
        assert (sent.calls, sent.bytes, sent.wire_bytes) == (3, num_bytes, sum(wires))
        assert list(sent.peers) == [peer] and sent.peers[peer].wire_bytes == sent.wire_bytes
        assert zcomm.stats().to_dict()[f"zcomm/send_recv/peers/{peer}/calls"] == 3
        assert re.search(r"^send_recv +3 ", str(zcomm.stats()), re.MULTILINE)
        assert zcomm.stats().others.calls == 0

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_what_is_not_compressed() -> None:
    def body() -> None:
        def exchange(values: Callable[[int], torch.Tensor], change: Any) -> None:
            box = torch.zeros_like(values(0))
            with change:
                works = [dist.isend(values(dist.get_rank()), other()), dist.irecv(box, other())]
            for work in works:
                work.wait()
            assert_same_bits(box, values(other()))

        exchange(lambda rank: data(rank, 100), zcomm.override())
        exchange(lambda rank: torch.arange(NUM) + rank, zcomm.override())
        exchange(lambda rank: data(rank, NUM).double(), zcomm.override())
        exchange(lambda rank: data(rank, NUM), zcomm.exact())
        exchange(lambda rank: data(rank, NUM).bfloat16(), zcomm.override(exchanges="bf16"))
        assert zcomm.stats().send_recv.calls == 0 and zcomm.stats().others.calls == 10

    run(body, options=OPTIONS)


def test_order_tags_and_batches() -> None:
    def body() -> None:
        works, boxes = [], {}
        for tag in (3, 1, 2):
            works.append(dist.isend(mine(seed=tag), other(), tag=tag))
        works += [dist.isend(mine(NUM + 32, seed=4), other(), tag=1), dist.isend(mine(100, seed=5), other(), tag=1)]
        for seed, (tag, num) in enumerate([(1, NUM), (2, NUM), (3, NUM), (1, NUM + 32), (1, 100)], start=1):
            boxes[seed] = torch.zeros(num)
            works.append(dist.irecv(boxes[seed], other(), tag=tag))
        for work in reversed(works):
            work.wait()
            work.wait()  # once more is nothing
        for seed, box in boxes.items():
            values = data(other(), box.numel(), seed=seed)
            assert_same_bits(box, values if seed == 5 else roundtrip(values, INTRA), f"message {seed}")

        box = torch.zeros(NUM)
        batch = [dist.P2POp(dist.irecv, box, other()), dist.P2POp(dist.isend, mine(), other())]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert_same_bits(box, roundtrip(data(other(), NUM), INTRA), "batch")

    run(body, options=OPTIONS, nodes=[0, 0])


def test_polling_never_shows_a_message_before_its_values() -> None:
    def body() -> None:
        box = torch.full((NUM,), -1.0)
        work, sent = dist.irecv(box, other()), dist.isend(mine(), other())
        for _ in range(1000):
            if work.is_completed():
                break
            assert (box == -1.0).all()
        work.wait()
        assert work.is_completed() and work.is_success()
        assert_same_bits(box, roundtrip(data(other(), NUM), INTRA))
        sent.wait()

    run(body, options=OPTIONS, nodes=[0, 0])


def test_synchronize_is_as_good_as_wait() -> None:
    def body() -> None:
        box = torch.zeros(NUM)
        work, sent = dist.irecv(box, other()), dist.isend(mine(), other())
        work.synchronize()
        assert_same_bits(box, roundtrip(data(other(), NUM), INTRA))
        sent.synchronize()

    run(body, options=OPTIONS, nodes=[0, 0])


def test_two_ranks_need_no_third_one() -> None:
    def body() -> None:
        if dist.get_rank() == 2:
            dist.recv(torch.zeros(1), 0)
            return
        works = [dist.isend(mine(), other()), dist.irecv(torch.zeros(NUM), other())]
        for work in works:
            work.wait()
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 2)

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_stochastic_formats_draw_from_the_step() -> None:
    def body() -> Any:
        drawn = []
        for step in (1, 1, 2):
            zcomm.codec.set_step(step)
            box = torch.zeros(NUM)
            works = [dist.isend(mine(), other()), dist.irecv(box, other())]
            for work in works:
                work.wait()
            drawn.append(box)
        assert_same_bits(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])

    run(body, options=zcomm.Options(exchanges="int4:128:stochastic"))


# --- Any source


@pytest.mark.parametrize("exact", [False, True])
def test_any_source_takes_what_its_senders_send(exact: bool) -> None:
    def body() -> None:
        boxes: dict[int, torch.Tensor] = {}
        with zcomm.exact() if exact else zcomm.override():
            for _ in range(2):
                if dist.get_rank() == 0:
                    box = torch.zeros(NUM)
                    boxes[dist.recv(box, tag=7)] = box
                else:
                    dist.send(mine(), 0, tag=7)
                    break
        for source, box in boxes.items():
            assert_same_bits(box, data(source, NUM) if exact else roundtrip(data(source, NUM), INTRA))
        assert dist.get_rank() > 0 or len(boxes) == 2
        assert zcomm.stats().send_recv.calls == (dist.get_rank() > 0 and not exact)

    run(body, size=3, options=OPTIONS, nodes=[0, 0, 0])


def test_any_source_of_two_formats_is_refused() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=f"src: expected the rank that sends.*'{INTRA}/{INTER}'"):
                dist.recv(torch.zeros(NUM))

    run(body, size=3, options=OPTIONS, nodes=NODES)


def test_messages_that_never_meet_are_named_by_both_sides() -> None:
    def body() -> None:
        with zcomm.exact() if dist.get_rank() == 0 else zcomm.override():
            dist.send(mine(), 1) if dist.get_rank() == 0 else dist.recv(torch.zeros(NUM))

    sender, receiver = collect(body, 2, options=OPTIONS, nodes=[0, 0], group_seconds=3.0)
    assert f"message 0 to 1 tag 0: {NUM} Float exact did not move" in (sender.error or ""), sender
    assert f"message from any rank to 1 tag 0: {NUM} Float {INTRA} (do its senders" in (receiver.error or ""), receiver


def both_learn(body: Callable[[], None], words: list[str], **fields: Any) -> None:
    outcomes: list[Outcome] = collect(body, 2, options=OPTIONS, nodes=[0, 0], grace=SOON, **fields)
    for outcome in outcomes:
        assert outcome.error is not None, outcome
        for part in words:
            assert part in outcome.error, outcome.error
        assert outcome.seconds < SOON


@pytest.mark.parametrize("anybody_first", [False, True])
def test_messages_beside_one_of_any_source_are_no_difference(anybody_first: bool) -> None:
    """Rank 1 receives a compressed message by its source and an exact one by none. The ranks compare meanwhile: rank 0
    waits for rank 2, and has not waited for what it has sent."""

    def body() -> None:
        rank = dist.get_rank()
        few = torch.zeros(10)
        if rank == 0:
            early, late = (torch.ones(10), mine()) if anybody_first else (mine(), torch.ones(10))
            first = dist.isend(early, 1)
            dist.recv(few, 2)
            dist.send(late, 1)
            first.wait()
        elif rank == 2:
            time.sleep(3)
            dist.send(few, 0)
        else:
            box = torch.zeros(NUM)
            receives = [lambda: dist.irecv(few), lambda: dist.irecv(box, 0)]
            works = [receive() for receive in (receives if anybody_first else reversed(receives))]
            for work in works:
                work.wait()
            assert few.tolist() == [1.0] * 10
            assert_same_bits(box, roundtrip(data(0, NUM), INTRA))

    run(body, 3, options=OPTIONS, nodes=[0, 0, 0])


# --- Ranks that differ

EXACT = f"message 0 to 1 tag 3: {NUM} Float exact"
COMPRESSED = f"message 0 to 1 tag 3: {NUM} Float {INTRA}"


@pytest.mark.parametrize("exact", [0, 1])
@pytest.mark.parametrize("late", [0.0, 1.5])
def test_ranks_that_differ_learn_so(exact: int, late: float) -> None:
    def body() -> None:
        rank = dist.get_rank()
        time.sleep(late * rank)  # the other one has compared before, in vain
        with zcomm.exact() if rank == exact else zcomm.override():
            (dist.send if rank == 0 else dist.recv)(mine(), 1 - rank, tag=3)

    both_learn(body, [EXACT, COMPRESSED])


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"exchanges": "int4:32"}, "int4:32"), ({"min_bytes": 1 << 30}, "exact"), ({"exchanges": "int8:256"}, "int8:256")],
)
def test_overrides_that_differ_are_quoted(fields: dict[str, Any], words: str) -> None:
    def body() -> None:
        rank = dist.get_rank()
        with zcomm.override(**(fields if rank else {})):
            (dist.send if rank == 0 else dist.recv)(mine(), 1 - rank, tag=3)

    both_learn(body, [COMPRESSED, f"Float {words}"])


def test_lengths_and_dtypes_that_differ_are_quoted() -> None:
    def body() -> None:
        rank = dist.get_rank()
        box = mine() if rank == 0 else torch.zeros(2 * NUM, dtype=torch.bfloat16)
        work = (dist.isend if rank == 0 else dist.irecv)(box, 1 - rank, tag=3)
        assert work is not None
        work.wait()

    both_learn(body, [COMPRESSED, f"message 0 to 1 tag 3: {2 * NUM} BFloat16 {INTRA}"])


def test_after_a_difference_the_group_moves_no_message() -> None:
    def body() -> None:
        rank = dist.get_rank()
        for _ in range(2):
            with zcomm.exact() if rank else zcomm.override(), pytest.raises(RuntimeError, match="exact"):
                (dist.send if rank == 0 else dist.recv)(mine(), 1 - rank)
        dist.barrier()
        dist.all_reduce(torch.ones(3))

    run(body, options=OPTIONS)


def test_a_late_peer_is_no_difference() -> None:
    def body() -> None:
        rank = dist.get_rank()
        for seed in range(3):
            if rank == seed % 2:
                time.sleep(1.2)
            if rank == 0:
                dist.send(mine(seed=seed), 1)
            else:
                box = torch.zeros(NUM)
                dist.recv(box, 0)
                assert_same_bits(box, roundtrip(data(0, NUM, seed=seed), INTRA))

    run(body, options=OPTIONS, nodes=[0, 0])


def test_options_that_differ_are_quoted() -> None:
    def body() -> None:
        given = ("int8:128", "exact")[dist.get_rank()]
        group = dist.new_group([0, 1], pg_options=zcomm.Options(exchanges=given))
        call = (dist.send, dist.recv)[dist.get_rank()]
        with pytest.raises(RuntimeError, match="options") as caught:
            call(mine(), other(), group=group)
        assert "exchanges='int8:128'" in str(caught.value) and "exchanges='exact'" in str(caught.value)

    run(body)


def test_a_killed_peer_is_an_error() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.recv(torch.zeros(NUM), 1)

    survivor, _ = collect(body, 2, options=OPTIONS, grace=SOON)
    assert survivor.error is not None and survivor.seconds < SOON


def test_bad_arguments() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="tag: expected 0 to 1073741823, got -1"):
            dist.isend(mine(), other(), tag=-1)
        with pytest.raises(ValueError, match="tag: expected 0 to 1073741823, got 1073741824"):
            dist.send(mine(), other(), tag=1 << 30)
        with pytest.raises(ValueError, match="peer: expected a rank from 0 to 1, got 2"):
            dist.send(mine(), 2)
        me = dist.get_rank()
        for num in (1, 100_000):
            with pytest.raises(ValueError, match=f"peer: expected another rank, got {me}, this rank"):
                dist.batch_isend_irecv([dist.P2POp(dist.irecv, mine(num), me), dist.P2POp(dist.isend, mine(num), me)])
        with zcomm.override(strict=True), pytest.raises(RuntimeError, match="strict=True, but a message of"):
            dist.send(mine().double(), other())

    run(body, options=OPTIONS)
