"""Residuals of error feedback, wherever they are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.training import make_batch, make_model
from support.worlds import options, run
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm.feedback import ErrorFeedback
from zcomm.outer.averaging import Averaging


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """Of the fourth of equal steps."""
    for _ in range(4):
        model.zero_grad()
        inputs, targets = make_batch(dist.get_rank())
        (model(inputs) - targets).square().mean().backward()
    found: list[Any] = [parameter.grad for parameter in model.parameters()]
    return torch.cat([getattr(grad, "_local_tensor", grad).flatten() for grad in found])


def of_ddp(feedback: ErrorFeedback | None) -> torch.Tensor:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(zcomm.ddp.CompressState("int4:128", error_feedback=feedback), zcomm.ddp.compress_hook)
    return gradients(model)


def of_fsdp2(feedback: ErrorFeedback | None) -> torch.Tensor:
    model = make_model()
    for block in [*model, model]:
        fully_shard(block)
    zcomm.fsdp.compress(model, gradients="int4:128", error_feedback=feedback, exempt=())
    return gradients(model)


def of_outer_steps(feedback: ErrorFeedback | None) -> torch.Tensor:
    averaging = Averaging(256, torch.device("cpu"), "int4:64", feedback, "values", None)
    for _ in range(3):
        buffer = averaging.new_buffer()
        buffer.copy_(torch.randn(256, generator=torch.Generator().manual_seed(dist.get_rank())))
        averaging.reduce(buffer)
        mean = averaging.finish().clone()
    return mean


@pytest.mark.parametrize("of", [of_ddp, of_fsdp2, of_outer_steps])
def test_a_decay_of_0_is_no_feedback(of: Callable[[ErrorFeedback | None], torch.Tensor]) -> None:
    def body() -> None:
        without, forgotten, kept = of(None), of(ErrorFeedback(decay=0.0)), of(ErrorFeedback())
        assert torch.equal(without, forgotten) and not torch.equal(without, kept)

    run(body, 2, nodes=[0, 1], options=options())


def test_a_state_that_was_loaded_and_not_used_yet_is_saved_again() -> None:
    first, again = ErrorFeedback(), ErrorFeedback()
    first.use("0/rank 0", "layout", 48, lambda size: np.zeros(size, np.uint8))
    again.load_state_dict(first.state_dict())
    assert list(again.state_dict()["residuals"]) == ["0/rank 0"]
