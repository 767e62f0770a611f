"""Calls beside matrix multiplications: what each takes from the other, exact and compressed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm_bench.prove.scale import CALLS
from zcomm_bench.prove.stages.ranks import Ranks

TURNS = 6
WARMUP_TURNS = 1
COLUMNS = ("product_alone", "call_alone", "product_beside", "call_beside")


class Products:
    """Products of square matrices, one after the other; each is waited for."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        self._left = torch.randn(ranks.scale.matrix, ranks.scale.matrix, device=ranks.device).to(dtype)
        self._out = torch.empty_like(self._left)

    def one(self) -> None:
        torch.mm(self._left, self._left, out=self._out)
        if self._ranks.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def many(self, count: int) -> None:
        for _ in range(count):
            self.one()


def start_call(collective: str, whole: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    if collective == "all_gather":
        return all_gather_single(whole, shard, group=group, async_op=True)
    return reduce_scatter_single(shard, whole, group=group, async_op=True)


def watch(work: Any, device: torch.device) -> Callable[[], bool]:
    """Tells whether a call is done. On a CPU a thread waits for it: Gloo ends some of its calls only then."""
    if device.type == "cuda":
        return work.is_completed  # type: ignore[no-any-return]
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    return lambda: not waiter.is_alive()


def turn(
    ranks: Ranks, products: Products, collective: str, whole: torch.Tensor, shard: torch.Tensor, group: Any
) -> Any:
    """Seconds as COLUMNS has them. Beside a call products are made until it is done; what is left of the last one then
    counts for the call."""
    count = 0

    def beside() -> None:
        nonlocal count
        is_done = watch(start_call(collective, whole, shard, group), ranks.device)
        while count == 0 or not is_done():
            products.one()
            count += 1

    call_alone = ranks.timed(lambda: start_call(collective, whole, shard, group).wait())
    together = ranks.timed(beside)
    product_alone = ranks.timed(lambda: products.many(count)) / count
    return [product_alone, call_alone, together / count, together]


def run(ranks: Ranks) -> dict[str, Any]:
    """All-gather and reduce-scatter of one size."""
    products, rows = Products(ranks), []
    for collective in ("all_gather", "reduce_scatter"):
        ranks.say(f"beside matrix multiplications: {collective} of {ranks.scale.beside_bytes} bytes")
        dtype = getattr(torch, CALLS[collective])
        elements = ranks.scale.beside_bytes // dtype.itemsize // ranks.size
        whole = torch.randn(ranks.size * elements, device=ranks.device).to(dtype)
        slot = whole[ranks.rank * elements : (ranks.rank + 1) * elements]
        shard = slot if collective == "all_gather" else slot.clone()
        samples: dict[str, list[list[float]]] = {"exact": [], "compressed": []}
        ways = (ranks.exact, ranks.compressed)
        for number in range(WARMUP_TURNS + TURNS):
            for way in ways if number % 2 else reversed(ways):
                taken = turn(ranks, products, collective, whole, shard, way.group)
                if number >= WARMUP_TURNS:
                    samples[way.name].append(taken)
        slowest = {name: ranks.slowest(found) for name, found in samples.items()}
        rows.append({"collective": collective, "bytes": whole.nbytes, "columns": COLUMNS, "samples": slowest})
    dist.barrier()
    return {"cells": rows}
