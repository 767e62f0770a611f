"""Further features of FSDP2: scaled float16 gradients, accumulation, compiled blocks, divide factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.trainers import FLOAT16, fsdp2
from support.training import (
    EXACT,
    EXACT_STEPS,
    STEPS,
    WIDTH,
    Block,
    Job,
    Tensors,
    assert_same_tensors,
    assert_within_one_percent,
    bound_of_mean,
    gather_objects,
    loss_of,
    make_model,
    sgd,
    train,
    trained,
    whole_tensors,
)
from support.worlds import options, run
from torch import nn
from torch.distributed.fsdp import FSDPModule

import zcomm
from zcomm.distributed._fsdp2 import groups_of

OVERFLOW_STEP = 2


def train_float16(steps: int) -> tuple[list[float], Tensors]:
    """Losses and parameters; at one step an element of rank 0's gradient, in the shard of rank 1, overflows."""
    model = fsdp2(mp_policy=FLOAT16)()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        gradient[0, 2 * WIDTH - 1] = torch.inf
        return gradient

    def inject(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(overflow)

    losses = []
    for step in range(steps):
        is_overflow = step == OVERFLOW_STEP
        hook = model[0][0].register_forward_hook(inject) if is_overflow and dist.get_rank() == 0 else None
        loss = loss_of(model, dist.get_rank())
        scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        if is_overflow:
            before = whole_tensors(model)
            finite = all(p.grad.to_local().isfinite().all() for p in model.parameters())  # type: ignore[union-attr]
            assert finite == (dist.get_rank() == 0), "the infinity is to be seen by rank 1 alone"
        scaler.step(optimizer)
        scaler.update()
        if is_overflow:
            assert_same_tensors(whole_tensors(model), before, "after the skipped step")
        assert scaler.get_scale() == (2.0**7 if step >= OVERFLOW_STEP else 2.0**8)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, whole_tensors(model)


def test_a_float16_step_that_overflows_is_skipped_on_all_ranks() -> None:
    few = OVERFLOW_STEP + 3
    want = run(lambda: train_float16(few), 2, backend="gloo")
    got = run(lambda: train_float16(few), 2, options=options(**EXACT))
    for (losses, parameters), (theirs, their_parameters) in zip(got, want, strict=True):
        assert losses == theirs
        assert_same_tensors(parameters, their_parameters, "parameters")
    want = run(lambda: train_float16(STEPS), 2, backend="gloo")
    got = run(lambda: train_float16(STEPS), 2, options=options())
    assert_close([losses for losses, _ in got], [losses for losses, _ in want])


def assert_close(got: list[list[float]], want: list[list[float]]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert ours != theirs
        assert all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


MICRO_BATCHES = 2


def accumulate(model: nn.Module, every: bool) -> float:
    """Gradients of several micro-batches, reduced after every one or once; the mean loss."""
    total = 0.0
    for index in range(MICRO_BATCHES):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(every or index == MICRO_BATCHES - 1)
        loss = loss_of(model, dist.get_rank() + index * dist.get_world_size()) / MICRO_BATCHES
        loss.backward()
        total += float(loss.detach())
    return total


def train_accumulating(every: bool, steps: int) -> tuple[list[float], Tensors]:
    model = fsdp2()()
    optimizer = sgd(model)
    losses, gradients = [], {}
    for step in range(steps):
        losses.append(accumulate(model, every))
        if step == 0:
            gradients = whole_tensors(model, gradients=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


@pytest.mark.parametrize("every", [False, True], ids=["once", "every micro-batch"])
def test_accumulated_gradients(every: bool) -> None:
    """Reduced once, they are quantized once; reduced after every micro-batch, each time."""

    def body() -> tuple[Tensors, float]:
        with zcomm.override(all_gather="exact"):
            model = fsdp2()()
            before = zcomm.stats().reduce_scatter.calls
            accumulate(model, every)
            assert zcomm.stats().reduce_scatter.calls - before == 3 * (MICRO_BATCHES if every else 1)  # three parts
            compressed = whole_tensors(model, gradients=True)
        alone = make_model()
        bound = 0.0
        for index in range(MICRO_BATCHES):
            (loss_of(alone, dist.get_rank() + index * dist.get_world_size()) / MICRO_BATCHES).backward()
            if every or index == MICRO_BATCHES - 1:
                own = max(float(parameter.grad.abs().max()) for parameter in alone.parameters())  # type: ignore[union-attr]
                bound += bound_of_mean(gather_objects(own), None)
                alone.zero_grad()
        return compressed, bound

    want = run(lambda: train_accumulating(every, STEPS), 2, backend="gloo")
    for (compressed, bound), (_, gradients) in zip(run(body, 2, options=options()), want, strict=True):
        errors = [float((compressed[name] - gradients[name]).abs().max()) for name in gradients]
        assert bound / 50 < max(errors) <= bound * 1.001
    for (losses, gradients), (theirs, their_gradients) in zip(
        run(lambda: train_accumulating(every, EXACT_STEPS), 2, options=options(**EXACT)), want, strict=True
    ):
        assert losses == theirs[:EXACT_STEPS]
        assert_same_tensors(gradients, their_gradients, "gradients")
    got = run(lambda: train_accumulating(every, STEPS), 2, options=options())
    assert_close([losses for losses, _ in got], [losses for losses, _ in want])


def test_weights_that_are_kept_by_a_smaller_mesh_are_gathered_in_it() -> None:
    """reshard_after_forward=2 of 4 ranks: the backward pass gathers among 2 ranks, compressed once more."""

    def body() -> None:
        model = fsdp2(reshard_after_forward=2)()
        loss = loss_of(model, dist.get_rank())
        assert zcomm.stats().all_gather.calls == 3
        loss.backward()
        assert zcomm.stats().all_gather.calls == 3
        small = groups_of(model[0])[0].post_forward_mesh_info.shard_process_group
        assert dist.get_world_size(small) == 2
        assert zcomm.stats(small).all_gather.calls > 0

    run(body, 4, options=options())


def compiled(backend: str) -> Callable[[nn.Module], nn.Module]:
    def block(block: nn.Module) -> nn.Module:
        if isinstance(block, Block):
            block.compile(backend=backend, fullgraph=True)  # raises if nothing was compiled
        return block

    return block


def test_compiled_blocks_move_the_same_bits() -> None:
    """aot_eager has the kernels of the model that is not compiled; its graphs are those of every other backend."""

    def body() -> None:
        got, want = (train(Job(wrap), EXACT_STEPS) for wrap in (fsdp2(block=compiled("aot_eager")), fsdp2()))
        assert got.losses == want.losses
        assert_same_tensors(got.parameters, want.parameters, "parameters")
        assert zcomm.stats().all_gather.calls == 2 * EXACT_STEPS * (3 + 3)  # three parts, forward and backward
        assert zcomm.stats().reduce_scatter.calls == 2 * EXACT_STEPS * 3

    run(body, 2, options=options())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_compiled_by_inductor(tmp_path: Path) -> None:
    job = Job(fsdp2(block=compiled("inductor")))
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    patience: dict[str, Any] = {"env": env, "seconds": 300.0, "group_seconds": 200.0}  # ranks compile
    want = trained(job, backend="gloo", **patience)
    for ours, theirs in zip(trained(job, EXACT_STEPS, options=options(**EXACT), **patience), want, strict=True):
        assert ours.losses == theirs.losses[:EXACT_STEPS]
        assert_same_tensors(ours.parameters, theirs.parameters, "parameters")
    assert_within_one_percent(trained(job, options=options(), **patience), want)


def test_gradient_divide_factor() -> None:
    """set_gradient_divide_factor makes FSDP2 call PREMUL_SUM, for tensors below min_bytes, too."""

    def body() -> list[Tensors]:
        results = []
        for factor in (None, 2.0, 4.0):
            model = fsdp2()()
            for module in model.modules() if factor is not None else ():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(factor)
            loss_of(model, dist.get_rank()).backward()
            results.append(whole_tensors(model, gradients=True))
        return results

    for min_bytes in (1, 1_000_000_000):
        formats = options(all_gather="exact", reduce_scatter="bf16", min_bytes=min_bytes)
        mean, same, half = run(body, 2, options=formats)[0]
        for name, gradient in mean.items():
            scale = float(gradient.abs().max())
            assert ((same[name] - gradient).abs() <= scale * 0.02).all(), name
            assert ((half[name] - gradient / 2).abs() <= scale * 0.02).all(), name
