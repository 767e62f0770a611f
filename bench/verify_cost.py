"""What ``verify`` costs: how many times as long calls take with checksums as without.

python bench/verify_cost.py                two ranks on this machine: over loopback, then through shared memory
python -m zcomm_bench lab ranks --nodes 2x1 --rate 1gbit -- .venv/bin/python bench/verify_cost.py --worker

Two groups of the same ranks take turns. A figure is the median of the turns' ratios; times are medians, too.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

import results_file
import zcomm

TURNS, WARM = 24, 4


def measure(node_size: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for these calls
    fields = {"all_reduce": "int8:128/int4:128", "forms": "single,out_of_place", "node_size": node_size}
    dist.init_process_group("zcomm", pg_options=zcomm.Options(**fields))
    groups = [dist.new_group(pg_options=zcomm.Options(**fields, verify=verify)) for verify in (False, True)]
    for mib in (1, 16, 64):
        whole, shard = torch.randn(mib << 18), torch.empty((mib << 18) // dist.get_world_size())
        gathered = torch.empty_like(whole)
        calls: dict[str, Callable[[dist.ProcessGroup], object]] = {
            "all_reduce": lambda group, whole=whole: dist.all_reduce(whole, group=group),
            "reduce_scatter": lambda group, out=shard, whole=whole: dist.reduce_scatter_tensor(out, whole, group=group),
            "all_gather": lambda group, out=gathered, own=shard: dist.all_gather_into_tensor(out, own, group=group),
        }
        for name, call in calls.items():
            seconds: list[list[float]] = [[], []]
            for turn in range(TURNS):
                for which in (0, 1) if turn % 2 else (1, 0):
                    dist.barrier()
                    started = time.perf_counter()
                    call(groups[which])
                    seconds[which].append(time.perf_counter() - started)
            usual, checked = (times[WARM:] for times in seconds)
            ratio = statistics.median(b / a for a, b in zip(usual, checked, strict=True))
            if dist.get_rank() == 0:
                print(f"{name} float32, {mib} MiB: {1e3 * statistics.median(usual):.2f} ms, {ratio:.2f} times as long")
    dist.destroy_process_group()


def main(
    worker: Annotated[bool, typer.Option("--worker", help="be a rank of the environment's job")] = False,
    node_size: int = 1,
) -> None:
    if worker:
        measure(node_size)
        return
    for node, where in ((1, "over loopback"), (2, "through shared memory")):
        print(f"{where}, two ranks on {os.cpu_count()} processors, {results_file.own_isa()}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", folder]
            subprocess.run([*launch, str(Path(__file__)), "--worker", "--node-size", str(node)], check=True)


if __name__ == "__main__":
    typer.run(main)
