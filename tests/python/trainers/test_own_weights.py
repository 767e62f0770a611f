"""Optimizers that step slices of the model's own weights, which an all-gather in place must not round."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.calls import newly_counted
from support.worlds import run
from torch import nn

import zcomm

RANKS, STEPS = 4, 120
EXACT_GRADIENTS = {"ZCOMM_REDUCE_SCATTER": "exact"}
SINGLE = {"ZCOMM_FORMS": "single"}


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 64, bias=False))


def zero1(is_async: bool, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[torch.Tensor]]:
    """ZeRO-1 by hand: a reduce-scatter, Adam on this rank's rows of each weight, an all-gather in place."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, teacher = make_model().to(dtype), make_model().to(dtype)
    moments = [(torch.zeros(p.shape[0] // size, p.shape[1]), torch.zeros(p.shape[0] // size, p.shape[1]))
               for p in model.parameters()]  # fmt: skip
    losses = []
    for step in range(STEPS):
        inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step * size + rank)).to(dtype)
        loss = (model(inputs) - teacher(inputs).detach()).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        gathers = []
        for weight, (first, second) in zip(model.parameters(), moments, strict=True):
            own = weight.data.chunk(size)[rank]
            gradient = torch.empty_like(own)
            dist.reduce_scatter_tensor(gradient, weight.grad, op=dist.ReduceOp.AVG)
            first.lerp_(gradient.float(), 0.1)
            second.lerp_(gradient.float().square(), 0.05)
            mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
            own.sub_((1e-4 * mean / (square.sqrt() + 1e-10)).to(dtype))
            stepped = own.clone()
            work = dist.all_gather_into_tensor(weight.data, own, async_op=is_async)
            gathers.append((work, own, stepped))
            weight.grad = None
        for work, own, stepped in gathers:
            if work is not None:
                work.wait()
            assert torch.equal(own, stepped), "the gather changed the values that this rank has stepped"
    return losses, [weight.detach().clone() for weight in model.parameters()]


def muon() -> list[torch.Tensor]:
    """A distributed Muon: each rank steps the weights that it owns; a gather of a list brings them to all ranks."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = [torch.randn(128, 128) * 0.02 for _ in range(2 * size)]
    for step in range(30):
        for base in range(0, len(weights), size):
            own = weights[base + rank]
            own.add_(torch.randn(128, 128, generator=torch.Generator().manual_seed(step)) * 2e-5)
            dist.all_gather(weights[base : base + size], own, async_op=True).wait()
    return weights


@pytest.mark.job
@pytest.mark.parametrize(("is_async", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_zero1_by_hand_is_as_over_gloo(is_async: bool, dtype: torch.dtype) -> None:
    """Weights stay those that were stepped, bit for bit. Gradients are compressed where the form says what they are."""
    want = run(lambda: zero1(is_async, dtype), RANKS, backend="gloo")
    exact = run(lambda: zero1(is_async, dtype), RANKS, nodes=[0, 1, 2, 3], env=EXACT_GRADIENTS | SINGLE)
    for (losses, weights), (their_losses, their_weights) in zip(exact, want, strict=True):
        assert losses == their_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))
    unmarked = run(lambda: zero1(is_async, dtype), RANKS, nodes=[0, 1, 2, 3])
    assert [losses for losses, _ in unmarked] == [losses for losses, _ in exact]
    for losses, weights in run(lambda: zero1(is_async, dtype), RANKS, nodes=[0, 1, 2, 3], env=SINGLE):
        assert losses[-1] == pytest.approx(want[0][0][-1], rel=0.2 if dtype == torch.bfloat16 else 0.05)
        assert all(torch.equal(a, b) for a, b in zip(weights, exact[0][1], strict=True)) is False


def test_muon_with_lists_is_as_over_gloo() -> None:
    want = run(muon, RANKS, backend="gloo")
    for weights, theirs in zip(run(muon, RANKS, nodes=[0, 1, 2, 3]), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))


def test_what_keeps_a_gather_in_place_exact_is_counted_and_can_be_lifted() -> None:
    def body() -> None:
        whole = torch.randn(2 * 65536)
        own = whole[dist.get_rank() * 65536 :][:65536]

        def gather() -> None:
            dist.all_gather_into_tensor(whole, own)

        assert newly_counted(gather) == {"all_gather: in_place": 1}
        with zcomm.override(forms="in_place"):
            assert newly_counted(gather) == {"all_gather: compressed": 1}
        with zcomm.override(strict=True), pytest.raises(RuntimeError, match="forms='in_place' compresses"):
            gather()

    run(body)
