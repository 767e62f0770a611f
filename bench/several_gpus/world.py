"""The ranks of a stage, one on each GPU: how they start, what they share, and what they tell."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from bench.one_gpu import IS_REHEARSAL, stage
from zcomm_bench.lab import gpus, network

REHEARSED_RANKS = 4
MOST_RANKS = 8


def num_ranks() -> int:
    """Return the number of ranks, which is even: they make up two nodes, too."""
    return min(stage.pick(torch.cuda.device_count(), REHEARSED_RANKS), MOST_RANKS) // 2 * 2


def layouts() -> dict[str, int]:
    """Return the ranks of a node by layout: all ranks are in one node, or in two that the option makes."""
    return {f"{nodes}x{num_ranks() // nodes}": num_ranks() // nodes for nodes in (1, 2)}


def rows(name: str, *arguments: str, seconds: float, env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows that rank 0 of a stage prints, also where ranks fail. Raises network.RankFailed, and TimeoutError
    where ranks are not done in time."""
    found: list[dict[str, Any]] = []

    def take(line: str) -> None:
        if line.startswith("{"):
            found.append(json.loads(line))
        else:
            print(line, flush=True)

    argv = [sys.executable, "-m", f"bench.several_gpus.{name}", *arguments]
    try:
        network.launch(argv, nodes=f"1x{num_ranks()}", env=env, on_line=take, timeout=seconds, isolate=False)
    except BaseException:
        yield from found
        raise
    yield from found


def say(**row: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)


def run(body: Callable[[], None]) -> None:
    """Run the body as this rank, on its GPU, and end the process. Gloo carries what ranks tell each other."""
    torch.set_num_threads(1)
    if not IS_REHEARSAL:
        gpus.place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    body()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the ranks of zcomm_bench.worker do, and why


def compressed_group(ranks_per_node: int, ranks: Sequence[int] | None = None, **fields: Any) -> Any:
    """Make a group of zcomm whose calls are compressed, or raise."""
    given = {"min_bytes": 1, "forms": "single,in_place", "strict": True, **fields}
    return dist.new_group(ranks, backend="zcomm", pg_options=zcomm.Options(node_size=ranks_per_node, **given))


def exact_group(ranks: Sequence[int] | None = None) -> Any:
    """Make a group of torch's own backend, which takes host memory in a rehearsal."""
    return dist.new_group(ranks, backend=stage.pick("nccl", "gloo"))


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as calls of zcomm get it: in a rehearsal the stand-in has its memory."""
    if not IS_REHEARSAL:
        return tensor
    import cuda_host_torch

    made: torch.Tensor = cuda_host_torch.as_cuda(tensor)
    return made


def slowest(figures: torch.Tensor) -> torch.Tensor:
    """Return the largest of all ranks' figures, each by itself."""
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return figures
