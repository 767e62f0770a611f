"""What a call costs beside its bytes: processor time of the thread that calls, for small tensors.

python bench/call_overhead.py                   two ranks on this machine, 64 KiB, with zcomm and with Gloo
python bench/call_overhead.py --bytes 256K     of another size

Groups of the same ranks take turns. Times are medians of synchronous calls of one thread, so they hold on a machine
that does other things as well. A compressed call encodes and decodes in them: the codec alone is in the last column.
"""

import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import zcomm
import zcomm.codec as codec
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm_bench.spec import parse_size

RANKS = 2
FORMAT = "int8:256"


def codec_microseconds(whole: torch.Tensor, name: str) -> float:
    """Return what the call's own encoding and decoding takes."""
    shard = whole[: len(whole) // RANKS].clone()
    wire = codec.encode(shard, FORMAT)
    times = []
    for _ in range(200):
        started = time.thread_time()
        codec.encode(shard, FORMAT, out=wire)
        if name == "reduce_scatter":
            codec.decode_sum([(wire, FORMAT, 1.0), (shard, "exact")], shard)
        else:
            codec.decode(wire, FORMAT, out=shard)
        times.append(time.thread_time() - started)
    return statistics.median(times) * 1e6


def calls_of(whole: torch.Tensor, rank: int) -> dict[str, Callable[[dist.ProcessGroup], object]]:
    shard = whole.view(RANKS, -1)[rank]
    output = torch.zeros_like(shard)
    return {
        "all_gather": lambda group: all_gather_single(whole, shard, group=group),
        "reduce_scatter": lambda group: reduce_scatter_single(output, whole, group=group),
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, 0, group=group),
    }


def measure_rank(rank: int, folder: str, num_bytes: int, repeats: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for these calls
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    options = zcomm.Options(forms="single,in_place", all_reduce=FORMAT, exchanges=FORMAT, min_bytes=1)
    groups = [dist.new_group(backend="zcomm", pg_options=options), dist.new_group(backend="gloo")]
    rows = []
    for name, call in calls_of(torch.randn(num_bytes // 4), rank).items():
        seconds: list[list[float]] = [[], []]
        for _ in range(repeats + 10):
            for group, times in zip(groups, seconds, strict=True):
                dist.barrier(group)
                started = time.thread_time()
                call(group)
                times.append(time.thread_time() - started)
        ours, gloo = (1e6 * statistics.median(times[10:]) for times in seconds)
        in_codec = codec_microseconds(torch.randn(num_bytes // 4), name)
        rows.append({"call": name, "bytes": num_bytes, "zcomm_us": ours, "gloo_us": gloo, "codec_us": in_codec})
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main(
    num_bytes: Annotated[str, typer.Option("--bytes", help="Of the whole tensor.")] = "64K", repeats: int = 2000
) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure_rank, args=(rank, folder, parse_size(num_bytes), repeats))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        rows = json.loads(Path(folder, "rows").read_text())
    table = Table("call", "bytes", "zcomm, us of CPU", "Gloo, us of CPU", f"{FORMAT} alone, us", title="Cost of a call")
    for row in rows:
        table.add_row(row["call"], str(row["bytes"]), *(f"{row[name]:.1f}" for name in list(row)[2:]))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
