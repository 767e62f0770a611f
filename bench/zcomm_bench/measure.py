"""Measures a cluster: links, hops and the codec for ``python -m zcomm_bench plan``, and for ``compress="auto"`` which
calls gain by compression.

Every rank runs `run`, under torchrun or srun. All ranks measure the same things in the same order.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from zcomm import _core, codec
from zcomm._node import node_identity, number_nodes
from zcomm._units import rate_text, time_text
from zcomm.distributed.decisions import KIND, SCHEMA, machine
from zcomm.distributed.groups import backend_of
from zcomm.distributed.options import Options
from zcomm.distributed.single import all_gather_single, reduce_scatter_single
from zcomm.distributed.stats import stats_of
from zcomm_bench import gpu_clock
from zcomm_bench.planner import collectives, lossless

SMALL_BYTES = 1 << 10
LEAST_SECONDS = 0.5  # a large message takes at least this long, so that bursts of a limited link do not count
MAX_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
REPEATS = 5
SMALL_REPEATS = 40  # of calls that bytes do not bound, and other programs may double
CODEC_FORMAT = "int8:256"
CODEC_ELEMENTS = {"cpu": 4 << 20, "cuda": 64 << 20}  # on a GPU its pass is far longer than its launch
LEARNING_RATE = 3e-4  # of the weights whose differences are encoded
BULK_SECONDS = 0.05  # from calls of this length on, bytes alone decide
DTYPES = {"all_gather": torch.bfloat16, "reduce_scatter": torch.float32, "all_reduce": torch.float32}  # mixed precision

Group = Any  # a process group of torch.distributed


@dataclass(frozen=True)
class World:
    """The groups that are measured: a node's ranks, and the ranks of equal local rank in all nodes. None: one rank.
    `node_of` has the node of each rank."""

    device: torch.device
    nodes: int
    ranks_per_node: int
    intra: Group | None
    inter: Group | None
    node_of: list[int]


def world(device: torch.device) -> World:
    """The groups of this rank, by the nodes that a zcomm group of these ranks has.

    Raises ValueError where nodes have unequal numbers of ranks."""
    identities = [("", "", "")] * dist.get_world_size()
    dist.all_gather_object(identities, node_identity())
    members: dict[int, list[int]] = {}
    node_of = [*number_nodes(identities, range(len(identities)), Options().node_size)]
    for rank, node in enumerate(node_of):
        members.setdefault(node, []).append(rank)
    sizes = [len(ranks) for ranks in members.values()]
    if len(set(sizes)) > 1:
        raise ValueError(f"nodes: expected as many ranks in each, got {', '.join(map(str, sizes))}")
    intra = _group_of([*members.values()]) if sizes[0] > 1 else None
    inter = _group_of([list(ranks) for ranks in zip(*members.values(), strict=True)]) if len(sizes) > 1 else None
    return World(device, len(sizes), sizes[0], intra, inter, node_of)


def _group_of(groups: list[list[int]]) -> Group:
    """The one that this rank is in."""
    return dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """The slowest rank's median over `repeats` calls that all ranks start at once."""
    samples = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - start)
    slowest = torch.tensor([median(samples)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _exchange(group: Group, num_bytes: int, device: torch.device) -> Callable[[], Any]:
    """An all-to-all in which each rank sends `num_bytes` to each of its peers."""
    size = dist.get_world_size(group)
    sent = torch.zeros(num_bytes * size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _link(group: Group, senders: int, everyone: Group, device: torch.device) -> dict[str, float]:
    """Rates of an all-to-all in `group`, of which `senders` share the link that is measured, and of a ring's hop."""
    peers = dist.get_world_size(group) - 1
    small = seconds(_exchange(group, SMALL_BYTES, device), device, SMALL_REPEATS)
    num_bytes = 1 << 20
    while True:
        large = seconds(_exchange(group, num_bytes, device), device)
        if large >= LEAST_SECONDS / REPEATS or 2 * num_bytes * (peers + 1) > MAX_BYTES[device.type]:
            break
        num_bytes *= 2
    shard = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    whole = torch.empty(SMALL_BYTES * dist.get_world_size(everyone), dtype=torch.uint8, device=device)
    ring = seconds(lambda: all_gather_single(whole, shard, group=everyone), device, SMALL_REPEATS)
    return {
        "bytes_per_second": senders * peers * num_bytes / (large - small if large > small else large),
        "exchange_seconds": small,
        "hop_seconds": ring / (dist.get_world_size(everyone) - 1),
        "message_bytes": num_bytes,
    }


def _codec_rate(device: torch.device) -> float:
    """Bytes that the codec reads and writes per second while all ranks encode and decode."""
    values = torch.randn(CODEC_ELEMENTS[device.type], dtype=torch.bfloat16, device=device)
    wire = codec.encode(values, CODEC_FORMAT)
    taken = seconds(lambda: codec.decode(codec.encode(values, CODEC_FORMAT, out=wire), CODEC_FORMAT, values), device)
    wire_bytes = codec.wire_bytes(CODEC_FORMAT, "bfloat16", values.numel())
    return 2 * float(values.numel() * values.element_size() + wire_bytes) / taken


def _lossless_rate(device: torch.device) -> float:
    """The same of lossless differences."""
    elements, sizes = CODEC_ELEMENTS[device.type], list[int]()
    turn = _host_difference(elements) if device.type == "cpu" else _device_difference(elements, device)
    taken = seconds(lambda: sizes.append(turn()), device)
    return collectives.lossless_bytes(elements, elements, 8 * median(sizes) / elements) / taken


def _host_difference(elements: int) -> Callable[[], int]:
    """Encodes and decodes a step of weights, forth and back; returns the bytes of its difference."""
    old, new = lossless.changed_weights(elements, LEARNING_RATE)
    sender, receiver = old.copy(), old.copy()
    body = np.empty(_core.max_lossless_bytes(elements), np.uint8)
    turns = itertools.cycle((new, old))

    def turn() -> int:
        values = lossless.view_of(next(turns))
        num_bytes, _ = _core.encode_difference(values, lossless.view_of(sender), body.ctypes.data)
        _core.decode_difference(body.ctypes.data, num_bytes, lossless.view_of(receiver))
        return num_bytes

    return turn


def _device_difference(elements: int, device: torch.device) -> Callable[[], int]:
    """The same in GPU memory. As in a gather, the host waits for the size."""
    old, new = gpu_clock.changed_weights(elements, LEARNING_RATE, device)
    sender, receiver = old.clone(), old.clone()
    message = torch.empty(lossless.HEADER_BYTES + _core.max_lossless_bytes(elements), dtype=torch.uint8, device=device)
    sender_hash, receiver_hash, size, status = torch.zeros(4, 1, dtype=torch.int64, device=device)
    place = (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)

    def view(values: torch.Tensor) -> _core.Values:
        return values.data_ptr(), elements, "bfloat16"

    for base, hash in ((sender, sender_hash), (receiver, receiver_hash)):  # whole values, which are not sent
        _core.encode_lossless_on_device([(view(old), view(base), 0, 0, hash.data_ptr(), 0)], *place)
    turns = itertools.cycle((new, old))

    def turn() -> int:
        job = (view(next(turns)), view(sender), 1, message.data_ptr(), sender_hash.data_ptr(), size.data_ptr())
        _core.encode_lossless_on_device([job], *place)
        num_bytes = int(size)
        received = (message.data_ptr(), num_bytes, view(receiver), 1, receiver_hash.data_ptr(), status.data_ptr())
        _core.decode_lossless_on_device([received], *place)
        if int(status) != 0:
            raise RuntimeError(f"a difference was not decoded: status {int(status)}")
        return num_bytes

    return turn


def _exact_reduce_factor(device: torch.device) -> float:
    """Seconds of an exact reduce-scatter over those of an all-gather of as many bytes: 2 for Gloo, 1 for NCCL."""
    ranks = dist.get_world_size()
    whole = torch.zeros((1 << 20) * ranks, dtype=torch.float32, device=device)
    shard = torch.zeros(1 << 20, dtype=torch.float32, device=device)
    gather = seconds(lambda: all_gather_single(whole, shard), device)
    scatter = seconds(lambda: reduce_scatter_single(shard, whole), device)
    return max(1.0, scatter / gather)


def _decisions(groups: World, device: torch.device) -> list[dict[str, Any]]:
    """Seconds of exact and compressed calls, by rehearsals in the groups that a training makes: all ranks, those of a
    node, and those of equal local rank. The formats are those of the environment."""
    nodes, ranks = groups.nodes, groups.ranks_per_node
    rows = _rehearsals(dist.group.WORLD, nodes, ranks, device)
    if groups.intra is not None and groups.inter is not None:
        rows += _rehearsals(groups.intra, 1, ranks, device)
        rows += _rehearsals(groups.inter, nodes, 1, device)
    return rows


def _rehearsals(members: Group, nodes: int, ranks_per_node: int, device: torch.device) -> list[dict[str, Any]]:
    formats = Options()
    # As HSDP's replicas have it.
    reduced = formats.all_reduce if formats.all_reduce != "exact" else formats.reduce_scatter
    options = Options(compress="auto", decisions="", min_bytes=1, all_reduce=reduced, forms="single")
    group: Any = dist.new_group(
        dist.get_process_group_ranks(members), backend="zcomm", pg_options=options, use_local_synchronization=True
    )
    kinds = [(name, False) for name in DTYPES if not getattr(options, name).startswith("exact")]
    if nodes > 1 and kinds[:1] == [("all_gather", False)]:
        kinds.append(("all_gather", True))
    for collective, again in kinds:
        num_bytes = 1 << (max(1, formats.min_bytes).bit_length() - 1)
        while num_bytes <= MAX_BYTES[device.type]:
            _call(group, collective, num_bytes, device, again)
            if stats_of(backend_of(group)).decisions[-1].exact_seconds >= BULK_SECONDS:
                break
            num_bytes *= 2
    place = {"ranks": f"{nodes}x{ranks_per_node}", "device": device.type}
    left_out = ("one_hop", "rounds")
    return [
        place | {name: value for name, value in asdict(decision).items() if name not in left_out}
        for decision in stats_of(backend_of(group)).decisions
    ]


def _call(group: Group, collective: str, num_bytes: int, device: torch.device, again: bool) -> None:
    """A call of at least `num_bytes`, which the group decides about. `again`: as `Decision` has it."""
    dtype, ranks = DTYPES[collective], dist.get_world_size(group)
    slots = torch.zeros(ranks, -(-num_bytes // (dtype.itemsize * ranks)), dtype=dtype, device=device)
    whole, shard = slots.view(-1), slots[dist.get_rank(group)]
    if collective == "all_gather":
        backend_of(group).plan(whole, shard, again=again)
    elif collective == "reduce_scatter":
        reduce_scatter_single(torch.empty_like(shard), whole, group=group)
    else:
        dist.all_reduce(whole, group=group)


def run(device: torch.device) -> dict[str, Any]:
    """The calibration of this cluster; the process group is initialized, and all ranks call this.

    Returns the same on every rank: rates in bytes per second and times in seconds. Raises ValueError for one rank."""
    if dist.get_world_size() == 1:
        raise ValueError("measure: expected at least 2 ranks; start it with torchrun or srun")
    groups = world(device)
    calibration: dict[str, Any] = {"schema": SCHEMA, **rates(groups), "machine": machine(device.type)}
    calibration["lossless_bytes_per_second"] = _lossless_rate(device)
    calibration["decisions"] = _decisions(groups, device)
    return calibration


def rates(groups: World) -> dict[str, Any]:
    """The shape of the cluster, its links by exact calls, and the codec by itself: no compressed call is made."""
    device, everyone = groups.device, dist.group.WORLD
    found: dict[str, Any] = {
        "nodes": groups.nodes,
        "ranks_per_node": groups.ranks_per_node,
        "backend": "nccl" if device.type == "cuda" else "gloo",
    }
    if groups.intra is not None:
        found["intra"] = _link(groups.intra, 1, groups.intra, device)
    if groups.inter is not None:
        found["inter"] = _link(groups.inter, groups.ranks_per_node, everyone, device)
    found["exact_reduce_factor"] = _exact_reduce_factor(device)
    found["codec_bytes_per_second"] = _codec_rate(device)
    return found


def summary(calibration: dict[str, Any]) -> str:
    """The nodes that were found, and their links."""
    nodes, ranks = calibration["nodes"], calibration["ranks_per_node"]
    lines = [f"{nodes} {'node' if nodes == 1 else 'nodes'} of {ranks} {'rank' if ranks == 1 else 'ranks'}"]
    for name, link in (("inter", "between nodes, of a node"), ("intra", "inside a node, of a rank")):
        if name in calibration:
            rate, start = calibration[name]["bytes_per_second"], calibration[name]["exchange_seconds"]
            lines.append(f"{link}: {rate_text(rate)}, {time_text(start)} for an exchange of 1 KiB")
    kinds: dict[tuple[Any, ...], bool] = {}
    for row in calibration["decisions"]:
        kind = tuple(row[name] for name in KIND)
        kinds[kind] = kinds.get(kind, False) or row["compressed"]
    lines.append(f"{sum(kinds.values())} of {len(kinds)} kinds of calls are faster compressed, at some sizes at least")
    return "\n".join(lines)


def write(output: Path, device: str) -> None:
    """Measure between the ranks that torchrun or srun started, and let rank 0 write the result to `output` and print
    its summary.

    Raises ValueError for a device that is not there, and outside of torchrun and srun."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected a GPU for cuda, found none")
    if "RANK" not in os.environ:
        raise ValueError(
            "measure: expected RANK and WORLD_SIZE, which torchrun sets; start it with torchrun -m zcomm_bench"
        )
    if os.environ["RANK"] == "0":
        output.parent.mkdir(parents=True, exist_ok=True)
    chosen = torch.device(device)
    if device == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        calibration = run(chosen)
        if dist.get_rank() == 0:
            output.write_text(json.dumps(calibration, indent=1) + "\n")
            print(f"{summary(calibration)}\nwritten to {output}", flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()
