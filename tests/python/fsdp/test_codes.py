"""Packed codes of quantized weights that are stored in a float dtype: never rounded, whoever made them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import logged
from support.worlds import WorldError, run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import zcomm
from zcomm._deepspeed import _fetch
from zcomm.fsdp.codes import look_like_codes

STORAGES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = 257  # of 512 bytes of codes: no number of ranks divides it


def codes(storage: torch.dtype) -> torch.Tensor:
    """Two 4-bit codes in each byte, (ROWS, ...) in a float dtype: the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randn(ROWS * 1024, generator=generator).mul(3).add(7.5).round().clamp(0, 15).to(torch.uint8)
    return (levels[0::2] << 4 | levels[1::2]).view(storage).view(ROWS, -1)


class Frozen(nn.Module):
    """A layer with codes beside adapters that train."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(codes(storage), requires_grad=False)
        self.adapter = nn.Parameter(torch.linspace(-1, 1, 256 * 256).view(256, 256).to(storage))
        self.seen = torch.empty(0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.detach().clone()
        return values @ self.adapter.to(values.dtype)


class Linear4bit(Frozen):
    """Known by the name of its class."""


def marked(storage: torch.dtype) -> Frozen:
    """Known by an attribute of the module."""
    module = Frozen(storage)
    module.quant_state = object()  # type: ignore[assignment]
    return module


MAKERS: dict[str, Callable[[torch.dtype], Frozen]] = {"class": Linear4bit, "attribute": marked, "values": Frozen}
HOW: dict[str, dict[str, Any] | None] = {"defaults": None, "compress": {}, "not fused": {"fused": False}}


def is_bit_equal(got: torch.Tensor, storage: torch.dtype) -> bool:
    return torch.equal(got.view(torch.uint8), codes(storage).view(torch.uint8))


@pytest.mark.promise(7)
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("known_by", MAKERS)
def test_codes_are_gathered_bit_for_bit(known_by: str, storage: torch.dtype) -> None:
    """In a unit with adapters, which are compressed, under the defaults and with compress()."""

    def body() -> None:
        told = logged()
        for how in HOW.values():
            module = MAKERS[known_by](storage)
            fully_shard(module)
            if how is not None:
                zcomm.fsdp.compress(module, **how)
            for _ in range(2):
                module(torch.ones(2, 256)).sum().backward()
                assert is_bit_equal(module.seen, storage)
        assert zcomm.stats().all_gather.calls > 0
        is_told = known_by == "values" and dist.get_rank() == 0
        assert len(told) == (len(HOW) if is_told else 0)
        assert all("Frozen.weight taken for packed codes" in line for line in told)

    run(body, 4, nodes=[0, 0, 1, 1])


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("weights", [None, "lossless"])
def test_nodes_keep_units_of_codes_alone(weights: str | None, storage: torch.dtype) -> None:
    """They cross nodes once, also beside norms, which are exempt."""

    def body() -> None:
        has_differences = weights == "lossless" and storage == torch.float32  # which norms would need, too
        for has_norm in (False,) if has_differences else (False, True):
            module = Frozen(storage)
            del module.adapter
            module.adapter = torch.ones(256, 256)
            if has_norm:
                module.norm = nn.Parameter(torch.ones(64, dtype=storage), requires_grad=False)
            fully_shard(module)
            compression = zcomm.fsdp.compress(module, weights=weights)
            moved = [zcomm.stats().all_gather.inter_node_bytes]
            for _ in range(3):
                module(torch.ones(2, 256))
                module.reshard()  # type: ignore[operator]
                assert is_bit_equal(module.seen, storage)
                moved.append(zcomm.stats().all_gather.inter_node_bytes)
            assert moved[0] < moved[1] == moved[2] == moved[3]
            (stats,) = compression.stats().values()
            assert (stats.gathers_inter_node, stats.gathers_intra_node) == (1, 2)

    run(body, 4, nodes=[0, 0, 1, 1])


def test_all_ranks_decide_as_one_that_has_codes() -> None:
    """The rows of one rank look like codes, those of the other like weights."""

    def body() -> None:
        module = nn.Linear(256, 512, bias=False).bfloat16().requires_grad_(False)
        with torch.no_grad():
            module.weight[:256] = codes(torch.bfloat16).view(-1)[: 256 * 256].view(256, 256)
        want = module.weight.clone()
        fully_shard(module)
        seen = []
        module.register_forward_hook(lambda module, *_: seen.append(module.weight.clone()))
        module(torch.ones(1, 256, dtype=torch.bfloat16))
        assert torch.equal(seen[0].view(torch.int16), want.view(torch.int16))
        assert zcomm.stats().all_gather.calls == 0
        assert zcomm.stats().all_gather.exact["not_a_float"].calls == 1

    run(body)


def test_strict_forbids_codes_that_only_their_values_show() -> None:
    def body() -> None:
        module = Frozen(torch.bfloat16)
        fully_shard(module)
        with pytest.raises(RuntimeError, match=r"strict=True, but .*Frozen.weight would be sent uncompressed"):
            module(torch.ones(2, 256))

    run(body, options=zcomm.Options(strict=True))


def test_codes_that_come_after_the_first_gather_raise() -> None:
    """Weights that a program quantizes later, in place."""

    def body() -> None:
        module = nn.Linear(256, 512, bias=False).bfloat16().requires_grad_(False)
        fully_shard(module)
        module(torch.ones(1, 256, dtype=torch.bfloat16))
        assert zcomm.stats().all_gather.calls == 1
        module.reshard()  # type: ignore[operator]
        local = module.weight.to_local()  # type: ignore[operator]
        local.copy_(codes(torch.bfloat16).view(-1)[: local.numel()].view(local.shape))
        with pytest.raises(RuntimeError, match=r"Linear.weight: expected weights, .* exempt these"):
            module(torch.ones(1, 256, dtype=torch.bfloat16))

    run(body)


@pytest.mark.promise(7)
@pytest.mark.parametrize("known_by", MAKERS)
def test_fsdp1_gathers_codes_bit_for_bit(known_by: str) -> None:
    """In units of their own, as PEFT's policy wraps them, and with the adapters."""

    def body() -> None:
        for use_orig_params in (True, False):
            module = MAKERS[known_by](torch.bfloat16)
            if not use_orig_params:  # a flat parameter is frozen as a whole
                del module.adapter
                module.adapter = torch.ones(256, 256)
            model = FullyShardedDataParallel(module, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
            for _ in range(2):
                model(torch.ones(2, 256))
                assert is_bit_equal(module.seen, torch.bfloat16)
        assert zcomm.stats().all_gather.calls == 0

    run(body)


def test_deepspeed_may_name_parameters_in_any_order() -> None:
    """It passes sets, whose order is that of a process: all ranks find the same parameters."""

    def body() -> list[bool]:
        params = [
            SimpleNamespace(
                ds_id=number,
                ds_tensor=codes(torch.bfloat16) if number == 1 else torch.ones(1 << 16),
                ds_process_group=dist.group.WORLD,
                ds_numel=2 << 16,
                partition_numel=lambda: 1 << 16,
                requires_grad=False,
            )
            for number in range(3)
        ]
        with _fetch(None, params[1:] + params[:1] if dist.get_rank() else params):
            pass
        return [param._zcomm_has_codes for param in params]

    assert run(body) == [[False, True, False]] * 2


def test_weights_that_are_frozen_are_inspected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the backward pass gathers shards of another mesh."""
    looked: list[int] = []
    look = look_like_codes
    monkeypatch.setattr("zcomm.fsdp.codes.look_like_codes", lambda values: looked.append(1) or look(values))

    def body() -> None:
        module = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        module[0].weight.requires_grad_(False)
        for layer in module:
            fully_shard(layer, reshard_after_forward=2)
        fully_shard(module)
        for _ in range(3):
            module(torch.ones(2, 256, requires_grad=True)).sum().backward()
        assert len(looked) == 1

    run(body, 4)


def test_a_fault_is_seen_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that are taken for weights are rounded to others: the comparisons above can fail."""
    monkeypatch.setattr("zcomm.fsdp.codes.look_like_codes", lambda values: False)

    def body() -> None:
        module = Frozen(torch.bfloat16)
        fully_shard(module)
        module(torch.ones(2, 256))
        assert is_bit_equal(module.seen, torch.bfloat16)

    with pytest.raises(WorldError, match="is_bit_equal"):
        run(body)


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
@pytest.mark.parametrize("numel", [512, 4099, 1 << 18])
def test_weights_are_told_from_codes(numel: int, dtype: torch.dtype) -> None:
    """By values alone: codes of 2, 4 and 8 bits, and weights of any scale, also in ranges of many magnitudes."""
    generator = torch.Generator().manual_seed(numel)
    count = numel * dtype.itemsize
    random = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    pairs = torch.randint(0, 4, (count, 4), dtype=torch.uint8, generator=generator)
    for packed in (
        random,
        (40 * torch.randn(count, generator=generator)).to(torch.int8).view(torch.uint8),
        (40 * torch.randn(count, generator=generator) + 128).clamp(0, 255).to(torch.uint8),
        pairs[:, 0] | pairs[:, 1] << 2 | pairs[:, 2] << 4 | pairs[:, 3] << 6,
    ):
        assert look_like_codes(packed.view(dtype))
    normal = torch.randn(numel, generator=generator)
    for weights in (
        0.02 * normal,
        normal * torch.logspace(-4, 3, numel),
        normal * (torch.rand(numel, generator=generator) < 0.01),
        torch.ones(numel),
        torch.zeros(numel),
        torch.full((numel,), 1e-6),
        normal.cumsum(0).cos(),
    ):
        assert not look_like_codes(weights.to(dtype))
