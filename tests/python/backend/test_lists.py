"""Lists of tensors: those that no call takes are refused before anything moves, uneven ones stay exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.calls import NUM, OPT_INS, data, expect, newly_counted
from support.expected import assert_same_bits
from support.worlds import options, run

import zcomm

CPU = torch.device("cpu")
LENGTHS = [NUM, 3 * NUM]  # of the ranks' parts


def test_lists_that_no_call_takes_are_refused() -> None:
    """Each rank finds it alone, and the group stays usable."""

    def body() -> None:
        world: Any = dist.group.WORLD
        group, peer, one = world._get_backend(CPU), 1 - dist.get_rank(), torch.ones(4)
        takes_one: dict[str, Callable[[list[torch.Tensor]], Any]] = {
            "broadcast": lambda tensors: group.broadcast(tensors, dist.BroadcastOptions()),
            "reduce": lambda tensors: group.reduce(tensors, dist.ReduceOptions()),
            "send": lambda tensors: group.send(tensors, peer, 0),
            "recv": lambda tensors: group.recv(tensors, peer, 0),
            "recv_anysource": lambda tensors: group.recv_anysource(tensors, 0),
            "gather": lambda tensors: group.gather([], tensors, dist.GatherOptions()),
            "scatter": lambda tensors: group.scatter(tensors, [], dist.ScatterOptions()),
        }
        for call in takes_one.values():
            for tensors in ([], [one, one.clone()]):
                expect(ValueError, f"tensor: expected one, got {len(tensors)}", lambda: call(tensors))  # noqa: B023
        for refused in (
            lambda: group.allgather([[]], [one]),
            lambda: group.allgather([[one] * 3], [one]),
            lambda: group.reduce_scatter([one], [[]]),
            lambda: group.reduce_scatter([one], [[one]]),
            lambda: group.alltoall([], []),
        ):
            expect(ValueError, "expected a tensor for each of 2 ranks, got", refused)
        for refused in (
            lambda: group.allreduce([], dist.AllreduceOptions()),
            lambda: group.allgather([], []),
            lambda: group.reduce_scatter([], []),
        ):
            expect(RuntimeError, "", refused)  # by Gloo
        takes_some: dict[str, Callable[[], Any]] = {
            "tensors": lambda: group.allreduce_coalesced([], dist.AllreduceCoalescedOptions()),
            "inputs": lambda: group.allgather_coalesced([], []),
        }
        for name, refused in takes_some.items():
            expect(ValueError, f"{name}: expected at least one tensor, got none", refused)
        dist.all_reduce(one)
        assert one[0] == 2

    run(body)


def parts(rank: int) -> list[torch.Tensor]:
    return [data(rank, num, seed=to) for to, num in enumerate(LENGTHS)]


def test_uneven_lists_stay_exact_and_are_counted() -> None:
    """All ranks see the lengths of all parts, so they decide alike."""

    def body() -> None:
        rank = dist.get_rank()
        output = torch.empty(LENGTHS[rank])
        counts = newly_counted(lambda: dist.reduce_scatter(output, parts(rank)))
        assert counts == {"reduce_scatter: layout": 1}
        assert_same_bits(output, parts(0)[rank] + parts(1)[rank])
        wrong = torch.empty(NUM // 2)  # a part whose rank expects another length is an error, as before
        expect(ValueError, "input_list", lambda: dist.reduce_scatter(wrong, [torch.ones(NUM), torch.ones(NUM)]))

        if rank == 1:  # the others hear nothing
            expect(ValueError, "input_list", lambda: dist.reduce_scatter(wrong, parts(rank)))
            expect(ValueError, "output_tensors", lambda: dist.all_gather([torch.empty(num) for num in LENGTHS], wrong))
        with zcomm.override(strict=True):
            expect(RuntimeError, "lists of equal lengths", lambda: dist.reduce_scatter(output, parts(rank)))

    run(body, options=options(**OPT_INS))


def test_uneven_lists_of_gathers_are_left_to_torch() -> None:
    """Gloo refuses them, NCCL takes them: zcomm has no say."""

    def body() -> None:
        rank = dist.get_rank()
        outputs = [torch.empty(num) for num in LENGTHS]

        def refused() -> None:
            expect(RuntimeError, "invalid tensor size", lambda: dist.all_gather(outputs, data(rank, LENGTHS[rank])))

        counts = newly_counted(refused)
        assert counts == {"all_gather: layout": 1}

    run(body, options=options(**OPT_INS))
