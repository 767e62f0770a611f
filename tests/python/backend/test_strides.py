"""Inputs that are not in order in memory, as gradients of autograd: calls have the bits that contiguous ones have, also
where the strides of ranks differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as of_autograd
from support.calls import OPT_INS
from support.worlds import options, run

from zcomm.distributed import single

ROOT, SIDE = 1, 64
Tensors = list[torch.Tensor]


def values(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(SIDE, SIDE, generator=generator)


LAYOUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "turned": lambda seed: values(seed).t(),
    "with gaps": lambda seed: values(seed)[:, ::2],
    "expanded": lambda seed: values(seed)[0, 0].expand(SIDE, SIDE),
    "turned on one rank": lambda seed: values(seed).t() if dist.get_rank() else values(seed),
}


def outputs(like: torch.Tensor, count: int = 2) -> Tensors:
    return [torch.empty(like.shape) for _ in range(count)]


def all_gather(one: torch.Tensor, _: Tensors) -> Tensors:
    dist.all_gather(into := outputs(one), one)
    return into


def all_gather_single(one: torch.Tensor, _: Tensors) -> Tensors:
    single.all_gather_single(into := torch.cat(outputs(one)), one)
    return [into]


def all_gather_coalesced(one: torch.Tensor, _: Tensors) -> Tensors:
    return [funcol.wait_tensor(each) for each in funcol.all_gather_into_tensor_coalesced([one, one], dist.group.WORLD)]


def reduce_scatter(one: torch.Tensor, several: Tensors) -> Tensors:
    dist.reduce_scatter(into := outputs(one)[0], several)
    return [into]


def reduce_scatter_single(one: torch.Tensor, _: Tensors) -> Tensors:
    single.reduce_scatter_single(into := torch.empty(SIDE // 2, one.shape[1]), one)
    return [into]


def reduce_scatter_coalesced(one: torch.Tensor, _: Tensors) -> Tensors:
    with dist._coalescing_manager():
        single.reduce_scatter_single(into := torch.empty(SIDE // 2, one.shape[1]), one)
    return [into]


def all_to_all(one: torch.Tensor, several: Tensors) -> Tensors:
    dist.all_to_all(into := outputs(one), several)
    return into


def all_to_all_single(one: torch.Tensor, _: Tensors) -> Tensors:
    dist.all_to_all_single(into := outputs(one)[0], one)
    return [into]


def gather(one: torch.Tensor, _: Tensors) -> Tensors:
    into = outputs(one) if dist.get_rank() == ROOT else []
    dist.gather(one, into or None, dst=ROOT)
    return into


def scatter(one: torch.Tensor, several: Tensors) -> Tensors:
    dist.scatter(into := outputs(one)[0], several if dist.get_rank() == ROOT else None, src=ROOT)
    return [into]


CALLS = [
    all_gather, all_gather_single, all_gather_coalesced, reduce_scatter, reduce_scatter_single,
    reduce_scatter_coalesced, all_to_all, all_to_all_single, gather, scatter,
]  # fmt: skip


@pytest.mark.parametrize("fields", [{}, OPT_INS], ids=["exact", "compressed"])
def test_inputs_have_any_strides(fields: dict[str, Any]) -> None:
    def body() -> None:
        for name, make in LAYOUTS.items():
            several = [make(seed) for seed in range(2)]
            dense = [part.contiguous() for part in several]
            for call in CALLS:
                want, got = call(dense[0], dense), call(several[0], several)
                for a, b in zip(got, want, strict=True):
                    assert torch.equal(a, b), f"{call.__name__}, {name}"

    run(body, options=options(**fields))


@pytest.mark.parametrize("fields", [{}, OPT_INS], ids=["exact", "compressed"])
def test_gradients_that_torchs_functions_expand(fields: dict[str, Any]) -> None:
    """The sum of a result has a gradient of one element in memory. Gloo reads beyond it in a gather's backward pass."""

    def body() -> None:
        for function in (
            lambda x: torch.cat(of_autograd.gather(x, ROOT)),
            lambda x: of_autograd.scatter([x, x], ROOT),
            lambda x: torch.cat(of_autograd.all_gather(x)),
            lambda x: of_autograd.reduce_scatter(torch.empty(x.shape), [x, x]),
            lambda x: funcol.all_gather_tensor_autograd(x, 1, dist.group.WORLD),
            lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 1, dist.group.WORLD),
        ):
            x = values().requires_grad_()
            function(x).sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None and x.grad.unique().numel() == 1 and x.grad.isfinite().all()

    run(body, options=options(**fields))
