"""Parts of a model's parameters, each with outer steps of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zcomm.distributed._fsdp2 import reshard_holders
from zcomm.feedback import ErrorFeedback
from zcomm.outer.arguments import parameters_of
from zcomm.outer.averaging import Averaging
from zcomm.outer.rate import RateLimit


class Fragment:
    """Some parameters, their values after their last outer step, and what is under way for the next one."""

    def __init__(self, parameters: list[torch.Tensor], offset: int) -> None:
        self.parameters = parameters
        self.offset = offset  # its first outer step begins after as many inner steps
        self.values = self.read()
        self.averaging: Averaging
        self.evaluation: Averaging  # of the same values, without error feedback
        self.stepped_at = 0  # inner steps, at its last outer step
        self.taken_at = 0  # inner steps, when this site took over its values and had not trained
        self.mean: torch.Tensor | None = None  # once it is there
        self.scale = (0, 1.0)  # of a mean that begins after as many inner steps: sites by those that have trained
        self.comparison: Any = None  # of the values at all Sites, while it is under way
        self.began_at = self.gather_at = self.apply_at = 0  # inner steps

    def is_due(self, inner_steps: int, every: int) -> bool:
        """Tell whether an outer step begins after as many inner steps."""
        return inner_steps >= self.offset and (inner_steps - self.offset) % every == 0

    def plan(self, format: str, feedback: ErrorFeedback | None, key: str, group: Any) -> None:
        """Plan the calls of a group; ``key`` names the residuals."""
        shape = len(self.values), self.values.device, format
        self.averaging = Averaging(*shape, feedback, key, group)
        self.evaluation = Averaging(*shape, None, key, group)

    def reduce(self, averaging: Averaging, rate: RateLimit) -> None:
        """Begin to average the pseudo-gradients."""
        buffer = averaging.new_buffer()
        torch.sub(self.values, self.read(), out=buffer[: len(self.values)])
        rate.wait(averaging.bytes)
        averaging.reduce(buffer)

    def wait_for_mean(self) -> torch.Tensor:
        """Return the mean that is under way. Raises torch's DistBackendError if sites are lost, or have parted."""
        if self.mean is None:
            if self.comparison is not None:
                self.comparison.check()
            self.mean, (scaled_at, scale) = self.averaging.finish(), self.scale
            if self.began_at == scaled_at and scale != 1:
                self.mean.mul_(scale)
        return self.mean

    def read(self) -> torch.Tensor:
        """Return this rank's part of the parameters, as one tensor."""
        with torch.no_grad():
            return torch.cat([local_of(parameter).flatten() for parameter in self.parameters])

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of ``flat``, as read() returns it, in the shapes of the parameters on this rank."""
        shapes = [local_of(parameter).shape for parameter in self.parameters]
        parts = flat.split_with_sizes([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def write(self, flat: torch.Tensor) -> None:
        """Copy ``flat`` to the parameters, and drop whole copies that FSDP2 has of them."""
        reshard_holders(self.parameters)
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self.split(flat), strict=True):
                local_of(parameter).copy_(part)

    def step(self, optimizer: torch.optim.Optimizer, mean: torch.Tensor, keep: float) -> None:
        """Step ``optimizer`` with the mean of the pseudo-gradients, and mix ``keep`` of the own parameters into the
        new values. Leaves gradients as they were, and after an exception parameters, too."""
        own = self.read()
        gradients = [(parameter, parameter.grad) for parameter in parameters_of(optimizer)]
        for parameter, _ in gradients:
            parameter.grad = None  # so that the optimizer leaves the other fragments alone
        self.write(self.values)
        try:
            for parameter, part in zip(self.parameters, self.split(mean), strict=True):
                parameter.grad = like(part, parameter)
            optimizer.step()
            self.values = self.read()
            if keep:
                self.write(torch.lerp(self.values, own, keep))
        except BaseException:
            self.write(own)
            raise
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, itself if it is whole."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part ``local`` of a tensor that is distributed like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def cut(parameters: list[torch.Tensor], number: int) -> list[list[torch.Tensor]]:
    """Cut into parts of about equal size, none empty. Counts elements of whole DTensors, so that all ranks agree."""
    parts: list[list[torch.Tensor]] = [[]]
    left, total = len(parameters), sum(parameter.numel() for parameter in parameters)
    done = 0
    for parameter in parameters:
        missing = number - len(parts)
        is_full = done + parameter.numel() / 2 > len(parts) * total / number
        if parts[-1] and missing and (is_full or left <= missing):
            parts.append([])
        parts[-1].append(parameter)
        done += parameter.numel()
        left -= 1
    return parts
