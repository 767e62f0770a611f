"""Compares CRCs of compressed results on every rank with those of ``zcomm_bench.reference``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import zcomm
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm_bench.prove import bits
from zcomm_bench.prove.stages import weights
from zcomm_bench.prove.stages.ranks import DEFAULTS, Ranks
from zcomm_bench.reference import Values
from zcomm_bench.spec import option_of
from zcomm_bench.tensors import tensor_of, values_of

CHUNK_BYTES = 4096  # so that small tensors go in several chunks


def run(ranks: Ranks) -> dict[str, Any]:
    """A row per case, with the CRC of each rank's result and of what it should be."""
    group = ranks.zcomm_group(min_bytes=1, chunk_bytes=CHUNK_BYTES)
    rows, last = [], ""
    for case in bits.cases(ranks.scale.bits_elements):
        if case.collective != last:
            ranks.say(f"bits: {case.collective}")
            last = case.collective
        own = tensor_of(case.input(ranks.rank, ranks.size), getattr(torch, case.dtype)).to(ranks.device)
        option = option_of(case.collective)
        other: dict[str, Any] = {} if case.format == DEFAULTS[option] else {option: case.format}
        with zcomm.override(**other):
            result = call(case, own, group)
        ranks.finish()
        ranks.hooks.change_result(case.collective, result)
        values, wanted = values_of(result), case.result(ranks.rank, ranks.world.node_of)
        found = (bits.crc_of(values), bits.crc_of(wanted), first_difference(values, wanted))
        crcs, expected, wrong = zip(*ranks.of_all(found), strict=True)
        rows.append({**vars(case), "crc": crcs, "expected": expected, "first_wrong": wrong})
    stats = zcomm.stats(group)
    counted = {name: getattr(stats, name).calls for name in bits.COLLECTIVES}
    if ranks.world.nodes > 1:  # weights go whole inside a node
        trained = weights.run(ranks)
        counted["weights"] = trained["differences"]
        rows += trained["rows"]
    return {"rows": rows, "compressed_calls": counted}


def call(case: bits.Case, own: torch.Tensor, group: Any) -> torch.Tensor:
    """Make the call on `own`, the rank's input; returns what the rank has afterwards."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    match case.collective:
        case "all_gather":
            whole = own.new_empty(size * case.elements)
            slot = whole[rank * case.elements : (rank + 1) * case.elements]
            slot.copy_(own)
            all_gather_single(whole, slot, group=group)
            return whole
        case "reduce_scatter":
            shard = own.new_empty(case.elements)
            reduce_scatter_single(shard, own, group=group)
            return shard
        case "all_reduce":
            dist.all_reduce(own, group=group)
        case "broadcast":
            dist.broadcast(own, 0, group=group)
        case "all_to_all":
            received = torch.empty_like(own)
            dist.all_to_all_single(received, own, group=group)
            return received
        case "gather":
            parts = [torch.empty_like(own) for _ in range(size)] if rank == 0 else None
            dist.gather(own, parts, dst=0, group=group)
            return torch.cat(parts) if parts else own
        case "scatter":
            shard = own.new_empty(case.elements)
            dist.scatter(shard, list(own.split(case.elements)) if rank == 0 else None, src=0, group=group)  # type: ignore[no-untyped-call]
            return shard
        case "send_recv":
            if rank % 2:
                dist.recv(own, rank - 1, group=group)
            elif rank + 1 < size:
                dist.send(own, rank + 1, group=group)
    return own


def first_difference(values: Values, wanted: Values) -> str | None:
    """The first element whose bits differ, in words."""
    differs = np.flatnonzero((values.view(np.uint8) != wanted.view(np.uint8)).reshape(values.size, -1).any(axis=1))
    if differs.size == 0:
        return None
    first = int(differs[0])
    return f"{differs.size} of {values.size} elements, first {first}: expected {wanted[first]}, got {values[first]}"
