"""Memory of secondary shards: what they take, and its limits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import logged
from support.secondary import memory_bytes, sharded, train
from support.training import make_batch, make_model
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcomm
from zcomm.fsdp import compress
from zcomm.fsdp.secondary_shard import MemoryBudget


def test_a_limit_leaves_whole_modules_out_and_names_them(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("zcomm").addHandler(handler)
        model = make_model()
        for block in [*model, model]:
            fully_shard(block)
        secondary = compress(model, max_bytes=12_000, exempt=())
        inputs, _ = make_batch(dist.get_rank())
        first = model(inputs)
        assert torch.equal(model(inputs), first)
        assert 0 < memory_bytes(secondary) <= 12_000
        without = [
            name for name, stats in secondary.stats().items() if stats.memory_bytes == 0 and stats.gathers_beyond_limit
        ]
        assert without and all(any(name in text for text in records) for name in without)

    run(body, 3, nodes=[0, 0, 1], options=options())


@pytest.mark.parametrize("fits", [True, False])
def test_the_first_step_tells_what_is_kept_once(fits: bool) -> None:
    """Of a limit that nobody set, no other line tells."""

    def body() -> None:
        logging.getLogger("zcomm").setLevel(logging.INFO)
        model, compression = sharded(True)
        compression._budget.limit = lambda device: None if fits else 12_000  # type: ignore[method-assign]
        lines = logged()
        train(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
        stats = compression.stats().values()
        kept = [one for one in stats if one.memory_bytes]
        without = [one for one in stats if one.gathers_beyond_limit]
        assert kept and bool(without) != fits
        text = f"this rank keeps {memory_bytes(compression)} bytes of {len(kept)} modules"
        rest = "for gathers inside the node" if fits else f"{len(without)} modules go without"
        (line,) = [line for line in lines if "keeps" in line or "go without" in line or "goes without" in line]
        assert text in line and rest in line, line

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_by_default_shards_have_a_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of a kind report slightly different totals, and their ranks must decide alike."""
    gpu, host = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    limits = set()
    for total in (85_000_000_000, 85_010_000_000):
        properties = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        limits.add(MemoryBudget(None).limit(gpu))
        assert MemoryBudget(None).limit(host) is None
        assert MemoryBudget(7).limit(gpu) == MemoryBudget(7).limit(host) == 7
        assert MemoryBudget(None, is_bounded=False).limit(gpu) is None
    (limit,) = limits
    assert 0.047 * total < limit <= 0.05 * total


@pytest.mark.parametrize("weights", [None, "lossless"])
def test_in_one_node_only_lossless_weights_are_kept(weights: Any) -> None:
    """Nothing crosses nodes there."""

    def body() -> None:
        model = make_model().to(torch.bfloat16)
        for block in [*model, model]:
            fully_shard(block)
        compression = compress(model, weights=weights, exempt=())
        inputs = make_batch(dist.get_rank())[0].to(torch.bfloat16)
        assert torch.equal(model(inputs), model(inputs))
        stats = compression.stats().values()
        assert sum(one.gathers for one in stats) > 0
        assert (memory_bytes(compression) > 0) == (weights == "lossless")
        assert not any(one.gathers_beyond_limit or one.gathers_plain for one in stats)

    run(body, 2, nodes=[0, 0], options=options())


def test_a_shard_that_grows_beyond_the_limit_is_freed() -> None:
    """Another format than that of the first gather needs more."""

    def body() -> None:
        layer = nn.Linear(256, 256)
        fully_shard(layer)

        def kept_after_gathers(max_bytes: int | None) -> list[int]:
            compression = compress(layer, max_bytes=max_bytes, exempt=())
            kept = []
            for format in ("int4:64", "int8:256", "int4:64"):
                with zcomm.override(all_gather=format):
                    layer.unshard()
                    layer.reshard()
                (stats,) = compression.stats().values()
                kept.append(stats.memory_bytes)
            return kept

        small, large, _ = kept_after_gathers(None)
        lines = logged()
        assert kept_after_gathers(small) == [small, 0, 0]
        assert len(lines) == 1 and f"its {large} bytes would exceed max_bytes={small}" in lines[0], lines
        assert kept_after_gathers(large)[:2] == [small, large]

    run(body, 4, nodes=[0, 0, 1, 1], options=options())


def test_secondary_shards_cost_half_of_what_bfloat16_ones_would() -> None:
    def body() -> None:
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        secondary = compress(model)
        model(torch.randn(2, 512))
        assert memory_bytes(secondary) <= 0.55 * 2 * 2 * 512 * 512 / 2

    run(body, 4, nodes=[0, 0, 1, 1], options=options())
