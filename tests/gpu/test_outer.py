"""The outer step of parameters on a GPU: the bits of one on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.expected import assert_same_bits
from support.gpu_device import DEVICE
from support.gpu_world import run

import zcomm

EVERY, STEPS = 3, 8


def values_after(device: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(tensor.to(device, copy=True)) for tensor in tensors]
    sgd = torch.optim.SGD(parameters, lr=0.5, momentum=0.5, nesterov=True, foreach=False)
    outer = zcomm.outer.OuterStep(sgd, every=EVERY, fragments=2, delay=2, format="int4:64")
    for step in range(STEPS):
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data.add_((tensor * (step + dist.get_rank())).to(device))
        outer.step()
    outer.synchronize()
    return [parameter.detach().cpu() for parameter in parameters]


def test_the_bits_are_those_of_cpus() -> None:
    def body() -> None:
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(size, generator=generator) for size in (1000, 333)]
        for got, want in zip(values_after(DEVICE, tensors), values_after("cpu", tensors), strict=True):
            assert_same_bits(got, want, "parameter")

    run(body, 2)
