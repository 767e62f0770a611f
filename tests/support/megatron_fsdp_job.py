"""A small model of Megatron-FSDP's, on CPU tensors: test_megatron.py launches it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support import cuda_is_cpu

cuda_is_cpu.enter()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron_fsdp import fully_shard  # noqa: E402

import zcomm  # noqa: E402

STEPS, WIDTH, VOCABULARY = 6, 128, 512


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(self.norm(values))))


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    dist.init_process_group(given["backend"])
    if given["backend"] == "zcomm":
        zcomm.megatron.install()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model: Any = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), *blocks, torch.nn.Linear(WIDTH, VOCABULARY))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = 1 if given["outer"] is None else 2
    names = ("outer", "dp", "tp")
    mesh = dist.init_device_mesh("cpu", (outer, dist.get_world_size() // outer, 1), mesh_dim_names=names)
    hybrid = {}
    if outer > 1:
        whole = mesh["outer", "dp"]._flatten("both").get_group()
        hybrid = {"dp_outer_dim": "outer", "outer_dp_sharding_strategy": given["outer"]}
        hybrid |= {"hybrid_fsdp_group": whole, "hybrid_fsdp_expt_group": whole}
    model, optimizer = fully_shard(
        module=model, optimizer=optimizer, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp", expt_device_mesh=mesh,
        fsdp_unit_modules=[Block], average_in_collective=True, zero_dp_strategy=given["strategy"],
        device=torch.device("cpu"), **hybrid,
    )  # fmt: skip
    tokens = torch.randint(0, VOCABULARY, (8, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        is_ours = given["backend"] == "zcomm"
        counters = {name: asdict(zcomm.stats(mesh[name].get_group())) for name in ("dp", "outer")} if is_ours else {}
        Path(given["out"]).write_text(json.dumps({"losses": losses, "counters": counters}))
    dist.barrier()
    dist.destroy_process_group()


main(json.loads(sys.argv[1]))
