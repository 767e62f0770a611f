"""What each rank says of itself before anything is measured, and what makes a result meaningless."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zcomm
import zcomm_bench
from zcomm import _core, codec
from zcomm_bench.report_file import machine

ALIKE = ("device", "zcomm", "torch", "nccl", "zcomm_sources", "zcomm_bench_sources")
PREFIXES = ("NCCL_", "ZCOMM_", "GLOO_", "TORCH_NCCL_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
HARMLESS = ("ZCOMM_NODE_SIZE", "ZCOMM_ISA", "ZCOMM_NCCL_LIB", "ZCOMM_LOG", "ZCOMM_FLIGHT_RECORDER")


class Refused(ValueError):
    """A result would mean nothing; the message is one line."""


def sources(package: Any) -> str:
    """SHA-256 of a package's Python files, by name and content."""
    root = Path(package.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def of_rank(device: str, gpu: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of this rank. `gpu`: what `lab.gpus.facts` says, and the "uuid"; empty on CPUs."""
    return {
        **machine(),
        "device": device,
        "nccl": None,
        **gpu,
        "isa": os.environ.get("ZCOMM_ISA", codec.cpu_isas()[-1]),
        "zcomm_sources": sources(zcomm),
        "zcomm_bench_sources": sources(zcomm_bench),
        "core_binary": hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest(),
        "variables": {name: text for name, text in sorted(os.environ.items()) if name.startswith(PREFIXES)},
    }


def rehearsal_of(ranks: Sequence[Mapping[str, Any]], asked: bool) -> str:
    """Why these ranks can only rehearse; empty where they are a cluster's. Raises Refused for what means nothing."""
    if len(ranks) < 2:
        raise Refused("ranks: expected at least 2, got 1: torchrun --nnodes N --nproc-per-node G -m zcomm_bench prove")
    for name in ALIKE:
        for rank, facts in enumerate(ranks):
            if facts[name] != ranks[0][name]:
                raise Refused(
                    f"{name}: expected the same on all ranks, got {ranks[0][name]} on rank 0 and {facts[name]} on "
                    f"rank {rank}"
                )
    for rank, facts in enumerate(ranks):
        set_here = [name for name in facts["variables"] if name.startswith("ZCOMM_") and name not in HARMLESS]
        if set_here:
            raise Refused(f"{set_here[0]}: expected it unset, got it on rank {rank}: the claims are of the defaults")
    if ranks[0]["device"] == "cpu":
        return "on CPUs"
    first: dict[str, int] = {}
    shared = [
        (first[each["uuid"]], rank) for rank, each in enumerate(ranks) if first.setdefault(each["uuid"], rank) < rank
    ]
    if len(first) == 1:
        return "on one GPU"
    if shared and not asked:
        one, other = shared[0]
        raise Refused(f"gpus: expected one for each rank, got ranks {one} and {other} on one: --rehearse allows that")
    return "as was asked for" if asked else ""
