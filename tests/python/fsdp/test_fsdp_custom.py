"""Users' own collectives of FSDP2, beside zcomm.fsdp.compress(), and modules that are not sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import logged
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.distributed import _fsdp2
from zcomm.fsdp import compress


class CountedGather(_fsdp2.AllGather):  # type: ignore[misc]
    """A user's own."""

    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class CountedReduce(_fsdp2.ReduceScatter):  # type: ignore[misc]
    calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("after_a_step", [False, True])
@pytest.mark.parametrize("kinds", [("all_gather",), ("reduce_scatter",), ("all_gather", "reduce_scatter")], ids=str)
def test_a_custom_collective_in_place_of_a_compressed_one_is_told_and_stays_until_the_next_call(
    kinds: tuple[str, ...], after_a_step: bool, reduce_dtype: torch.dtype | None
) -> None:
    def body() -> None:
        layer = nn.Linear(256, 256)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))

        def step() -> None:
            layer(torch.ones(1, 256)).sum().backward()

        compression = compress(layer, weights="int8:256", gradients="int8:128")
        if after_a_step:
            step()
        lines = logged()
        custom: dict[str, Any] = {"all_gather": CountedGather(), "reduce_scatter": CountedReduce()}
        for kind in (*kinds, *kinds):
            getattr(layer, f"set_custom_{kind}")(custom[kind])
        assert len(lines) == len(kinds), lines
        assert all(line.startswith("FSDPLinear: a custom collective takes the place") for line in lines)
        for _ in range(2):
            step()
            layer.unshard()
            layer.reshard()
        gathers, reduces = custom["all_gather"].calls, custom["reduce_scatter"].calls
        assert (gathers > 0) == ("all_gather" in kinds) and reduces == (2 if "reduce_scatter" in kinds else 0)
        (before,) = compression.stats().values()
        assert before.reduces == after_a_step + (2 if reduces == 0 else 0)
        again = compress(layer, weights="int8:256", gradients="int4:32")
        step()
        (after,) = again.stats().values()
        assert after.gathers > 0 and after.reduces == 1
        assert custom["all_gather"].calls == gathers and custom["reduce_scatter"].calls == reduces

    run(body, 2, options=options())


def test_a_custom_collective_stays_where_memory_of_the_process_group_is_chosen() -> None:
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("came with torch 2.12")

    def body() -> None:
        layer = nn.Linear(256, 256)
        fully_shard(layer)
        compress(layer)
        custom = CountedReduce()
        layer.set_custom_reduce_scatter(custom)
        with pytest.raises(AssertionError, match="when reduce scatter comm is custom: CountedReduce"):
            layer.set_allocate_memory_from_process_group_for_comm(True)
        layer(torch.ones(1, 256)).sum().backward()
        assert custom.calls == 1 and zcomm.stats().all_gather.calls > 0

    run(body, 2, options=options())


def test_modules_of_replicate_are_refused() -> None:
    composable = pytest.importorskip(
        "torch.distributed._composable.replicate_with_fsdp", reason="this torch has no replicate() over FSDP2"
    )

    def body() -> None:
        wanted = r"model: expected modules of fully_shard, got 1 of replicate\(\), which gathers no weights"
        for early in (False, True):
            model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
            if early:
                compress(model, weights="int4:64", gradients="int8:64")
            fully_shard(model[0])
            composable.replicate(model[1])
            if not early:
                with pytest.raises(ValueError, match=wanted):
                    compress(model, weights="int4:64", gradients="int8:64")
                model(torch.ones(1, 256)).sum().backward()
            for _ in range(2 * early):
                with pytest.raises(ValueError, match=wanted):
                    model(torch.ones(1, 256))
        assert zcomm.stats().all_gather.calls == zcomm.stats().reduce_scatter.calls == 0

    run(body, 2, options=options(all_gather="exact", reduce_scatter="exact"))
