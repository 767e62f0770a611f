"""Messages between two ranks as torch has them: exact ones, and what all have in common."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, data, mine
from support.expected import assert_same_bits
from support.worlds import options, run

import zcomm


def test_a_peer_that_does_not_exist_is_named() -> None:
    def body() -> None:
        for call, peer in itertools.product((dist.send, dist.recv), (2, 100)):
            with pytest.raises(ValueError, match=f"peer: expected a rank from 0 to 1, got {peer}"):
                call(torch.ones(8), peer)

    run(body)


def test_point_to_point() -> None:
    """send/recv, their async forms, any source, tags, and batches."""

    def body() -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        left, right = (rank - 1) % size, (rank + 1) % size
        box, values = torch.zeros(NUM), mine()
        if rank == 0:
            dist.send(values, 1)
            assert dist.recv(box) == size - 1
        else:
            dist.recv(box, rank - 1)
            dist.send(values, right)
        assert_same_bits(box, data(left, NUM))

        boxes = [torch.zeros(NUM), torch.zeros(NUM)]
        works = [dist.irecv(boxes[0], left, tag=1), dist.irecv(boxes[1], left, tag=2)]
        works += [dist.isend(values * 2, right, tag=2), dist.isend(values, right, tag=1)]
        for work in works:
            work.wait()
        assert_same_bits(boxes[0], data(left, NUM))
        assert_same_bits(boxes[1], data(left, NUM) * 2)

        ops = [dist.P2POp(dist.irecv, box.zero_(), left), dist.P2POp(dist.isend, values, right)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_same_bits(box, data(left, NUM))
        assert zcomm.stats().others.calls > 0 and zcomm.stats().all_gather.calls == 0

    run(body, 3)


def test_messages_do_not_count_as_collectives() -> None:
    """Ranks that exchange none have the same numbers: else torch's detailed checks find a difference."""

    def body() -> None:
        for num in (4, NUM):  # exact and compressed
            if dist.get_rank() == 0:
                dist.send(torch.ones(num), 1)
            elif dist.get_rank() == 1:
                dist.recv(torch.ones(num), 0)
        dist.all_reduce(torch.ones(9))

    run(body, 3, options=options(exchanges="int8:128"), env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
