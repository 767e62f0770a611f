"""What sampling for zcomm.report() costs, in percent of the calls that are sampled.

python bench/sampling_cost.py                          two ranks on this machine, over loopback
python bench/sampling_cost.py --out bench/results      keeps the rows

Two groups of the same ranks take turns, one that samples every call and one that samples none. Times are of the
processor, in the thread that calls, where a synchronous call encodes, decodes and samples: they hold on a machine that
does other things as well. What a sample costs is the difference of the medians; sampling every N calls costs an N-th of
it. The percentage is of the processor's time alone, not of the call with its transfers, so it is an upper bound.
"""

import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import results_file
import zcomm
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm_bench.spec import parse_size

EVERY = 100  # of the last column
RANKS = 2
CALLS = {
    "all_gather bfloat16": (all_gather_single, torch.bfloat16),
    "reduce_scatter float32": (reduce_scatter_single, torch.float32),
}


def measure_rank(rank: int, folder: str, sizes: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for these calls
    rows: list[dict[str, Any]] = []
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("zcomm", store=store, rank=rank, world_size=RANKS)
    fields = {"forms": "single,in_place"}
    groups = []
    for every in ("0", "1"):
        os.environ["ZCOMM_SAMPLE_ERRORS_EVERY"] = every
        groups.append(dist.new_group(pg_options=zcomm.Options(**fields)))
    for name, (call, dtype) in CALLS.items():
        for num_bytes in sizes:
            whole = torch.randn(num_bytes // dtype.itemsize).to(dtype)
            shard = whole.view(RANKS, -1)[rank]
            output = torch.zeros_like(shard)
            tensors = (whole, shard) if call is all_gather_single else (output, whole)
            seconds: list[list[float]] = [[], []]
            for repeat in range(repeats + 3):
                for group, times in zip(groups, seconds, strict=True):
                    dist.barrier(group)
                    started = time.thread_time()
                    call(*tensors, group=group)
                    if repeat >= 3:
                        times.append(time.thread_time() - started)
            off, on = (statistics.median(times) for times in seconds)
            rows.append(
                {
                    "call": name,
                    "bytes": num_bytes,
                    "call_cpu_us": off * 1e6,
                    "sample_cpu_us": (on - off) * 1e6,
                    "every": EVERY,
                    "cost_percent": 100 * (on - off) / off / EVERY,
                }
            )
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(
    sizes: Annotated[str, typer.Option(help="of the gathered or scattered tensor")] = "64K,256K,1M,4M",
    repeats: int = 300,
    out: Annotated[Path | None, typer.Option(help="a folder that keeps the rows")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        numbers = [parse_size(size) for size in sizes.split(",")]
        ranks = [
            multiprocessing.get_context("spawn").Process(target=measure_rank, args=(r, folder, numbers, repeats))
            for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        rows = json.loads(Path(folder, "rows").read_text())
    table = Table(
        title=f"zcomm.report(): {RANKS} ranks, {os.cpu_count()} x {platform.processor() or platform.machine()}"
    )
    for column in ("call", "bytes", "call, CPU us", "sample, CPU us", f"cost at every={EVERY}, %"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for row in rows:
        table.add_row(
            row["call"], f"{row['bytes']}", f"{row['call_cpu_us']:.0f}", f"{row['sample_cpu_us']:.0f}",
            f"{row['cost_percent']:.2f}",
        )  # fmt: skip
    Console().print(table)
    if out is not None:
        isa, columns = results_file.own_isa(), ("call", "bytes", "call_cpu_us", "sample_cpu_us")
        one = results_file.measured("sampling_cost", results_file.cpu_machine(isa), columns, rows, every=EVERY)
        results_file.keep(out / f"sampling_cost-{isa}.jsonl", [one])


if __name__ == "__main__":
    typer.run(main)
