"""What exact calls, the codec and each rank by itself show, before anything is predicted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from zcomm import codec
from zcomm_bench import measure
from zcomm_bench.prove.scale import CALLS, GATHER
from zcomm_bench.prove.stages import steps
from zcomm_bench.prove.stages.calls import cell
from zcomm_bench.prove.stages.ranks import Ranks

LOCAL_SAMPLES = 50
# Of one sample: on a GPU far longer than a launch; on a CPU short, so that some meet no other program.
LOCAL_SECONDS = {"cuda": 0.03, "cpu": 0.001}
EXACT_STEPS = 5
CODEC_ELEMENTS = 1 << 20


def run(ranks: Ranks) -> dict[str, Any]:
    """No compressed call is made here: predictions may rest on all of it."""
    ranks.say("sanity: links by exact calls, and the codec")
    rates = measure.rates(ranks.world)
    ranks.say("sanity: each rank by itself")
    local = {name: ranks.of_all(alone(ranks, work)) for name, work in works(ranks).items()}
    cells = []
    for collective in CALLS:
        num_bytes = max(ranks.scale.sizes)
        ranks.say(f"sanity: exact {collective} of {num_bytes} bytes")
        cells.append(cell(ranks, collective, num_bytes, [ranks.exact]))
    trained = []
    for model in ranks.scale.models:
        ranks.say("sanity: a training step without a network, and over the exact backend")
        row = steps.alone(ranks, model)
        ranks.release()
        trained.append({**row, "exact_steps": steps.exact_steps(ranks, model, EXACT_STEPS)})
        ranks.release()
    return {"rates": rates, "local": local, "cells": cells, "steps": trained}


def works(ranks: Ranks) -> dict[str, Callable[[], Any]]:
    """What every rank does alone, as fast as the others if their machines are alike."""
    size, device = ranks.scale.matrix, ranks.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    values = torch.randn(CODEC_ELEMENTS, device=device).to(torch.bfloat16)
    wire = codec.encode(values, GATHER)
    return {"matrix": lambda: torch.mm(left, left, out=out), "codec": lambda: codec.encode(values, GATHER, out=wire)}


def alone(ranks: Ranks, work: Callable[[], Any]) -> list[float]:
    """Seconds of one piece of work on this rank, while all ranks do the same."""
    number = 1
    repeated(ranks, work, number)  # the first is slow
    while repeated(ranks, work, number) < LOCAL_SECONDS[ranks.device.type]:
        number *= 2
    ranks.timed(lambda: None)  # all ranks are ready
    passes = number * ranks.hooks.local_passes()
    return [repeated(ranks, work, passes) / number for _ in range(LOCAL_SAMPLES)]


def repeated(ranks: Ranks, work: Callable[[], Any], number: int) -> float:
    ranks.finish()
    start = time.perf_counter()
    for _ in range(number):
        work()
    ranks.finish()
    return time.perf_counter() - start
