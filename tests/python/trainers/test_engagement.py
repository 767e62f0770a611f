"""Compression engages for every front end that is said to be compressed: the bytes between nodes, by the counters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx  # what compilers need: here, not in each rank
import torch.distributed as dist
from support.calls import logged
from support.decisions import SLOW_LINK, table
from support.simple_fsdp import simple_fsdp
from support.worlds import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm

WIDTH, STEPS = 256, 3
TWO_NODES = [0, 0, 1, 1]
WORLD: dict[str, Any] = {"nodes": TWO_NODES, "seconds": 120.0, "group_seconds": 100.0}  # ranks compile
pytestmark = pytest.mark.timeout(300)  # for two worlds
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CLAIMED = 0.2  # of what gloo sends between two nodes of two ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inputs + self.down(torch.relu(self.up(self.norm(inputs).to(self.up.weight.dtype))))
        return result


def make_model(layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def shard(model: nn.Sequential, **fields: Any) -> nn.Module:
    for module in [*model, model]:
        fully_shard(module, **fields)
    return model


def fsdp2() -> nn.Module:
    return shard(make_model(), mp_policy=BF16)


def compiled_fsdp2() -> nn.Module:
    model = make_model()
    for layer in model:
        layer.compile(backend="aot_eager")
    return shard(model, mp_policy=BF16)


def adapters() -> nn.Module:
    """Frozen bfloat16 weights and trained float32 ones in one unit, which FSDP2 gathers as bytes."""
    model = make_model()
    for layer in model:
        assert isinstance(layer, Layer)
        layer.up.bfloat16().requires_grad_(False)
        layer.down.bfloat16().requires_grad_(False)
    return shard(model)


def hsdp() -> nn.Module:
    """Shards inside the nodes, replicas between them: one rank of each node has the same shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(make_model(), mesh=mesh, mp_policy=BF16)


def traced() -> nn.Module:
    model = simple_fsdp(make_model(layers=1), init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def ddp() -> nn.Module:
    model = DistributedDataParallel(make_model())
    if dist.get_backend() == "zcomm":
        model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
    return model


@dataclass(frozen=True)
class FrontEnd:
    wrap: Callable[[], nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)  # as on its page
    claimed: float = CLAIMED


FRONT_ENDS = {
    "FSDP2": FrontEnd(fsdp2),
    "FSDP2, compiled blocks": FrontEnd(compiled_fsdp2),
    "FSDP2, adapters of another dtype": FrontEnd(adapters, claimed=0.35),  # weights alone: 8 of 16 bits
    "HSDP": FrontEnd(hsdp, {"all_reduce": "int8:128/int4:128"}),
    "SimpleFSDP": FrontEnd(traced, {"groups": {"world": "traced"}}),  # a mesh of all ranks has the world's group
    "DDP": FrontEnd(ddp),
}


# torch.compile takes most of a test's time.
COMPILED = ("FSDP2, compiled blocks", "SimpleFSDP")
NAMES = [pytest.param(name, marks=[pytest.mark.job] if name in COMPILED else []) for name in FRONT_ENDS]


def groups() -> list[dist.ProcessGroup]:
    return [group for group in dist.distributed_c10d._world.pg_map if dist.get_backend(group) == "zcomm"]


def spans_nodes(group: dist.ProcessGroup) -> bool:
    return len({TWO_NODES[rank] for rank in dist.get_process_group_ranks(group)}) > 1


def bytes_between_nodes() -> tuple[int, int]:
    """Return the bytes that this rank has sent, exact calls as gloo's rings send them, and the bytes gloo would
    send."""
    sent = exact = 0
    for group in groups():
        if not spans_nodes(group):
            continue
        stats, size = zcomm.stats(group), group.size()
        # A ring passes on (size - 1) parts of each tensor, twice if it reduces; half of a node's ranks pass it out.
        once = (size - 1) / size * (0.5 if size == 4 else 1)
        for name, times in (("all_gather", 1), ("reduce_scatter", 2), ("all_reduce", 2)):
            one = getattr(stats, name)
            left = sum(calls.bytes for calls in one.exact.values())
            sent += one.inter_node_bytes + int(times * once * left)
            exact += int(times * once * (left + one.bytes))
    return sent, exact


def train(wrap: Callable[[], nn.Module], steps: int = STEPS) -> list[float]:
    model = wrap()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = (model(torch.randn(8, WIDTH, generator=generator)).float() - 1).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cache
def over_gloo(name: str) -> list[list[float]]:
    """Return the losses of each rank. Tests that one process of pytest runs share a training."""
    return run(lambda: train(FRONT_ENDS[name].wrap), 4, backend="gloo", **WORLD)


@pytest.mark.parametrize("compress", ["always", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_between_nodes(name: str, compress: str, tmp_path: Path) -> None:
    front_end = FRONT_ENDS[name]
    fields = dict(front_end.options)
    if compress == "auto":
        fields |= {"compress": "auto", "decisions": table(tmp_path, SLOW_LINK)}
        if name == "HSDP":
            del fields["all_reduce"]  # left to the policy

    def body() -> tuple[list[float], int, int]:
        losses = train(front_end.wrap)
        return losses, *bytes_between_nodes()

    found = run(body, 4, **WORLD, options=zcomm.Options(**fields))
    sent, exact = (sum(rank[part] for rank in found) for part in (1, 2))
    assert 0 < sent <= front_end.claimed * exact, (sent, exact)
    for (losses, _, _), theirs in zip(found, over_gloo(name), strict=True):
        assert losses == pytest.approx(theirs, rel=0.02)
        assert losses != theirs


@pytest.mark.parametrize("name", NAMES)
def test_exact_formats_give_the_losses_of_gloo(name: str) -> None:
    options = zcomm.Options(**{**FRONT_ENDS[name].options, "all_gather": "exact", "reduce_scatter": "exact"})

    def body() -> list[float]:
        with zcomm.override(all_reduce="exact"):
            return train(FRONT_ENDS[name].wrap)

    assert run(body, 4, **WORLD, options=options) == over_gloo(name)


# Calls that stay exact by default, and the setting that the log line names.
TOLD = {
    "HSDP": (hsdp, "all_reduce format_exact (to compress: all_reduce='int8:128/int4:128'"),
    "SimpleFSDP": (
        traced,
        "all_gather form (to compress: groups={'default_pg': 'list,coalesced'}, or 'traced' for compiled FSDP",
    ),
    "DDP": (lambda: DistributedDataParallel(make_model()), "all_reduce format_exact (to compress: all_reduce="),
}


@pytest.mark.parametrize("name", ["FSDP2", *TOLD])
def test_what_stays_exact_is_told_once(name: str) -> None:
    """A warning of one rank, after the first steps, of each group between nodes where a setting would compress much."""

    def body() -> list[str]:
        told = logged()
        train(fsdp2 if name == "FSDP2" else TOLD[name][0], steps=6)
        return told

    told = run(body, 4, **WORLD)
    if name == "FSDP2":
        assert told == [[]] * 4
        return
    ranks = 2 if name == "HSDP" else 1  # first ranks of groups: HSDP has two between nodes
    assert [len(lines) for lines in told] == [1] * ranks + [0] * (4 - ranks)
    assert "between nodes: " in told[0][0] and TOLD[name][1] in told[0][0]


def test_patterns_that_name_no_group_are_told_once() -> None:
    def body() -> list[str]:
        told = logged()
        dist.new_group([0, 1], group_desc="DATA_PARALLEL_GROUP")
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(6):
            parameter.grad = torch.ones(4)
            optimizer.step()
        return told

    groups = {"DATA_PARALEL*": "single", "world": "single"}
    line = "groups: DATA_PARALEL* match none of this rank's groups: DATA_PARALLEL_GROUP, default_pg"
    assert run(body, 2, options=zcomm.Options(groups=groups)) == [[line], []]


def test_a_few_bytes_are_no_warning() -> None:
    def body() -> None:
        told = logged()
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(6):
            parameter.grad = torch.ones(4)
            dist.all_reduce(torch.ones(1))
            optimizer.step()
        assert told == []

    run(body, 2, nodes=[0, 1])


def test_what_the_user_made_exact_has_no_advice() -> None:
    def body() -> None:
        with zcomm.exact():
            dist.reduce_scatter_single(torch.empty(1 << 16), torch.ones(1 << 17))
        changeable, total, line = zcomm.stats().explain_exact()
        assert changeable == 0 < total
        assert line == "100% of the bytes stayed exact: 100% reduce_scatter format_exact"

    run(body, 2)


def test_the_counters_say_what_stays_exact_and_why() -> None:
    def body() -> None:
        dist.all_reduce(torch.ones(1 << 16))
        dist.all_gather_single(torch.empty(1 << 17), torch.ones(1 << 16))
        changeable, total, line = zcomm.stats().explain_exact()
        assert changeable == total > 0
        assert line.startswith(
            "100% of the bytes stayed exact: 50% all_gather out_of_place (to compress: "
            "groups={'default_pg': 'out_of_place'}, if these are weights or gradients), "
            "50% all_reduce format_exact (to compress: all_reduce='int8:128/int4:128', or "
        )
        told = str(zcomm.stats())
        assert "100% of the bytes stayed exact." in told
        assert re.search(r"all_reduce +format_exact +1 +256 KiB +all_reduce='int8:128/int4:128', or ", told)

    run(body)
