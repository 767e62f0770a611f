"""Weights that FSDP2 gathers by lossless differences, beside those that the ranks' shards hold: the same bits."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch

import zcomm
from zcomm_bench.prove.stages import steps
from zcomm_bench.prove.stages.ranks import Ranks
from zcomm_bench.tensors import values_of

STEPS = 3  # whole weights, then two differences


def run(ranks: Ranks) -> dict[str, Any]:
    """A row for each step of a small model, with each rank's CRC of what it gathers and of what it should; and how many
    differences the model's units have gathered."""
    ranks.say("bits: weights by lossless differences")
    model = replace(ranks.scale.models[0], width=2 * steps.HEAD, layers=2, batch=1)
    copy = steps.Copy(model, ranks.zcomm_group(min_bytes=1), ranks.device)
    compression = zcomm.fsdp.compress(copy.module, weights="lossless")
    layers: Any = copy.module.layers
    rows = []
    for number in range(STEPS):
        copy.compute(steps.text_of(model, ranks.rank, number, ranks.device))
        copy.update()
        expected = crc_of([whole(parameter) for parameter in copy.layer_parameters()])
        for layer in layers:
            layer.unshard()
        gathered = crc_of([parameter.detach().clone() for parameter in copy.layer_parameters()])
        for layer in layers:
            layer.reshard()
        crcs, wanted = zip(*ranks.of_all((gathered, expected)), strict=True)
        about = {"collective": "weights", "dtype": "bfloat16", "format": f"lossless, step {number + 1}"}
        rows.append({**about, "crc": crcs, "expected": wanted, "first_wrong": [None] * ranks.size})
    generations = [one.generation for one in compression.stats().values()]
    compression.disable()
    return {"rows": rows, "differences": sum(max(0, each - 1) for each in generations)}


def whole(parameter: Any) -> torch.Tensor:
    """All of a sharded parameter as FSDP2 gathers it, by exact calls."""
    with zcomm.exact():
        found: torch.Tensor = parameter.full_tensor()
    return found.detach().to(torch.bfloat16)


def crc_of(tensors: list[torch.Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(values_of(tensor).tobytes(), found)
    return found
