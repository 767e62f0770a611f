"""Ways to write to the weights of a model under FSDP2 that change the rows of some ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

import zcomm
from support.weight_changes import Change, load_after, locals_of

SOME_ROWS: dict[str, Change] = {}


def some_rows(change: Change) -> Change:
    SOME_ROWS[change.__name__] = change
    return change


def first_row(tensor: torch.Tensor) -> torch.Tensor:
    """A factor for the whole tensor, which leaves all rows but the first alone."""
    factor = torch.ones(tensor.shape)
    factor[:1] = 1.5
    return factor


def split_as(parameter: Any, whole: torch.Tensor) -> Any:
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@some_rows
def data_times_a_mask(model: nn.Module, _: Path) -> None:
    """Write as pruning does, and as codebooks reset dead rows."""
    for parameter in model.parameters():
        parameter.data.mul_(split_as(parameter, first_row(parameter)))


@some_rows
def clamp_of_data(model: nn.Module, _: Path) -> None:
    """Write as CLIP does to its logit scale."""
    for parameter in model.parameters():
        parameter.data.clamp_(max=float(full(parameter).max()) - 1e-3)


@some_rows
def foreach_times_a_mask(model: nn.Module, _: Path) -> None:
    parameters = list(model.parameters())
    torch._foreach_mul_([p.data for p in parameters], [split_as(p, first_row(p)) for p in parameters])


@some_rows
def numpy_times_a_mask(model: nn.Module, _: Path) -> None:
    for parameter in model.parameters():
        parameter.detach().to_local().numpy()[...] *= split_as(parameter, first_row(parameter)).to_local().numpy()


@some_rows
def dcp_load_of_other_rows(model: nn.Module, folder: Path) -> None:
    load_after(data_times_a_mask, model, folder)


@some_rows
def one_rank_alone(model: nn.Module, _: Path) -> None:
    if dist.get_rank() == 0:
        for shard in locals_of(model):
            shard.data.mul_(1.5)


@some_rows
def one_rank_alone_counted(model: nn.Module, _: Path) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        for parameter in model.parameters():
            parameter.to_local().mul_(1.5)


def full(parameter: Any) -> torch.Tensor:
    with zcomm.exact():
        whole: torch.Tensor = parameter.full_tensor().detach()
    return whole
