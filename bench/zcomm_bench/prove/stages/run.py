"""All stages in their order, on every rank: predictions are on the disk before what they predict is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zcomm._units import rate_text
from zcomm_bench.prove import facts, plots, prediction, report
from zcomm_bench.prove.scale import CLUSTER, REHEARSAL, Scale
from zcomm_bench.prove.stages import beside, bits, calls, drill, networks, sanity, steps
from zcomm_bench.prove.stages.ranks import Hooks, Ranks, start

STAGES: Mapping[str, Callable[[Ranks], dict[str, Any]]] = {
    "noise": calls.noise,
    "bits": bits.run,
    "sweep": calls.sweep,
    "beside": beside.run,
    "steps": steps.run,
    "networks": networks.run,
}


def link_of(given: float | None, cards: list[Mapping[str, Any]], nodes: int) -> dict[str, Any]:
    """What a node's link should carry: as given, or as its network cards say, those of InfiniBand together."""
    if given is not None:
        return {"bytes_per_second": given, "source": "given by --link"}
    known = [card for card in cards if card["bits_per_second"] is not None]
    infiniband = [card for card in known if ":" in card["name"]]
    chosen = infiniband or sorted(known, key=lambda card: card["bits_per_second"])[-1:]
    if nodes == 1 or not chosen:
        return {"bytes_per_second": None, "source": "no card tells; --link does"}
    rate = sum(card["bits_per_second"] for card in chosen) / 8
    return {"bytes_per_second": rate, "source": f"cards {', '.join(card['name'] for card in chosen)}"}


def staged(stage: Callable[[Ranks], dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """What a stage has measured, once all ranks have ended it."""
    found = stage(ranks)
    dist.barrier()
    return found


def predict(ranks: Ranks, found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the predictions, before anything that they predict is measured."""
    predictions = prediction.make(found, ranks.scale.sizes)
    ranks.hooks.change_predictions(predictions)
    if ranks.rank == 0:
        report.write(folder / "predictions.json", predictions)
    rate = rate_text(predictions["link_bytes_per_second"])
    ranks.say(f"predictions are written, for {rate} {predictions['link_is']}")
    dist.barrier()
    return predictions


def measure(ranks: Ranks, raw: dict[str, Any], folder: Path, with_drill: bool) -> dict[str, Any]:
    """All raw samples."""
    raw["sanity"] = staged(sanity.run, ranks)
    raw["predictions"] = predict(ranks, raw["sanity"], folder)
    for name, stage in {**STAGES, **({"drill": drill.run} if with_drill else {})}.items():
        raw[name] = staged(stage, ranks)
    return raw


def run(
    folder: Path,
    link: float | None = None,
    *,
    rehearse: bool = False,
    with_drill: bool = False,
    scale: Scale | None = None,
    hooks: Hooks | None = None,
) -> bool:
    """Measure on the ranks that a launcher has started, and let rank 0 write the report into `folder`. Returns whether
    all claims pass, the same on all ranks. Raises facts.Refused where a result would mean nothing, and ValueError as
    `measure.world`."""
    device, own = start()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    rehearsal = facts.rehearsal_of(every, rehearse)
    ranks = Ranks(device, scale or (REHEARSAL if rehearsal else CLUSTER), hooks, link)
    if rehearsal:
        ranks.say(f"{report.REHEARSAL}: {rehearsal}; nothing here is a cluster's")
    shape = {"nodes": ranks.world.nodes, "ranks_per_node": ranks.world.ranks_per_node}
    raw = {
        "schema": report.SCHEMA,
        "rehearsal": rehearsal,
        "environment": {**shape, "node_of": ranks.world.node_of, "ranks": every},
        "link": link_of(link, every[0]["network_cards"], ranks.world.nodes),
        "scale": asdict(ranks.scale),
    }
    raw = measure(ranks, raw, folder, with_drill)
    passes = [False]
    if ranks.rank == 0:
        made = report.judged(raw)
        report.write(folder / "report.json", made)
        (folder / "report.md").write_text(report.markdown(made))
        plots.draw(made, folder)
        ranks.say(f"written to {folder}")
        report.show(made)
        passes = [report.passes(made)]
    dist.broadcast_object_list(passes, 0)
    return passes[0]
