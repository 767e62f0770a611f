"""Tensor parallel with FSDP2: the data-parallel dimension is compressed, activations are not."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.training import BATCH, COLLECTIVES, make_batch, make_model
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import zcomm


def replicated() -> dict[str, ParallelStyle]:
    return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def sequence_parallel() -> dict[str, ParallelStyle]:
    """Split the tokens between blocks: activations are gathered before them and reduced and scattered after them."""
    return {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}


@pytest.mark.parametrize("plan", [replicated, sequence_parallel])
def test_only_the_data_parallel_dimension_is_compressed(plan) -> None:  # type: ignore[no-untyped-def]
    def body() -> None:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        blocks = nn.Sequential(*list(make_model())[:2])
        for block in blocks:
            parallelize_module(block, mesh["tensor"], plan())
        for module in [*blocks, blocks]:
            fully_shard(module, mesh=mesh["data"])
        inputs, _ = make_batch(mesh.get_local_rank("data"))
        if plan is sequence_parallel:
            inputs = inputs.chunk(2)[mesh.get_local_rank("tensor")]
        assert len(inputs) == (BATCH // 2 if plan is sequence_parallel else BATCH)
        blocks(inputs).square().mean().backward()

        tensor, data = (zcomm.stats(mesh.get_group(name)) for name in ("tensor", "data"))
        assert [getattr(tensor, name).calls for name in COLLECTIVES] == [0, 0, 0]
        left_exact = {name for name in COLLECTIVES if getattr(tensor, name).exact}
        assert left_exact == ({"all_gather", "reduce_scatter"} if plan is sequence_parallel else {"all_reduce"})
        assert (data.all_gather.calls, data.reduce_scatter.calls) == (4, 2)  # two blocks, forward and backward

    run(body, 4, options=options())
