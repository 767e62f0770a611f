"""What the benchmarks need of a GPU: its clock, weights on it, and the codec's part of a collective by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zcomm import _core, codec
from zcomm_bench.contenders import Problem
from zcomm_bench.planner import lossless

REPEATS = 7
AHEAD_CYCLES = 10_000_000  # some 5 ms, in which Python queues the kernels of a pass
FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU of today holds

Pass = Callable[[], Any]


def seconds_of(passes: Sequence[Pass], repeats: int, *, flush: bool = True, warmup: int = 2) -> list[list[float]]:
    """Seconds of every pass, `repeats` times, in turn, by the GPU's own clock. With `flush` the L2 cache holds nothing
    of theirs when they start. It reads memory: lines that it wrote would be written back within the pass. Then the GPU
    waits, so that the host is ahead and launches do not count."""
    rubbish = torch.zeros(FLUSH_BYTES // 4 if flush else 1, device="cuda")
    marks: list[list[tuple[Any, Any]]] = [[] for _ in passes]
    for number in range(warmup + repeats):
        for one, mark in zip(passes, marks, strict=True):
            start, end = _event(), _event()
            rubbish.amax()
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            one()
            end.record()
            if number >= warmup:
                mark.append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e-3 for start, end in mark] for mark in marks]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def codec_seconds(problem: Problem, formats: str, num_ranks: int, ranks_per_node: int) -> float:
    """The encodes and decodes of one call, one after the other with nothing beside them, in seconds.

    What rank 0 encodes and decodes along the topology's routes, not how it is cut into chunks.
    """
    hops = _core.HopFormats(formats)
    inside = str(hops.intra_node)
    topology = _core.Topology([rank // ranks_per_node for rank in range(num_ranks)])
    slots = problem.whole.view(-1)[: problem.whole.numel() // num_ranks * num_ranks].view(num_ranks, -1)
    out = torch.empty_like(slots[0])
    steps: list[Pass] = []

    def format_to(peer: int) -> str:
        return inside if topology.same_node(0, peer) else str(hops.inter_node)

    def encode(slot: int, format: str) -> None:
        steps.append(partial(codec.encode, slots[slot], format, out=_wire(slots[slot], format)))

    def add(terms: Sequence[tuple[Any, str]]) -> None:
        steps.append(lambda: codec.decode_sum(terms, out))

    if problem.collective == "all_gather":
        encode(0, inside)
        _decode_all(steps, slots, inside)
        return _median_of(steps)
    if problem.collective == "broadcast":
        for slot in range(num_ranks):
            encode(slot, inside)
        _decode_all(steps, slots, inside)
        return _median_of(steps)
    if problem.collective == "all_to_all":
        for peer in range(1, num_ranks):
            encode(peer, format_to(peer))
            _decode_all(steps, slots[:1], format_to(peer))
        return _median_of(steps)
    own = (slots[0], "exact")
    (sent, received), (forwarded, sums_received) = topology.reduce_hops(0)
    for peer, slot in sent:
        encode(slot, format_to(peer))
    arrived = [format_to(peer) for peer, slot in received if slot == 0]
    first = [own, *((codec.encode(slots[0], format), format) for format in arrived)]
    if forwarded:
        sums = torch.zeros_like(out, dtype=torch.float32)
        steps.append(lambda: codec.decode_sum(first, sums))
        dtype = str(out.dtype).removeprefix("torch.")
        for peer, _ in forwarded:
            format = format_to(peer)
            wire = _wire(sums, format)
            steps.append(partial(codec.decode_sum_encode, first, out.numel(), format, dtype=dtype, out=wire))
        between = [format_to(peer) for peer, _ in sums_received]
        add([(sums, "exact"), *((codec.encode(sums, format), format) for format in between)])
    else:
        add(first)
    if problem.collective == "all_reduce":
        encode(0, inside)
        _decode_all(steps, slots, inside)
    return _median_of(steps)


def changed_weights(num_elements: int, rate: float, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """As lossless.changed_weights(), made on the device: two bfloat16 tensors (num_elements,)."""
    before = lossless.DEVIATION * torch.randn(num_elements, device=device)
    after = before + lossless.UPDATE * rate * torch.randn(num_elements, device=device)
    return before.bfloat16(), after.bfloat16()


def _wire(values: torch.Tensor, format: str) -> torch.Tensor:
    num_bytes = codec.wire_bytes(format, str(values.dtype).removeprefix("torch."), values.numel())
    return torch.empty(num_bytes, dtype=torch.uint8, device=values.device)


def _decode_all(steps: list[Pass], slots: torch.Tensor, format: str) -> None:
    wire, target = codec.encode(slots[0], format), torch.empty_like(slots[0])
    steps += [lambda: codec.decode(wire, format, target)] * len(slots)


def _median_of(steps: Sequence[Pass]) -> float:
    def all_steps() -> None:
        for step in steps:
            step()

    return statistics.median(seconds_of([all_steps], REPEATS)[0])
