"""All-gathers and reduce-scatters by size, number of chunks and NCCL's bound of CTAs, alone and beside matrix products.

torch's own NCCL makes the exact calls. NCCL_MAX_CTAS holds for exact and compressed calls of a process. Without it,
NCCL chooses for exact calls, and zcomm has its own bound. `chunks` is the number that chunk_bytes asks for; null is
zcomm's choice, the least. Gathers are of bfloat16, reductions of float32. `slowed_ms` is the time that the products
lose. Times are of the slowest rank, medians of rounds in turn. Ratios compare calls of one round, and are medians.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.one_gpu import beside_gemm, stage
from bench.several_gpus import world
from zcomm_bench.contenders import Contender, Problem

DTYPES = {"all_gather": torch.bfloat16, "reduce_scatter": torch.float32}
SIZES = stage.pick((1 << 24, 1 << 26, 1 << 28, 1 << 30), (1 << 16,))  # bytes over all ranks
CHUNKS = stage.pick((None, 4, 16), (None, 2))
MAX_CTAS = stage.pick(("", "8", "16", "32"), ("8",))  # "" is first: it is worth most if time runs out
ROUNDS = stage.pick(5, 2)
SECONDS = 150.0  # of a launch
COLUMNS = (
    *("max_ctas", "collective", "bytes", "layout", "chunks", "alone_ms", "beside_ms", "slowed_ms"),
    *("alone_ratio", "beside_ratio"),
)

Call = Callable[[], object]
Key = tuple[str, int | None]  # layout and chunks


def problem(collective: str, num_bytes: int) -> Problem:
    """Make the tensors of a call, a gather's in place."""
    dtype, rank, size = DTYPES[collective], dist.get_rank(), dist.get_world_size()
    num = num_bytes // size // dtype.itemsize
    whole = torch.empty(num * size, dtype=dtype, device="cuda").normal_()
    own = whole[rank * num :][:num]
    return Problem(collective, "avg", whole, own if collective == "all_gather" else own.clone())


def seconds(other: Any, product: Call, num_products: int, side: Call, num_sides: int) -> tuple[float, float]:
    """Measure as beside_gemm.seconds does, on all ranks at once."""
    dist.barrier()
    return beside_gemm.seconds(other, product, num_products, side, num_sides)


def samples(calls: list[Call], product: Call) -> list[list[list[float]]]:
    """Return, for each round and call, seconds alone, beside products, and by which these got longer."""
    other = torch.cuda.Stream(priority=-1)
    for call in calls:
        seconds(other, product, 2, call, 1)
    of_one = seconds(other, product, 10, calls[0], 0)[0] / 10
    longest = max(seconds(other, product, 0, call, 1)[1] for call in calls)
    num = int(world.slowest(torch.tensor(longest / of_one))) + 10
    found = torch.zeros(ROUNDS, len(calls), 3, dtype=torch.float64)
    for turn in range(ROUNDS):
        free = seconds(other, product, num, calls[0], 0)[0]
        for place in range(len(calls)):
            index = (turn + place) % len(calls)  # nobody always follows the same one
            alone = seconds(other, product, 0, calls[index], 1)[1]
            slowed, beside = seconds(other, product, num, calls[index], 1)
            found[turn, index] = torch.tensor([alone, beside, slowed - free])
    rounds: list[list[list[float]]] = world.slowest(found).tolist()
    return rounds


def compare(collective: str, num_bytes: int, product: Call, exact: Contender) -> None:
    """Say a row for each way to make the call. The groups of zcomm are there as long."""
    shared = problem(collective, num_bytes)
    of_zcomm = Problem(collective, "avg", world.on_gpu(shared.whole), world.on_gpu(shared.shard))
    calls: dict[Key, Call] = {("exact", None): partial(exact.call, shared)}
    compressed = []
    for layout, ranks_per_node in world.layouts().items():
        for chunks in CHUNKS:
            fields = {} if chunks is None else {"chunk_bytes": shared.shard.nbytes // chunks}
            compressed.append(Contender("zcomm", world.compressed_group(ranks_per_node, **fields)))
            calls[layout, chunks] = partial(compressed[-1].call, of_zcomm)
    rounds = samples([*calls.values()], product)
    for one in compressed:
        dist.destroy_process_group(one.group)
    for index, (layout, chunks) in enumerate(calls):
        alone, beside, slowed = (statistics.median(times[index][i] for times in rounds) for i in range(3))
        ratios = [statistics.median(times[index][i] / times[0][i] for times in rounds) for i in range(2)]
        world.say(
            **{"max_ctas": os.environ.get("NCCL_MAX_CTAS"), "collective": collective, "bytes": num_bytes},
            **{"layout": layout, "chunks": chunks, "alone_ms": alone * 1e3, "beside_ms": beside * 1e3},
            **{"slowed_ms": slowed * 1e3, "alone_ratio": ratios[0], "beside_ratio": ratios[1]},
        )


def measure() -> None:
    size = beside_gemm.SIZE
    a, b, c = (torch.empty(size, size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))
    exact = Contender("exact", world.exact_group())
    for num_bytes in SIZES:
        for collective in DTYPES:
            compare(collective, num_bytes, lambda: torch.matmul(a, b, out=c), exact)


def rows() -> Iterator[dict[str, Any]]:
    for max_ctas in MAX_CTAS:
        yield from world.rows("sizes", seconds=SECONDS, env={"NCCL_MAX_CTAS": max_ctas} if max_ctas else None)


if __name__ == "__main__":
    if "RANK" in os.environ:
        world.run(measure)
    stage.keep(stage.output(__doc__), "sizes", COLUMNS, rows(), gpus=world.num_ranks())
