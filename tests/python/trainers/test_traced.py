"""Collectives that are traced into compiled graphs, as SimpleFSDP's are: Options(groups={"DIM": "traced"})."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # what compilers need: here, not in each rank
import torch.distributed as dist
from support.calls import newly_counted
from support.cpp_example import needs_compiler
from support.expected import assert_same_bits
from support.simple_fsdp import make_simple
from support.training import EXACT, gather_objects, make_batch, sgd
from support.worlds import options, run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard

import zcomm

STEPS, WEIGHTS = 20, 3
FULL = StateDictOptions(full_state_dict=True)
Run = tuple[list[float], dict[str, int]]  # losses, and what was counted in training


def train(model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor], steps: int = STEPS) -> list[float]:
    optimizer = sgd(model)
    inputs, targets = make_batch(dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = (forward(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def shards_mesh() -> DeviceMesh:
    """Return a mesh of two ranks. In a world of two its group is the world's."""
    return dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("batch", "fsdp"))["fsdp"]


def check_full_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gathers outside of the graphs give the bits of the shards."""
    full = get_model_state_dict(model, options=FULL)
    everyone = gather_objects({name: shard.to_local() for name, shard in model.state_dict().items()})
    for name, weight in model.state_dict().items():
        want = torch.cat([everyone[rank][name] for rank in dist.get_process_group_ranks(mesh.get_group())])
        assert_same_bits(weight.full_tensor(), want, name)
        assert_same_bits(full[name], want, name)


def compiled_run(size: int, compiler: str, config: dict[str, Any], folder: Path, **world: Any) -> list[Run]:
    """Return each rank's run; over zcomm full tensors are compared, too. ``config`` is inductor's, with files in
    ``folder``."""

    def body() -> Run:
        # Inductor takes the shards of ranks for each other's where their sizes differ and their caches do not.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / str(dist.get_rank()))
        mesh = shards_mesh()
        model = make_simple(mesh)
        compiled = torch.compile(model, backend=compiler, fullgraph=True, options=config or None)
        if dist.get_backend() == "gloo":
            return train(model, compiled), {}
        losses: list[float] = []
        counted = newly_counted(lambda: losses.extend(train(model, compiled)), mesh.get_group())
        left_exact = newly_counted(lambda: check_full_tensors(model, mesh), mesh.get_group())
        assert left_exact["all_gather: form" if "all_gather: compressed" in counted else "all_gather: format_exact"]
        assert "all_gather: compressed" not in left_exact
        return losses, counted

    return run(body, size, seconds=110.0, group_seconds=100.0, **world)  # ranks compile


def check_against_gloo(
    size: int, named: str, messages: int, compiler: str, config: dict[str, Any], folder: Path
) -> None:
    """``messages``: gathers, and reductions, of a step."""
    want, exact, got = (
        compiled_run(size, compiler, config, folder, **world)
        for world in (
            {"backend": "gloo"},
            {"options": options(groups=dict.fromkeys(named.split(","), "traced"), **EXACT)},
            {"options": options(groups=dict.fromkeys(named.split(","), "traced"))},
        )
    )
    assert [losses for losses, _ in exact] == [losses for losses, _ in want]
    for (losses, counted), (theirs, _) in zip(got, want, strict=True):
        assert losses != theirs
        assert losses == pytest.approx(theirs, rel=0.01)
        assert counted.pop("all_gather: compressed") == counted.pop("reduce_scatter: compressed") == messages * STEPS
        assert counted.keys() <= {"others"}


@pytest.mark.job
def test_simple_fsdp_in_a_dimension_of_a_mesh(tmp_path: Path) -> None:
    """aot_eager calls what is traced one by one; its graphs are those of every other backend."""
    check_against_gloo(4, "batch_of_another,fsdp", WEIGHTS, "aot_eager", {}, tmp_path)


@pytest.mark.slow  # inductor starts compilers, which takes minutes on a busy machine
@pytest.mark.timeout(400)
@needs_compiler
def test_simple_fsdp_by_inductor(tmp_path: Path) -> None:
    """Gathers in buckets are in place. The mesh is the world and has its group."""
    buckets = {"compile_threads": 1, "bucket_all_gathers_fx": "all", "bucket_reduce_scatters_fx": "all"}
    check_against_gloo(2, "world", 1, "inductor", buckets, tmp_path)


def test_graphs_are_exact_where_their_group_is_not_named() -> None:
    """Groups are named by the options, or by an override, which holds for the calls of a graph."""

    def body() -> None:
        mesh = shards_mesh()
        model = make_simple(mesh)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

        def counted() -> dict[str, int]:
            found = newly_counted(lambda: train(model, compiled, 1), mesh.get_group())
            return {name: calls for name, calls in found.items() if name != "others"}

        exact = {"all_gather: form": WEIGHTS, "reduce_scatter: form": WEIGHTS}
        compressed = {"all_gather: compressed": WEIGHTS, "reduce_scatter: compressed": WEIGHTS}
        assert counted() == exact
        with zcomm.override(groups={"fs*": "traced"}):
            assert counted() == compressed
            with zcomm.exact():
                assert counted() == {name.replace("form", "format_exact"): WEIGHTS for name in exact}
        assert counted() == exact

    run(body, 4, options=options(groups={"batch": "traced", "world": "traced"}))


def gather_from(shard: DTensor) -> None:
    shard.redistribute(placements=[Replicate()])


def sort(shard: DTensor) -> None:
    torch.sort(shard, dim=0)  # needs the whole dimension, which the dispatcher gathers


def reduce_in_backward_of_redistribute(shard: DTensor) -> None:
    weight = shard.detach().requires_grad_()
    weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")]).sum().backward()


def gather_in_backward_of_from_local(shard: DTensor) -> None:
    whole = torch.ones(shard.shape, requires_grad=True)
    (DTensor.from_local(whole, shard.device_mesh, [Replicate()]) * shard).to_local().sum().backward()


GATHER, REDUCE = {"all_gather: form": 1}, {"reduce_scatter: form": 1}
EAGER: dict[str, tuple[Callable[[DTensor], Any], dict[str, int]]] = {
    "redistribute": (gather_from, GATHER),
    "full_tensor": (lambda shard: shard.full_tensor(), GATHER),
    "an operator": (sort, GATHER),
    "backward of redistribute": (reduce_in_backward_of_redistribute, GATHER | REDUCE),
    "backward of from_local": (gather_in_backward_of_from_local, GATHER),
}


def test_what_dtensor_does_outside_of_graphs_is_exact() -> None:
    def body() -> dict[str, dict[str, int]]:
        mesh = shards_mesh()
        shard = DTensor.from_local(torch.randn(32, 32), mesh, [Shard(0)])
        return {name: newly_counted(lambda call=call: call(shard)) for name, (call, _) in EAGER.items()}

    assert (
        run(body, options=options(groups={"world": "traced"}))
        == [{name: want for name, (_, want) in EAGER.items()}] * 2
    )


def test_simple_fsdp_that_is_not_compiled_is_exact() -> None:
    def body() -> tuple[list[float], dict[str, int]]:
        model = make_simple(shards_mesh())
        losses: list[float] = []
        return losses, newly_counted(lambda: losses.extend(train(model, model, 3)))

    exact = {"all_gather: form": 3 * WEIGHTS, "reduce_scatter: form": 3 * WEIGHTS}
    for losses, counted in run(body, options=options(groups={"world": "traced"})):
        assert losses[-1] < losses[0]
        assert {name: calls for name, calls in counted.items() if name != "others"} == exact
