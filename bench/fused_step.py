"""A training step of FSDP2 with and without its copies: time, torch's copies in it, and the most memory.

python -m zcomm_bench lab ranks --nodes 2x2 --rate 1gbit -- python bench/fused_step.py

The same ranks train a copy of the model in each way, a step of each in turn, with reductions in float32. torch's
profiler then looks at further steps. `lossless` behind the command: weights by lossless differences, in bfloat16.
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm

WAYS = {"copied": False, "fused": True}
TURNS, WARMUP_TURNS, PROFILED_TURNS = 15, 2, 3
WIDTH, LAYERS, ROWS = 1024, 6, 16
# FSDP2's copies into and out of its buffers. On ranks without the copies the names do not occur.
COPIES = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")


class Copy:
    """A model and its optimizer. All copies begin with the same weights."""

    def __init__(self, fused: bool, is_lossless: bool) -> None:
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        ]
        self._model = nn.Sequential(*layers)
        # Matrices are multiplied in float32, which CPUs without AVX-512 do fifty times as fast as in bfloat16.
        for layer in [*layers, self._model]:
            dtype = torch.bfloat16 if is_lossless else None
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        zcomm.fsdp.compress(self._model, weights="lossless" if is_lossless else None, fused=fused)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)

    def step(self, inputs: Tensor) -> None:
        self._model(inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def seconds_of(copy: Copy, inputs: Tensor) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    copy.step(inputs)
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def copying_and_memory(copy: Copy, inputs: Tensor) -> tuple[float, int]:
    """Seconds of FSDP2's copies in a step of this rank, and its most bytes beyond those at the begin."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    dist.barrier()
    with torch.profiler.profile(profile_memory=True, activities=activities) as profiler:
        for _ in range(PROFILED_TURNS):
            copy.step(inputs)
    copying = sum(row.cpu_time_total for row in profiler.key_averages() if row.key in COPIES) / PROFILED_TURNS
    held = most = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return copying / 1e6, most


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("zcomm")
    copies = {way: Copy(fused, sys.argv[1:] == ["lossless"]) for way, fused in WAYS.items()}
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(-WARMUP_TURNS, TURNS):
        for way in list(WAYS) if turn % 2 else list(reversed(WAYS)):
            seconds = seconds_of(copies[way], inputs)
            if turn >= 0:
                measured[way].append(seconds)
    profiled = {way: copying_and_memory(copy, inputs) for way, copy in copies.items()}
    if dist.get_rank() == 0:
        copied = statistics.median(measured["copied"])
        print(f"{'':8} {'ms a step':>10} {'of copied':>10} {'ms of copies':>13} {'MiB at most':>12}")
        for way, (copying, most) in profiled.items():
            seconds = statistics.median(measured[way])
            figures = f"{1e3 * seconds:10.1f} {seconds / copied:10.3f} {1e3 * copying:13.1f} {most / 2**20:12.1f}"
            print(f"{way:8} {figures}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
