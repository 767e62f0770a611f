"""What every rank of the benchmark runs: `python -m zcomm_bench.worker ACTION JSON`.

Rank 0 prints one line of JSON per size: a list with an object per backend (see zcomm_bench.run.FIGURES).
"""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm._units import parse_nodes
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm.distributed.stats import CollectiveStats
from zcomm_bench import gpu_clock
from zcomm_bench.contenders import Contender, Problem, Zcomm, make_contenders
from zcomm_bench.lab import gpus, network
from zcomm_bench.spec import NO_LAB, OVERHEAD_BATCHES, Spec

DTYPES = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
TIMEOUT = datetime.timedelta(minutes=5)
SAMPLE_SECONDS = 5e-3
SAMPLE_BARRIERS = 20  # a shorter sample would measure how unevenly the ranks leave a barrier
BURST_BYTES = 128 * 1024  # an idle link lets these through at once; ten times as much makes that a tenth
MAX_CALLS = 50
LEAST_TURNS = 3  # where time is short
CHECK_ELEMENTS = 1 << 20  # compared at a time
MOST_HOPS = 4  # of an all-reduce
HOP_FIELDS = ("intra_node_bytes", "inter_node_bytes", "wait_seconds")


class Bench:
    """The contenders of one spec, measured size by size. What ranks tell each other beside goes over Gloo."""

    def __init__(self, spec: Spec, device: torch.device, contenders: list[Contender] | None = None) -> None:
        self.spec, self.device = spec, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        ranks_per_node = parse_nodes(spec.nodes)[1]
        self.contenders = contenders or make_contenders(spec, ranks_per_node if spec.link == NO_LAB else None)
        # Without a lab, or where no lab could be made, the interface does not tell traffic between nodes.
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.interface = None if spec.link == NO_LAB or interface == "lo" else interface
        self.barrier_bytes, self.barrier_seconds = self._measure_barrier()

    def measure(self, elements: int) -> list[dict[str, Any]]:
        """A row per contender, for shards of `elements` elements."""
        problem = self.make_problem(elements)
        calls, turns = self.warm_up(problem)
        before = [self._stats(contender) for contender in self.contenders]
        times, link_bytes = self._take_turns(problem, calls, turns)
        after = [self._stats(contender) for contender in self.contenders]
        errors = self._check(problem) if self.spec.check else [(None, None)] * len(self.contenders)
        rows = []
        for index, contender in enumerate(self.contenders):
            wire, codec, transfer, reason = self._account(contender, problem, before[index], after[index])
            hops = self._hops(before[index], after[index])
            own = sorted(times[index])
            ratios = [first / this for first, this in zip(times[0], times[index], strict=True)]
            rows.append(
                {
                    "size": problem.whole.nbytes,
                    "count": problem.whole.numel() if self.spec.collective in ("all_reduce", "broadcast") else elements,
                    "backend": contender.name,
                    "format": contender.format,
                    "exact_reason": reason,
                    "min_us": own[0] * 1e6,
                    "median_us": statistics.median(own) * 1e6,
                    "p90_us": own[math.ceil(0.9 * len(own)) - 1] * 1e6,
                    "speedup": statistics.median(ratios),
                    "wire_bytes": wire,
                    "link_bytes": None if self.interface is None else statistics.median(link_bytes[index]),
                    "codec_us": codec,
                    "transfer_us": transfer,
                    "hops": hops,
                    "max_error": errors[index][0],
                    "mean_error": errors[index][1],
                    "calls": calls[index],
                }
            )
        return rows

    def make_problem(self, elements: int) -> Problem:
        spec, dtype = self.spec, DTYPES[self.spec.dtype]
        whole = torch.empty(elements * self.size, dtype=dtype, device=self.device)
        if spec.collective == "reduce_scatter":
            shard = torch.empty(elements, dtype=dtype, device=self.device)
        elif spec.collective == "all_to_all":
            shard = torch.empty_like(whole)
        else:
            shard = whole[self.rank * elements : (self.rank + 1) * elements]
        problem = Problem(spec.collective, spec.op, whole, shard)
        self._source = torch.empty_like(whole) if spec.collective == "all_reduce" else None
        self._fill(problem)
        if self._source is not None:
            self._source.copy_(whole)
        for contender in self.contenders:
            contender.prepare(problem)
        return problem

    def _fill(self, problem: Problem) -> None:
        """Put this rank's input where the collective takes it."""
        if problem.collective == "all_gather":
            problem.shard.copy_(self._input(self.rank, self.rank, problem))
        else:
            for slot, values in enumerate(problem.whole.view(self.size, -1)):
                values.copy_(self._input(self.rank, slot, problem))

    def _input(self, rank: int, slot: int, problem: Problem) -> torch.Tensor:
        """What `rank` holds in `slot`, on any rank."""
        seed = torch.Generator(self.device).manual_seed(1 + rank * self.size + slot)
        elements = problem.whole.numel() // self.size
        return torch.randn(elements, generator=seed, device=self.device).to(problem.whole.dtype)

    def _finish(self) -> None:
        """Wait for what the GPU has to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _barrier(self) -> None:
        self._finish()
        dist.barrier()

    def warm_up(self, problem: Problem) -> tuple[list[int], int]:
        """Returns the calls that make a sample, for every contender, and the samples that there is time for."""
        latest = []
        for contender in self.contenders:
            for _ in range(self.spec.warmup):
                self._restore(problem)
                start = time.perf_counter()
                contender.call(problem)
                self._finish()
                seconds = time.perf_counter() - start
            latest.append(seconds)
        calls = self._calls(problem, latest)
        turns = self.spec.iters
        if self.spec.seconds:
            turn = sum(number * seconds for number, seconds in zip(calls, latest, strict=True))
            turns = min(turns, max(LEAST_TURNS, int(self.spec.seconds / turn)))
        wanted = torch.tensor([*calls, turns])
        dist.broadcast(wanted, 0)
        agreed: list[int] = wanted.tolist()
        return agreed[:-1], agreed[-1]

    def _calls(self, problem: Problem, latest: list[float]) -> list[int]:
        """How many calls take long enough, if one takes as long as `latest`."""
        if self.spec.calls:
            return [self.spec.calls] * len(latest)
        rate = self.spec.link_rate if self.interface else None
        burst = 10 * BURST_BYTES / rate if rate else 0.0
        least = max(SAMPLE_SECONDS, SAMPLE_BARRIERS * self.barrier_seconds, burst)
        most = min(MAX_CALLS, self.spec.most_calls)
        return [min(most, math.ceil(least / seconds)) for seconds in latest]

    def _take_turns(
        self, problem: Problem, calls: list[int], turns: int
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds and bytes through the interface per call, for every contender and turn, averaged over ranks."""
        num_contenders = len(self.contenders)
        measured = torch.zeros(2, num_contenders, turns, dtype=torch.float64)
        gc.collect()
        gc.disable()
        for turn in range(turns):
            for place in range(num_contenders):
                index = (turn + place) % num_contenders  # nobody always follows the same one
                measured[:, index, turn] = torch.tensor(self.sample(problem, self.contenders[index], calls[index]))
        gc.enable()
        dist.all_reduce(measured)
        times, link_bytes = (measured / self.size).tolist()
        return times, link_bytes

    def sample(self, problem: Problem, contender: Contender, calls: int) -> tuple[float, float]:
        """Seconds of a call on this rank, and its bytes through the interface; means of as many `calls`."""
        self._restore(problem)
        self._barrier()
        sent = self._sent()
        start = time.perf_counter()
        for _ in range(calls):
            contender.call(problem)
        self._finish()
        seconds = (time.perf_counter() - start) / calls
        dist.barrier()  # now all bytes have left
        return seconds, max(0.0, self._sent() - sent - self.barrier_bytes) / calls

    def _restore(self, problem: Problem) -> None:
        """Undo sums in place, which grow with every call."""
        if self._source is not None:
            problem.whole.copy_(self._source)
            self._finish()

    def _sent(self) -> int:
        if self.interface is None:
            return 0
        with open("/proc/self/net/dev", encoding="ascii") as file:
            return network.interface_tx_bytes(file.read(), self.interface)

    def _measure_barrier(self) -> tuple[float, float]:
        """Returns its bytes through the interface, and its seconds."""
        counts, times = [], []
        for _ in range(8):
            dist.barrier()
            counts.append(self._sent())
            times.append(time.perf_counter())
        return _median_step(counts), _median_step(times)

    def _stats(self, contender: Contender) -> CollectiveStats | None:
        if not isinstance(contender, Zcomm):
            return None
        found: CollectiveStats = getattr(zcomm.stats(contender.group), self.spec.collective)
        return found

    def _account(
        self, contender: Contender, problem: Problem, before: CollectiveStats | None, after: CollectiveStats | None
    ) -> tuple[float | None, float | None, float | None, str | None]:
        """Per call and averaged over ranks: bytes sent, us in the codec, us waiting; and why nothing was compressed."""
        if before is None or after is None:
            return contender.wire_bytes(problem), None, None, None
        calls = after.calls - before.calls
        reasons = [
            reason
            for reason, exact in after.exact.items()
            if reason not in before.exact or exact.calls > before.exact[reason].calls
        ]
        total = torch.tensor(
            [
                after.wire_bytes - before.wire_bytes,
                after.codec_seconds - before.codec_seconds,
                after.transfer_seconds - before.transfer_seconds,
            ],
            dtype=torch.float64,
        )
        dist.all_reduce(total)
        if calls == 0:
            return None, None, None, ", ".join(reasons) or None
        wire, codec, transfer = (total / self.size / calls).tolist()
        if self.device.type == "cuda":
            return wire, self._codec_seconds(contender, problem) * 1e6, None, None
        return wire, codec * 1e6, transfer * 1e6, None

    def _hops(
        self, before: CollectiveStats | None, after: CollectiveStats | None
    ) -> list[dict[str, float | None]] | None:
        """Per call and averaged over ranks, of each hop; None: nothing was compressed."""
        if before is None or after is None or after.calls == before.calls:
            return None
        found = torch.zeros(MOST_HOPS, len(HOP_FIELDS), dtype=torch.float64)
        # Strict: Spec demands a warm-up call, which has made every hop in which this rank sends.
        for row, now, then in zip(found[: len(after.hops)], after.hops, before.hops, strict=True):
            row.copy_(torch.tensor([getattr(now, name) - getattr(then, name) for name in HOP_FIELDS]))
        dist.all_reduce(found)
        found = found[found[:, :2].sum(dim=1) > 0]
        on_host = self.device.type != "cuda"
        return [
            {"intra_node_bytes": intra, "inter_node_bytes": inter, "wait_us": wait * 1e6 if on_host else None}
            for intra, inter, wait in (found / self.size / (after.calls - before.calls)).tolist()
        ]

    def _codec_seconds(self, contender: Contender, problem: Problem) -> float:
        """Of one call on a GPU: measured by rank 0, with nothing else on it."""
        ranks_per_node = parse_nodes(self.spec.nodes)[1]
        self._barrier()
        found = [0.0]
        if self.rank == 0:
            found = [gpu_clock.codec_seconds(problem, contender.format, self.size, ranks_per_node)]
        dist.broadcast_object_list(found, 0)
        return found[0]

    def _check(self, problem: Problem) -> list[tuple[float | None, float | None]]:
        """Largest and mean error of every contender over all ranks, relative to the result's root mean square."""
        reference = self._reference(problem)
        square = torch.stack([part.double().square().sum() for part in _pieces(reference)]).sum()
        scale = math.sqrt(square.item() / reference.numel()) or 1.0
        errors: list[tuple[float | None, float | None]] = []
        for contender in self.contenders:
            problem.whole.zero_()  # what the one before has left would pass
            problem.shard.zero_()
            self._fill(problem)
            self._barrier()
            contender.call(problem)
            self._finish()
            result = problem.shard if problem.collective in ("reduce_scatter", "all_to_all") else problem.whole
            largest = total = 0.0
            for part, exact in zip(_pieces(result), _pieces(reference), strict=True):
                difference = (part.double() - exact.double()).abs()
                found = difference.max().item()
                largest = found if math.isnan(found) or found > largest else largest
                total += difference.sum().item()
            worst = torch.tensor([math.isnan(largest), largest / scale], dtype=torch.float64).nan_to_num(0.0)
            mean = torch.tensor([total / reference.numel() / scale], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            dist.all_reduce(mean)
            is_nan, value = worst.tolist()  # apart, as Gloo's maximum loses a NaN
            errors.append((math.nan if is_nan else value, mean.item() / self.size))
        return errors

    def _reference(self, problem: Problem) -> torch.Tensor:
        """The exact result on this rank: moved values as they are, sums in float64."""
        ranks = range(self.size)
        if problem.collective == "all_gather":
            return torch.cat([self._input(rank, rank, problem) for rank in ranks])
        if problem.collective == "all_to_all":
            return torch.cat([self._input(rank, self.rank, problem) for rank in ranks])
        if problem.collective == "broadcast":
            return torch.cat([self._input(0, slot, problem) for slot in ranks])

        def reduced(slot: int) -> torch.Tensor:
            total = self._input(0, slot, problem).double()
            for rank in range(1, self.size):
                total += self._input(rank, slot, problem)
            return total / self.size if problem.op == "avg" else total

        slots = [self.rank] if problem.collective == "reduce_scatter" else range(self.size)
        return torch.cat([reduced(slot) for slot in slots])


def _median_step(marks: Sequence[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(marks))


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # On a GPU every piece costs a wait for it, and there is more memory.
    elements = CHECK_ELEMENTS if tensor.device.type == "cpu" else 64 * CHECK_ELEMENTS
    return torch.split(tensor, elements)  # type: ignore[no-any-return, no-untyped-call]


def overhead(batch: int) -> list[dict[str, Any]]:
    """Microseconds per call of one element in a group of one rank, where calls do nothing but be passed on.

    It is the calling thread's processor time, of the fastest batch: how gloo's thread is woken, and on which core,
    is the machine's affair and varies by more than what is measured here.
    """
    groups: dict[str, Any] = {"gloo": dist.new_group(backend="gloo"), "zcomm": dist.new_group(backend="zcomm")}
    one, other = torch.ones(1), torch.ones(1)
    calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda group: dist.all_reduce(one, group=group),
        "all_gather": lambda group: all_gather_single(other, one, group=group),
        "reduce_scatter": lambda group: reduce_scatter_single(other, one, group=group),
        "broadcast": lambda group: dist.broadcast(one, 0, group=group),
        "barrier": lambda group: dist.barrier(group=group),
    }
    results = []
    for name, call in calls.items():
        samples: dict[str, list[float]] = {backend: [] for backend in groups}
        for number in range(1 + OVERHEAD_BATCHES):
            for backend, group in groups.items():
                start = time.thread_time()
                for _ in range(batch):
                    call(group)
                if number:  # the first warms up
                    samples[backend].append((time.thread_time() - start) / batch * 1e6)
        gloo_us, zcomm_us = min(samples["gloo"]), min(samples["zcomm"])
        results.append({"call": name, "gloo_us": gloo_us, "zcomm_us": zcomm_us, "added_us": zcomm_us - gloo_us})
    return results


def main() -> None:
    """Run ACTION, "collective" or "overhead", with its JSON object."""
    action, text = sys.argv[1:]
    dist.init_process_group("gloo", timeout=TIMEOUT)

    def report(rows: list[dict[str, Any]]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(rows), flush=True)

    if action == "overhead":
        report(overhead(**json.loads(text)))
    else:
        spec = Spec(**json.loads(text))
        device = torch.device("cpu")
        if spec.device == "cuda":
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
            device = torch.device("cuda", gpus.place(dist.get_rank(), dist.get_world_size(), interface))
        bench = Bench(spec, device)
        for elements in spec.shards:
            report(bench.measure(elements))
    dist.barrier()
    dist.destroy_process_group()
    # Not through the interpreter's end: there threads of torch's own abort about one of fifty, with gloo alone, too.
    os._exit(0)


if __name__ == "__main__":
    main()
