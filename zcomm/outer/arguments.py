"""Checks of the arguments of an OuterStep. They raise ValueError."""

from __future__ import annotations

import torch


def check_parameters(parameters: list[torch.Tensor], among_sites: bool) -> None:
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    if len(kinds) != 1 or next(iter(kinds))[0] != torch.float32:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
        raise ValueError(f"optimizer: expected parameters of float32 on one device, got {found}")
    if among_sites and not parameters[0].is_cpu:
        raise ValueError(f"sites: expected parameters on a CPU, got some on {parameters[0].device}")


def check_numbers(every: int, fragments: int, delay: int, keep: float, most: int, connections: int | None) -> None:
    if every < 1:
        raise ValueError(f"every: expected at least 1, got {every}")
    if not 1 <= fragments <= (most := min(every, most)):
        raise ValueError(
            f"fragments: expected 1 to {most}, the lesser of every and the number of parameters, got {fragments}"
        )
    if not 0 <= delay < every:
        raise ValueError(f"delay: expected 0 to every - 1 = {every - 1}, got {delay}")
    if not 0 <= keep <= 1:
        raise ValueError(f"keep: expected 0 to 1, got {keep}")
    if connections is not None and not 1 <= connections <= 64:
        raise ValueError(f"connections: expected 1 to 64, got {connections}")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for chosen in optimizer.param_groups for parameter in chosen["params"]]
