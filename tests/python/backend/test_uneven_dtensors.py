"""DTensors whose shards are uneven, or nested in one dimension: redistributed as over gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.calls import OPT_INS
from support.expected import HALF_STEP
from support.worlds import options, run
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

COLUMNS = 67
NESTED: list[list[Placement]] = [[Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Replicate()]]
TO: list[list[Placement]] = [[Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(1), Shard(1)], *NESTED]


def values(rows: int) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))


def worst_error() -> float:
    """The largest difference, over all redistributions, from the whole tensor."""
    mesh: Any = dist.init_device_mesh("cpu", (2, 2))
    flat: Any = dist.init_device_mesh("cpu", (4,))
    errors = [0.0]
    for rows in (1, 3, 5, 7, 9):
        whole = values(rows)
        for placements in NESTED:
            sharded = distribute_tensor(whole, mesh, placements)
            for to in TO:
                errors.append(float((sharded.redistribute(mesh, to).full_tensor() - whole).abs().max()))
        summed = DTensor.from_local(whole * dist.get_rank(), mesh, [Partial(), Partial()], run_check=False)
        for to in TO[:3]:
            errors.append(float((summed.redistribute(mesh, to).full_tensor() / 6 - whole).abs().max()))
    for sizes in ([2, 2, 2, 1], [2, 2, 1, 0], [1, 0, 0, 0]):
        own, whole = sum(sizes[: dist.get_rank()]), values(sum(sizes))
        local = whole[own : own + sizes[dist.get_rank()]]
        given = DTensor.from_local(local, flat, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        errors.append(float((given.full_tensor() - whole).abs().max()))
        errors.append(float((given.redistribute(flat, [Shard(1)]).full_tensor() - whole).abs().max()))
    return max(errors)


def test_uneven_and_nested_shards() -> None:
    """Exact under the defaults, but for the order of sums. Compressed: half a step of 8 bits for each of four hops."""
    largest = max(float(values(rows).abs().max()) for rows in range(1, 10))
    exact = run(worst_error, 4, nodes=[0, 0, 1, 1])
    assert max(exact) < 1e-6
    compressed = options(**OPT_INS, reduce_scatter="int8:128")
    errors = run(worst_error, 4, nodes=[0, 0, 1, 1], options=compressed)
    assert 0 < max(errors) <= 4 * largest / 127 * HALF_STEP
