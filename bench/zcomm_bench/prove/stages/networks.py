"""The same cluster with fewer network cards, and over sockets: slow networks. ``python -m
zcomm_bench.prove.stages.networks`` is a rank of such a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from zcomm._network import network_cards
from zcomm_bench.prove import prediction
from zcomm_bench.prove.scale import LARGEST, Scale
from zcomm_bench.prove.stages import calls, children, sanity
from zcomm_bench.prove.stages.ranks import Ranks, start

LIMIT_SECONDS = 300.0


def variants(cards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Networks that NCCL can be restricted to, of this host's cards: variables, and what the link should carry."""
    infiniband = [card for card in cards if ":" in card["name"]]
    ethernet = sorted(
        (card for card in cards if ":" not in card["name"]), key=lambda card: -(card["bits_per_second"] or 0)
    )
    found = []
    if len(infiniband) > 1:
        found.append(variant("one InfiniBand card", infiniband[0], {"NCCL_IB_HCA": f"={infiniband[0]['name']}"}))
    if infiniband and ethernet:
        sockets = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": f"={ethernet[0]['name']}"}
        found.append(variant("sockets", ethernet[0], sockets))
    if not infiniband and len(ethernet) > 1:
        found.append(variant("one Ethernet card", ethernet[0], {"NCCL_SOCKET_IFNAME": f"={ethernet[0]['name']}"}))
    return found


def variant(name: str, card: Mapping[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    bits = card["bits_per_second"]
    return {"name": name, "variables": variables, "bytes_per_second": None if bits is None else bits / 8}


def why_not(ranks: Ranks, found: Sequence[Any]) -> str:
    """Why there is nothing to run; empty if there is."""
    if ranks.device.type == "cpu":
        return "on CPUs Gloo has one card"
    if ranks.world.nodes == 1:
        return "one node has no network"
    if len(set(ranks.of_all(len(found)))) > 1:
        return "nodes have unlike cards"
    return "" if found else "there is one card, or none that tells its name"


def run(ranks: Ranks) -> dict[str, Any]:
    """The largest sizes of the sweep over each network."""
    found = variants(network_cards())
    if reason := why_not(ranks, found):
        ranks.say(f"fewer network cards: not run: {reason}")
        return {"measured": [], "not_run": reason}
    measured: list[dict[str, Any]] = []
    for each in found:
        ranks.say(f"fewer network cards: {each['name']}")
        scale = replace(ranks.scale, sizes=ranks.scale.sizes[-LARGEST:], models=())
        (first, *_) = children.run(ranks, __name__, asdict(scale), each["variables"], LIMIT_SECONDS)
        if "ended" in first:
            end, log = f"{each['name']} ended {first['ended']}", first["log"]
            ranks.say("\n".join([f"fewer network cards: {end}", *log]))
            return {"measured": measured, "not_run": f"{end}: {children.nameless(' '.join(log[-1:]))}"}
        link = {"bytes_per_second": each["bytes_per_second"], "source": "the card"}
        measured.append({"name": each["name"], "variables": each["variables"], "link": link, **first})
    return {"measured": measured, "not_run": ""}


def measure(ranks: Ranks) -> dict[str, Any]:
    """Sanity, predictions and sweep, as of the whole network."""
    found = {"sanity": sanity.run(ranks)}
    predictions = prediction.make(found["sanity"], ranks.scale.sizes)
    return {**found, "predictions": predictions, "sweep": calls.sweep(ranks)}


def main() -> None:
    spec, path = children.arguments()
    device, _ = start()
    ranks = Ranks(device, Scale(**{**spec, "sizes": tuple(spec["sizes"]), "models": ()}))
    children.write(path, measure(ranks))
    os._exit(0)


if __name__ == "__main__":
    main()
