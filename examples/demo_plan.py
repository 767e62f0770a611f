"""Prediction of a step of the demonstration: bytes between nodes by formula, seconds by a trial."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from train_gpt import GPT

import zcomm
from zcomm import _core
from zcomm._units import parse_nodes
from zcomm_bench.lab import network

SLOWER = 10  # times the plan: a step that takes longer ends the run
LEAST_LIMIT = 30.0  # seconds: allocations, connections, other programs
DIFFERENCE_BYTES = 0.6  # of a bfloat16 weight, where the learning rate is highest


def seconds_of_sequence(model: GPT, sequence: int) -> float:
    """Measure forward and backward of one sequence on one core; ``model`` is as the ranks have it."""
    text = torch.zeros(1, sequence + 1, dtype=torch.long)
    seconds = []
    for _ in range(2):  # the first one allocates
        start = time.perf_counter()
        model(text).backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@dataclass(frozen=True)
class Job:
    """Job that both backends run."""

    nodes: str
    link: str
    steps: int
    batch: int
    sequence: int
    width: int
    layers: int
    micro_batches: int
    multiply_as: str

    def model(self) -> GPT:
        return GPT(self.width, self.layers, self.sequence, getattr(torch, self.multiply_as)).bfloat16()

    def compute_seconds(self) -> float:
        """Return the computing time of a step, for all ranks on the cores of this machine."""
        num_nodes, ranks_per_node = parse_nodes(self.nodes)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            alone = seconds_of_sequence(self.model(), self.sequence) * self.batch * self.micro_batches
        finally:
            torch.set_num_threads(threads)
        return alone * max(1.0, num_nodes * ranks_per_node / len(os.sched_getaffinity(0)))


def inter_node_bytes(
    job: Job, options: zcomm.Options | None = None, secondary_shards: bool = False, lossless: bool = False
) -> float:
    """Return the bytes that leave all nodes in a step; without ``options`` for gloo, whose collectives are rings."""
    num_nodes, ranks_per_node = parse_nodes(job.nodes)
    num_ranks = num_nodes * ranks_per_node
    if num_nodes == 1:
        return 0.0
    parameters = sum(parameter.numel() for parameter in job.model().parameters())
    # Every node's edge of the ring carries all but one of the ranks' parts; gloo's reduce-scatter is an all-reduce.
    gather, reduce = (num_nodes * (num_ranks - 1) / num_ranks * parameters * part for part in (2.0, 2 * 4.0))
    if options is not None:
        shard = -(-parameters // num_ranks)
        topology = _core.Topology([node for node in range(num_nodes) for _ in range(ranks_per_node)])
        if options.all_gather != "exact":
            segments = [(shard, options.all_gather)]
            gathering = _core.GatherPlan(topology, 0, [shard] * num_ranks, "bfloat16", segments)
            gather = num_ranks * gathering.bytes.inter_node
        if lossless:
            gather = (num_nodes - 1) * parameters * DIFFERENCE_BYTES
        if options.reduce_scatter != "exact":
            segments = [(shard, options.reduce_scatter)]
            reduction = _core.ReducePlan(topology, 0, [shard] * num_ranks, "float32", segments)
            reduce = num_ranks * reduction.bytes.inter_node
    gathers = 1 if secondary_shards else 2 * job.micro_batches
    return gathers * gather + reduce


@dataclass(frozen=True)
class Plan:
    """Plan of one backend's run."""

    steps: int
    step_seconds: float

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def step_limit(self) -> float:
        """Return the seconds after which a step is given up."""
        return max(SLOWER * self.step_seconds, LEAST_LIMIT)


def plan(job: Job, compute_seconds: float, num_bytes: float) -> Plan:
    """Predict a run without overlap of computing and sending, which would shorten it."""
    num_nodes, _ = parse_nodes(job.nodes)
    rate = network.parse_limit(job.link)
    sending = 0.0 if rate is None else num_bytes / num_nodes / rate
    return Plan(job.steps, compute_seconds + sending)
