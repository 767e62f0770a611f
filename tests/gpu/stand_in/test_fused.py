"""Reductions on a GPU that read the gradients themselves, which the stream that made them frees and uses again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support import worlds
from support.stand_in import Gather, dist, host, run, torch, values

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.fsdp.collectives import gradients_of
from zcomm.fsdp.fused import Buffer, Deferred

COMPUTE, REDUCE = 7, 9  # streams
SIZES = [3000, 41, 1963]


def gradients(whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Made by the stream that computes."""
    sources = [host.as_cuda(each) for each in whole]
    made = [torch.ops.aten.empty([len(each)], dtype=each.dtype, device=each.device) for each in sources]
    for target, source in zip(made, sources, strict=True):
        host.copy(target, source)
    return made


def noted(made: list[torch.Tensor]) -> Deferred:
    """FSDP2's buffer, whose copy of the gradients was noted."""
    numel, size = sum(-(-len(each) // dist.get_world_size()) for each in made), dist.get_world_size()
    shape = [numel * size]
    buffer = Buffer(lambda: torch.empty(shape, dtype=torch.float32, device="cuda"))
    deferred = Deferred(buffer, shape, torch.float32, made[0].device)
    torch.ops.fsdp.chunk_cat(made, 0, size, out=deferred.view(size, -1))
    return deferred


def overwrite(whole: list[torch.Tensor]) -> None:
    """Use memory that the stream which computes has freed."""
    host.set_stream(COMPUTE)
    done, one = torch.zeros(1), torch.ones(1)
    others = gradients([torch.full_like(each, 7) for each in whole])
    host.copy(host.as_cuda(done), host.as_cuda(one))
    deadline = time.monotonic() + 60
    while not done.item() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert done.item()
    del others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_held_until_the_buffer_is_dropped(dtype: torch.dtype) -> None:
    def body() -> None:
        size, backend, op = dist.get_world_size(), backend_of(), dist.ReduceOp.AVG
        whole = [values(size * (numel // size), dtype, seed) for seed, numel in enumerate(SIZES)]
        shards = [len(each) // size for each in whole]
        Gather(64)()  # connects

        def reduced(after: Callable[[list[torch.Tensor]], None]) -> torch.Tensor:
            host.set_stream(COMPUTE)
            made = gradients(whole)
            deferred = noted(made)
            host.synchronize()
            host.set_stream(REDUCE)
            memory = torch.zeros(sum(shards))
            output, parts = host.as_cuda(memory), gradients_of(deferred)
            plan = backend.plan(output, parts, op, parts=[(numel, False) for numel in shards])
            assert isinstance(plan, _c10d.Operation)
            host.close_gate()  # the reduction begins when it opens
            plan.run(output, parts, op)
            deferred.buffer.release_gradients()
            del parts
            after(made)
            host.open_gate()
            host.synchronize()
            before = host.num_live_pieces()
            del deferred
            made.clear()
            assert host.num_live_pieces() == before - len(whole)
            return memory

        def free(made: list[torch.Tensor]) -> None:
            made.clear()  # FSDP2's reference
            overwrite(whole)

        expected = reduced(lambda made: None)
        assert torch.equal(reduced(free), expected) and bool(expected.any())

    run(body, 4, nodes=[0, 0, 1, 1], options=worlds.options())


def test_a_gather_waits_for_the_decode_of_wires_that_it_overwrites() -> None:
    """Both gathers keep wires in the same memory."""

    def body() -> None:
        backend, numel = backend_of(), 3000
        Gather(64)()  # connects
        memory = torch.zeros(dist.get_world_size(), numel)
        first, second = (values(numel, seed=seed) for seed in (0, 1))
        plan = backend.plan(host.as_cuda(memory), host.as_cuda(first))
        assert isinstance(plan, _c10d.Operation)
        plan.run(host.as_cuda(memory), host.as_cuda(first)).wait()
        host.synchronize()
        keeping = plan.bound_to(host.as_cuda(torch.zeros(plan.secondary_bytes, dtype=torch.uint8)))
        wires = [host.as_cuda(torch.zeros(plan.wires_bytes, dtype=torch.uint8)) for _ in range(2)]
        host.set_stream(REDUCE)
        keeping.run(None, host.as_cuda(first), wires=wires[0])
        host.synchronize()
        host.set_stream(COMPUTE)
        host.close_gate()  # before the decode
        decoded = torch.zeros_like(memory)
        keeping.decode(host.as_cuda(decoded), wires[0])
        host.set_stream(REDUCE)
        keeping.run(None, host.as_cuda(second), wires=wires[1])
        time.sleep(0.2)  # long enough for a gather that does not wait
        host.open_gate()
        host.synchronize()
        assert torch.equal(decoded, memory) and bool(memory.any())

    run(body, 4, nodes=[0, 0, 1, 1], options=worlds.options())
