"""Training steps of FSDP2 by layout: over torch's own NCCL, and with zcomm.fsdp.compress.

Copies of a GPT train in turn. With "FSDP2", all ranks share the weights, and the layout is zcomm's option. With "HSDP",
there are two replicas. There zcomm gathers weights exactly, over torch's communicator, and reduces gradients over its
own, between replicas as well: ranks that launch the two in different orders would wait for each other, and a limit of
time ends them. A turn has several steps, without a meeting of the ranks. Times are of the slowest rank, medians; a
ratio is to torch's own in the same turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from bench.convergence.model import GPT
from bench.one_gpu import stage
from bench.several_gpus import world
from zcomm_bench.lab import gpus

DEVICE = stage.pick("cuda", "cpu")  # as groups and meshes name it
LARGE_MEMORY = 60e9  # bytes, of a GPU that takes the wide model
LAYERS, SEQUENCE, BATCH = stage.pick((4, 4096, 1), (1, 32, 1))
TURNS, STEPS, WARMUP_TURNS = stage.pick((9, 4, 1), (2, 2, 1))
SECONDS = 140.0  # of a kind: a deadlock ends here
COLUMNS = ("kind", "way", "layout", "parameters", "step_ms", "ratio", "loss")
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def width() -> int:
    """Return the model's width: 4096 as in models of 7 B parameters, or 2048 on a small GPU."""
    return stage.pick(4096 if gpus.facts()["gpu_memory_bytes"] > LARGE_MEMORY else 2048, 64)


class Copy:
    """Model that trains in a mesh. All copies begin with the same weights."""

    def __init__(self, mesh: DeviceMesh, **compression: Any) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = GPT(width(), LAYERS, SEQUENCE, stage.pick(torch.bfloat16, None))
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for part in (*self.model.blocks, self.model):
            fully_shard(part, mesh=mesh, mp_policy=POLICY)
        if compression:
            zcomm.fsdp.compress(self.model, **compression)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.loss = 0.0

    def turn(self, text: torch.Tensor) -> float:
        """Return the seconds of a step on the rank that takes longest."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = self.model(text)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        torch.cuda.synchronize()
        taken = torch.tensor((time.perf_counter() - start) / STEPS, dtype=torch.float64)
        self.loss = loss.item()
        return world.slowest(taken).item()


def fsdp2() -> dict[tuple[str, str], Copy]:
    names = [*world.layouts()]
    copies = {("torch", names[0]): Copy(DeviceMesh.from_group(world.exact_group(), DEVICE))}
    for layout, ranks_per_node in world.layouts().items():
        mesh = DeviceMesh.from_group(world.compressed_group(ranks_per_node), DEVICE)
        copies["zcomm", layout] = Copy(mesh, weights="int8:256", gradients="int8:128/int4:128")
    return copies


def hsdp() -> dict[tuple[str, str], Copy]:
    layout, ranks_per_node = [*world.layouts().items()][-1]
    ranks = torch.arange(world.num_ranks()).view(-1, ranks_per_node)

    def mesh(make: Any) -> DeviceMesh:
        """Make the mesh of this rank's groups: across replicas, and within one."""
        sides = [[make(one) for one in side] for side in (ranks.T.tolist(), ranks.tolist())]
        node, place = divmod(dist.get_rank(), ranks_per_node)
        return DeviceMesh.from_group(
            [sides[0][place], sides[1][node]], DEVICE, mesh=ranks, mesh_dim_names=("replicas", "shards")
        )

    def compressed(ranks: list[int]) -> Any:
        return world.compressed_group(ranks_per_node, ranks, all_reduce="int8:128/int4:128")

    exact = Copy(mesh(world.exact_group))
    return {("torch", layout): exact, ("zcomm", layout): Copy(mesh(compressed), weights="exact")}


KINDS = {"FSDP2": fsdp2, "HSDP": hsdp}


def measure(kind: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for some calls
    copies = KINDS[kind]()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in copies}
    for number in range(-WARMUP_TURNS, TURNS):
        seed = torch.Generator().manual_seed(1000 * number + dist.get_rank() + (1 << 20))
        text = torch.randint(256, (BATCH, SEQUENCE + 1), generator=seed).to(DEVICE)
        for key, copy in copies.items():
            taken = copy.turn(text)
            if number >= 0:
                seconds[key].append(taken)
    first = next(iter(seconds.values()))
    for (way, layout), own in seconds.items():
        copy = copies[way, layout]
        ratio = statistics.median(this / exact for this, exact in zip(own, first, strict=True))
        figures = {"step_ms": statistics.median(own) * 1e3, "ratio": ratio, "loss": copy.loss}
        world.say(kind=kind, way=way, layout=layout, parameters=copy.num_parameters, **figures)


def rows() -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        if kind == "FSDP2" or world.num_ranks() >= 4:  # replicas of one rank shard nothing
            yield from world.rows("steps", kind, seconds=SECONDS)


if __name__ == "__main__":
    if "RANK" in os.environ:
        world.run(lambda: measure(sys.argv[1]))
    stage.keep(stage.output(__doc__), "steps", COLUMNS, rows(), gpus=world.num_ranks())
