"""Exact weights by lossless differences between "GPUs": every bit arrives, and the host waits once for a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.stand_in import dist, host, run, torch, with_nccl, worlds, zcomm

from zcomm._c10d import Site
from zcomm.distributed.groups import backend_of

SHAPES = pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]], ids=["2x2", "3+1", "4x1"])
RAISING: dict[str, Any] = {
    "env": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "options": worlds.options(chunk_bytes=1 << 14)
}  # fmt: skip


def weights(numel: int, step: int, seed: int, rank: int) -> torch.Tensor:
    """Of one rank, in bfloat16: each moves by a unit in the last place, or not, in each step."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    bits = torch.randint(0x3C00, 0x3E00, (numel,), generator=generator, dtype=torch.int16)
    for _ in range(step):
        bits += torch.randint(-1, 2, (numel,), generator=generator, dtype=torch.int16)
    return bits.view(torch.bfloat16)


class Module:
    """One tensor that is gathered: ``shard`` and ``output`` are on the GPU."""

    def __init__(self, numel: int = 9000, seed: int = 0) -> None:
        self.numel, self.seed = numel, seed
        self.memory = torch.zeros(dist.get_world_size(), numel, dtype=torch.bfloat16)
        self.own = torch.zeros(numel, dtype=torch.bfloat16)
        dtype = torch.uint16 if seed == 1 else torch.bfloat16  # pairs of bytes in one module of a batch
        self.output, self.shard = host.as_cuda(self.memory.view(dtype)), host.as_cuda(self.own.view(dtype))
        self.plan = backend_of(None).plan_lossless(self.output, self.shard)
        self.kept = torch.zeros(self.plan.secondary_bytes, dtype=torch.uint8)
        self.held = self.plan.bound_to(host.as_cuda(self.kept))
        self.site = Site(f"module {seed}", [])

    def set(self, step: int) -> None:
        self.own.copy_(weights(self.numel, step, self.seed, dist.get_rank()))
        self.memory.fill_(-1.0)

    def prepared(self) -> tuple[Any, ...]:
        return (self.held, self.shard, self.site)

    def gather(self, async_op: bool = False) -> Any:
        return self.held.run(self.output, self.shard, site=self.site, async_op=async_op)

    def gather_again(self, async_op: bool = False) -> Any:
        return self.held.run(self.output, site=self.site, async_op=async_op)

    def expected(self, step: int) -> torch.Tensor:
        return torch.stack([weights(self.numel, step, self.seed, rank) for rank in range(dist.get_world_size())])

    def check(self, step: int) -> None:
        host.synchronize()
        assert torch.equal(self.memory.view(torch.int16), self.expected(step).view(torch.int16)), step


def prepare(modules: list[Module], async_op: bool = False) -> None:
    backend_of(None).prepare([module.prepared() for module in modules], async_op=async_op).wait()


@SHAPES
@pytest.mark.parametrize("async_op", [False, True])
def test_every_weight_arrives_and_the_host_waits_once_for_a_step(nodes: list[int], async_op: bool) -> None:
    steps = 5

    def body() -> None:
        modules = [Module(9000 + 100 * seed, seed) for seed in range(3)]
        for module in modules:  # each by itself
            module.set(0)
            module.gather(async_op).wait()
            module.check(0)
        assert zcomm.stats().all_gather.host_waits == 3
        waits = 0
        for step in range(1, 1 + steps):
            for module in modules:
                module.set(step)
            before = host.num_host_waits()
            prepare(modules, async_op)
            for module in reversed(modules):
                module.gather(async_op).wait()
                module.gather_again(async_op).wait()
            waits += host.num_host_waits() - before
            for module in modules:
                module.check(step)
                assert module.held.generation == step + 1
        assert waits == steps
        stats = zcomm.stats().all_gather
        assert (stats.host_waits, stats.calls) == (3 + steps, 3 + 6 * steps)
        assert stats.inter_node_bytes == sum(module.site.inter_node_bytes for module in modules)
        for module in modules:
            assert module.site.calls == 1 + 2 * steps
            bits = 8 * module.held.sent_bytes / module.numel
            assert 1 < bits < 4  # one of three values each: 1.6 bits of entropy

    run(body, 4, nodes=nodes, **RAISING)


def test_late_streams_change_nothing() -> None:
    def body() -> None:
        modules = [Module(seed=seed) for seed in range(3)]
        host.set_delays(dist.get_rank() + 1, 200)
        for step in range(4):
            for module in modules:
                module.set(step)
            host.set_stream(7)
            prepare(modules)
            works = [module.gather(async_op=number == 1) for number, module in enumerate(modules)]
            host.set_stream(8)
            again = modules[0].gather_again()
            for work in [*works, again]:
                work.wait()
            for module in modules:
                module.check(step)

    run(body, 4, nodes=[0, 0, 1, 1])


def test_what_is_prepared_is_not_kept_forever() -> None:
    """Between a step's gathers and the next ones nothing is kept but the held shards."""

    def body() -> None:
        modules = [Module(seed=seed) for seed in range(3)]
        pieces = []
        for step in range(6):
            for module in modules:
                module.set(step)
            prepare(modules)
            host.synchronize()
            prepared = host.num_live_pieces()
            for module in modules:
                module.gather()
            host.synchronize()
            pieces.append((prepared, host.num_live_pieces()))
        assert pieces[2:] == [(4, 0)] * 4  # the bodies of three modules, and all headers

    run(body, 4, nodes=[0, 0, 1, 1])


def test_graphs_cannot_capture_them() -> None:
    def body() -> None:
        module = Module()
        module.set(0)
        module.gather()
        host.synchronize()
        host.set_stream(7)
        host.begin_capture()
        for call in (module.gather, module.gather_again, lambda: prepare([module])):
            with pytest.raises(RuntimeError, match="expected one that runs, got one that records a CUDA graph"):
                call()
        host.end_capture()
        module.set(1)
        module.gather()
        module.check(1)

    run(body, 2, nodes=[0, 1])


def test_wrong_tensors_are_refused_before_a_byte_moves() -> None:
    def body() -> None:
        module = Module()
        module.set(0)
        backend = backend_of(None)
        on_cpu = torch.zeros(9000, dtype=torch.bfloat16)
        for shard, message in [
            (on_cpu, "gathers: expected tensors on a GPU, got one on cpu"),
            (host.as_cuda(on_cpu[:8].clone()), "gathers: expected 9000 contiguous BFloat16, as was planned, got 8"),
        ]:
            with pytest.raises(ValueError, match=message):
                backend.prepare([(module.held, shard, None)])
        with pytest.raises(ValueError, match="gathers: expected at least one, got none"):
            backend.prepare([])
        short = module.plan.bound_to(host.as_cuda(torch.zeros(16, dtype=torch.uint8)))
        with pytest.raises(ValueError, match=r"secondary: expected \d+ contiguous Byte on cuda:0, got 16"):
            short.run(module.output, module.shard)
        module.gather()
        module.check(0)

    run(body, 2, nodes=[0, 1])


ABORTED = torch.tensor(0xA5A5 - 0x10000, dtype=torch.int16)  # what NCCL leaves in tests where bytes were to arrive


def failing(body: Callable[[Module], None]) -> Callable[[], tuple[str, list[bool]]]:
    """Three steps; before the last one rank 3 does ``body``. Then the error that every rank gets, and which of its
    slots have a NaN. No value is another than it should be, NaN, or what an abort leaves."""

    def rank_body() -> tuple[str, list[bool]]:
        module = Module()
        for step in range(2):
            module.set(step)
            module.gather()
            host.synchronize()
        if dist.get_rank() == 3:
            body(module)
        module.set(2)
        with pytest.raises(RuntimeError) as caught:
            module.gather()
            host.synchronize()
            is_right = module.memory == module.expected(2)
            is_right |= module.memory.isnan() | (module.memory.view(torch.int16) == ABORTED)
            assert is_right.all()
            for _ in range(200):
                time.sleep(0.05)
                prepare([module])
        return str(caught.value), module.memory.isnan().any(1).tolist()

    return rank_body


def test_a_stray_write_is_an_error_on_every_rank_and_no_wrong_value_is_left() -> None:
    def write(module: Module) -> None:
        # What rank 3 holds of slot 1; rank 2 gets it from there.
        module.kept.view(2, -1)[0, 4000] ^= 1

    results = run(failing(write), 4, nodes=[0, 0, 1, 1], **RAISING, group_seconds=15.0)
    for rank, (error, has_nan) in enumerate(results):
        assert "differences of slot 1: what this rank has made of generation 2 is not generation 3 of rank 1" in error
        assert has_nan == [False, rank >= 2, False, False]


def test_another_generation_is_an_error_on_every_rank() -> None:
    def forget(module: Module) -> None:
        module.held = module.plan.bound_to(module.held.secondary)

    for error, _ in run(failing(forget), 4, nodes=[0, 0, 1, 1], **RAISING, group_seconds=15.0):
        assert "differences of slot" in error and "generation 0" in error and "generation 2" in error


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    fields = with_nccl({"nodes": [0, 0, 1, 1], "group_seconds": 4.0, **RAISING})
    outcomes = worlds.collect(failing(lambda _: os.kill(os.getpid(), signal.SIGKILL)), 4, grace=15.0, **fields)
    for outcome in outcomes[:3]:
        assert outcome.finished and outcome.error is None, outcome.trace
        assert "differences" in outcome.value[0]


def test_by_default_the_process_ends(capfd: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        module = Module()
        module.set(0)
        module.gather()
        host.synchronize()
        if dist.get_rank() == 0:
            module.kept[0] ^= 1
        module.gather_again()
        host.synchronize()
        time.sleep(20)

    outcomes = worlds.collect(body, 2, grace=5.0, **with_nccl({"nodes": [0, 0], "group_seconds": 10.0}))
    assert outcomes[0].exit_code == -signal.SIGABRT and not outcomes[0].finished
    assert "slot 0: generation 1 was written to on rank 0" in capfd.readouterr().err
