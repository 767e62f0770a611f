"""zcomm takes over FSDP2's collectives by itself: everything else that FSDP2 does stays as it was."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import logged
from support.decisions import FAST_LINK, SLOW_LINK, table
from support.fsdp_model import whole
from support.worlds import options, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

import zcomm

WIDTH = 64
TWO_NODES = [0, 0, 1, 1]


def make_model(**fields: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for module in [*model, model]:
        fully_shard(module, **fields)
    return model


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(inputs).square().sum().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]  # type: ignore[union-attr]


def replicas() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def auto(folder: Path, link: tuple[float, float, float], **fields: Any) -> Any:
    return options(compress="auto", decisions=table(folder, link), forms=(), **fields)


def test_other_dtypes_of_a_unit_stay_bytes_where_it_is_exact(tmp_path: Path) -> None:
    """Both dtypes stay FSDP2's bytes, so no value can be taken for the other dtype's."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False), nn.Linear(WIDTH, WIDTH))
        fully_shard(model)
        weights = [whole(parameter) for parameter in model.parameters()]
        zcomm.fsdp.compress(model)
        for _ in range(2):
            model.unshard()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
            model.reshard()
        stats = zcomm.stats().all_gather
        assert stats.calls == 0 and stats.exact["no_gain"].calls == 2

    run(body, 4, nodes=TWO_NODES, options=auto(tmp_path, FAST_LINK))


@pytest.mark.parametrize("kept", ["an exempt parameter", "an exact rule", "a hook", "exact()", "compress", "format"])
def test_what_is_to_stay_exact_of_replicas_stays_so(kept: str, tmp_path: Path) -> None:
    def body() -> None:
        model = make_model(mesh=replicas())
        if kept == "an exempt parameter":
            zcomm.fsdp.compress(model, exempt=["*"])
        elif kept == "an exact rule":
            zcomm.fsdp.compress(model, weights="exact", gradients="exact", exempt=())
        elif kept == "a hook":
            other = dist.new_group(pg_options=options())
            for layer in model:
                layer.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=other))
        around = {
            "exact()": zcomm.exact(),
            "compress": zcomm.override(compress="always"),
            "format": zcomm.override(reduce_scatter="exact"),
        }
        with around.get(kept, contextlib.nullcontext()):
            gradients_of(model)
        for group in dist.distributed_c10d._world.pg_map:
            assert zcomm.stats(group).all_reduce.calls == 0, kept

    run(body, 4, nodes=TWO_NODES, options=auto(tmp_path, SLOW_LINK))


def test_replicas_of_a_rule_have_its_format(tmp_path: Path) -> None:
    def body() -> None:
        mesh = replicas()
        model = make_model(mesh=mesh)
        zcomm.fsdp.compress(model, gradients="int8:64", exempt=())
        gradients_of(model)
        decisions = zcomm.stats(mesh.get_group("replicate")).decisions
        assert {one.format for one in decisions if one.collective == "all_reduce"} == {"int8:64"}

    run(body, 4, nodes=TWO_NODES, options=auto(tmp_path, SLOW_LINK))


def test_exempt_parameters_keep_replicas_exact_and_that_is_told_once(tmp_path: Path) -> None:
    def body() -> None:
        mesh = replicas()
        model = make_model(mesh=mesh)
        zcomm.fsdp.compress(model)
        lines = logged()
        for _ in range(2):
            gradients_of(model)
        assert zcomm.stats(mesh.get_group("replicate")).all_reduce.calls == 0
        told = [line for line in lines if "all-reduce" in line]
        assert len(told) == 1 and "exempt=() lets compress='auto' compress it, or all_reduce= of the options" in told[0]

    run(body, 4, nodes=TWO_NODES, options=auto(tmp_path, SLOW_LINK))


def test_formats_of_replicas_leave_other_groups_alone(tmp_path: Path) -> None:
    """FSDP2 sums partial gradients of a tensor-parallel group, and calls users' hooks, inside of its reduction."""

    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        norm = nn.Sequential(nn.LayerNorm(1 << 15))
        parallelize_module(norm, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
        fully_shard(norm, mesh=mesh["replicate", "shard"])
        other, metric = dist.new_group(pg_options=dist.group.WORLD._get_backend(torch.device("cpu")).options), []

        def reduce_metric(parameter: torch.Tensor) -> None:
            metric.append(torch.ones(1 << 15))
            dist.all_reduce(metric[-1], group=other)

        norm[0].weight.register_post_accumulate_grad_hook(reduce_metric)
        norm(torch.randn(1, 2, 1 << 15)).square().sum().backward()
        assert len(metric) == 1
        for group in (mesh.get_group("tp"), other):
            stats = zcomm.stats(group).all_reduce
            assert stats.calls == 0 and stats.exact
        assert zcomm.stats(mesh.get_group("replicate")).all_reduce.calls == 1

    run(body, 4, nodes=TWO_NODES, options=auto(tmp_path, SLOW_LINK))


def test_a_group_of_another_backend_gathers_as_before() -> None:
    """reshard_after_forward with a number makes groups with the world's backend, which is gloo."""

    def body(backend: str) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",), backend_override={"fsdp": backend})
        with zcomm.override(all_gather="exact", reduce_scatter="exact"):
            return gradients_of(make_model(mesh=mesh, reshard_after_forward=2))

    for got, want in zip(
        run(lambda: body("zcomm"), 4, backend="gloo"), run(lambda: body("gloo"), 4, backend="gloo"), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("ruled", [False, True])
def test_memory_of_the_process_group_can_be_chosen_at_any_time(ruled: bool) -> None:
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_allocate_memory_from_process_group_for_comm"):
        pytest.skip("came with torch 2.12")

    def body() -> None:
        model = make_model()
        if ruled:
            zcomm.fsdp.compress(model, exempt=())
        gradients_of(model)
        before = zcomm.stats().all_gather.calls
        for layer in model:
            layer.set_allocate_memory_from_process_group_for_comm(True)
        gradients_of(model)
        stats = zcomm.stats().all_gather
        assert stats.calls == 2 * before and not stats.exact

    run(body, options=options(forms=()))


def test_torchs_own_gather_may_be_set_again() -> None:
    def body() -> None:
        layer = nn.Linear(256, 256)
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
        zcomm.fsdp.compress(layer)
        for _ in range(2):
            layer.set_custom_all_gather(_fsdp_collectives.DefaultAllGather())
            layer(torch.ones(1, 256)).sum().backward()
        stats = zcomm.stats()
        assert stats.all_gather.calls == 0 and stats.reduce_scatter.calls == 2

    run(body, 2, options=options(forms=()))


def test_symmetric_memory_is_refused_and_changes_nothing() -> None:
    def body() -> None:
        model = make_model()
        gradients_of(model)
        before = zcomm.stats().all_gather.calls
        for layer in model:
            with pytest.raises(ValueError, match=r"expected a group of the backend 'nccl'.* got one of 'zcomm'"):
                layer.set_symm_mem_for_comm()
        gradients_of(model)
        stats = zcomm.stats().all_gather
        assert stats.calls == 2 * before and not stats.exact

    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_symm_mem_for_comm"):
        pytest.skip("came with a later torch")
    run(body, options=options(forms=()))
