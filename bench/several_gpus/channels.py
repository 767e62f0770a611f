"""What NCCL says of the channels of zcomm's groups, and the GPU memory that their first compressed calls take.

Ranks are in one node, in two nodes by zcomm's option, and in two hosts by NCCL's own variable: there sockets carry what
crosses. `communicator` rows have what NCCL prints. Rows of a call have the memory that its first one takes on top of
what was there, on the rank that needs most, and the part of torch's allocator.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.one_gpu import stage
from bench.several_gpus import world
from zcomm_bench.contenders import Contender, Problem
from zcomm_bench.lab import gpus

SHARD = stage.pick(1 << 24, 1 << 10)  # elements
SECONDS = stage.pick(60.0, 100.0)  # of a layout
CHANNELS = ("coll", "collnet", "nvls", "p2p", "p2p_per_peer")
COLUMNS = ("layout", "what", "ranks", "nodes", *CHANNELS, "taken_mib", "torch_mib")
COUNT = re.compile(r"(\d+) (\w+) channels( per peer)?")
RANKS = re.compile(r"nRanks (\d+) nNodes (\d+)")


def counts(line: str) -> dict[str, int]:
    """Return the number of channels of each kind in a line of NCCL's log. Old releases have fewer kinds."""
    if "NCCL INFO" not in line:
        return {}
    found = {kind + "_per_peer" * bool(of_peer): int(number) for number, kind, of_peer in COUNT.findall(line)}
    return found if "coll" in found else {}


def said(folder: Path) -> list[dict[str, int]]:
    """Return the kinds of communicators in all ranks' logs: ranks and nodes, where NCCL says them, and channels."""
    found = set()
    for path in folder.iterdir():
        sizes: dict[str, dict[str, int]] = {}  # by the thread that prints, which makes one communicator at a time
        for line in path.read_text(errors="replace").splitlines():
            thread = line.partition("NCCL INFO")[0]
            if size := RANKS.search(line):
                sizes[thread] = dict(zip(("ranks", "nodes"), map(int, size.groups()), strict=True))
            if channels := counts(line):
                found.add(tuple({**sizes.get(thread, {}), **channels}.items()))
    return [dict(each) for each in sorted(found)]


def taken(call: Callable[[], object]) -> list[float]:
    """Return the MiB of this GPU that a call takes, and the part that torch's allocator has."""

    def used() -> tuple[int, int]:
        torch.cuda.synchronize()
        return -torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()

    before = used()
    call()
    return [(after - earlier) / 2**20 for after, earlier in zip(used(), before, strict=True)]


def measure(layout: str, ranks_per_node: int, is_of_hosts: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if is_of_hosts:
        os.environ.update(gpus.nccl_environment(rank // ranks_per_node))
    zcomm = Contender("zcomm", world.compressed_group(ranks_per_node))
    for collective, dtype in (("all_gather", torch.bfloat16), ("reduce_scatter", torch.float32)):
        whole = torch.zeros(SHARD * size, dtype=dtype, device="cuda")
        own = whole[rank * SHARD :][:SHARD]
        shard = own if collective == "all_gather" else own.clone()
        problem = Problem(collective, "sum", world.on_gpu(whole), world.on_gpu(shard))
        mib = torch.tensor(taken(lambda problem=problem: zcomm.call(problem)))
        of_gpu, of_torch = world.slowest(mib).tolist()
        world.say(layout=layout, what=collective, taken_mib=of_gpu, torch_mib=of_torch)


def rows() -> Iterator[dict[str, Any]]:
    blank = dict.fromkeys(COLUMNS)
    every = [(name, ranks, False) for name, ranks in world.layouts().items()]
    for name, ranks, is_of_hosts in (*every, (f"{every[-1][0]} hosts", every[-1][1], True)):
        with tempfile.TemporaryDirectory() as folder:
            log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
            arguments = (name, str(ranks), "hosts" * is_of_hosts)
            for row in world.rows("channels", *arguments, seconds=SECONDS, env=log):
                yield {**blank, **row}
            for path in sorted(Path(folder).iterdir())[:1]:  # one rank's, for who wants to know more
                print(path.read_text(errors="replace"))
            for channels in said(Path(folder)):
                yield {**blank, "layout": name, "what": "communicator", **channels}


if __name__ == "__main__":
    if "RANK" in os.environ:
        layout, ranks_per_node, hosts = sys.argv[1:]
        world.run(lambda: measure(layout, int(ranks_per_node), bool(hosts)))
    stage.keep(stage.output(__doc__), "channels", COLUMNS, rows(), gpus=world.num_ranks())
