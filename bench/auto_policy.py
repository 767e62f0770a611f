"""Whether compress="auto" chooses the faster of exact and compressed calls.

python bench/auto_policy.py                        2 nodes of 2 ranks on this machine, over loopback
python bench/auto_policy.py --rate 100mbit         the nodes behind links of 100 Mbit/s, in network namespaces

Three groups of the same ranks take turns: one is exact, one compresses, one decides by compress="auto". The times are
medians over calls, each the time of the slowest rank. The column "ratio" is the time of the faster of the first two
groups, divided by the time of the third: 1 is the best possible value.
"""

import itertools
import json
import os
import statistics
import sys
import time
import warnings
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import zcomm
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm_bench.lab import network
from zcomm_bench.spec import parse_size

WAYS = {
    "exact": {"all_gather": "exact", "reduce_scatter": "exact"},
    "compressed": {},
    "auto": {"compress": "auto"},
}
CALLS = {"all_gather": torch.bfloat16, "reduce_scatter": torch.float32}
SECONDS = 2.0  # of the calls of one size, at least
LEAST_TURNS = 5
MOST_TURNS = 200


def measure(collective: str, num_bytes: int, groups: dict[str, Any]) -> dict[str, Any]:
    """A row of the table, the same on all ranks."""
    dtype, ranks = CALLS[collective], dist.get_world_size()
    whole = torch.randn(num_bytes // dtype.itemsize).to(dtype)
    shard = whole.view(ranks, -1)[dist.get_rank()]
    output = torch.zeros_like(shard)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    total = 0.0
    for turn in itertools.count():
        for way, group in groups.items():
            dist.barrier(group)
            started = time.perf_counter()
            if collective == "all_gather":
                all_gather_single(whole, shard, group=group)
            else:
                reduce_scatter_single(output, whole, group=group)
            taken = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if turn >= 2:  # the first call decides, the second one is warm
                times[way].append(taken.item())
                total += taken.item()
        if (total > SECONDS and turn >= 1 + LEAST_TURNS) or turn > MOST_TURNS:
            break
    medians = {way: statistics.median(each) for way, each in times.items()}
    decision = zcomm.stats(groups["auto"]).decisions[-1]
    return {
        "call": collective,
        "bytes": num_bytes,
        **medians,
        "compressed_it": decision.compressed,
        "in_one_hop": decision.compressed and decision.one_hop,
        "ratio": min(medians["exact"], medians["compressed"]) / medians["auto"],
    }


def measure_rank(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for these calls
    dist.init_process_group("zcomm")
    groups = {
        way: dist.new_group(pg_options=zcomm.Options(min_bytes=1, forms="single,in_place", **fields))
        for way, fields in WAYS.items()
    }
    for collective in CALLS:
        for num_bytes in sizes:
            row = measure(collective, num_bytes, groups)
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main(
    sizes: Annotated[str, typer.Option(help="of the gathered or scattered tensor")] = "1K,16K,64K,256K,1M,4M,16M",
    nodes: Annotated[str, typer.Option(help="NODESxRANKS")] = "2x2",
    rate: Annotated[str | None, typer.Option(help="of a node's link, such as 100mbit; default: no limit")] = None,
    launches: Annotated[int, typer.Option(help="of all ranks; rows are the launches' medians")] = 3,
) -> None:
    if "RANK" in os.environ:
        measure_rank([parse_size(size) for size in sizes.split(",")])
        return
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def take(line: str) -> None:
        row = json.loads(line)
        rows.setdefault((row["call"], row["bytes"]), []).append(row)

    for _ in range(launches):
        launched = network.launch([sys.executable, __file__, "--sizes", sizes], nodes=nodes, rate=rate, on_line=take)
    isa = os.environ.get("ZCOMM_ISA", zcomm.codec.cpu_isas()[-1])
    table = Table(title=f"{nodes}, {rate or 'no limit'}, {isa} {launched.note}")
    for name in ("call", "bytes", "exact ms", "compressed ms", "auto ms", "compressed in", "one hop in", "ratio"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for (call, num_bytes), found in rows.items():
        cells = [f"{statistics.median(row[way] for row in found) * 1e3:.3g}" for way in WAYS]
        chosen = f"{sum(row['compressed_it'] for row in found)} of {len(found)}"
        one_hop = str(sum(row["in_one_hop"] for row in found))
        table.add_row(
            call, str(num_bytes), *cells, chosen, one_hop, f"{statistics.median(row['ratio'] for row in found):.2f}"
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
