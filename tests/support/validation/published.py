"""Holds the model against published training steps of ZeRO-3 and ZeRO++ (zeropp_rows.json).

Six parameters are fitted to the exact steps alone: the share of line rate with up to two network cards and with more,
FLOP/s, seconds of a ring's hop, and the overlap of each width of model. ZeRO++ steps are then predicted. Steps are
taken to have one micro-batch, whose gradients are reduced once: the charts do not say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from zcomm_bench.planner.cluster import Cluster, Compute, Figure, Link, processor
from zcomm_bench.planner.collectives import Cost
from zcomm_bench.planner.step import combine

VOCABULARY = 50257
SEQUENCE = 1024
MESSAGES_PER_LAYER = 4  # DeepSpeed's: one per weight matrix
LINE_RATE_PEAK_SHARE = 0.5


@dataclass(frozen=True)
class Row:
    """A published step; `exact` is ZeRO-3, else it is ZeRO++."""

    id: int
    model: str
    layers: int
    hidden: int
    gpus: int
    nodes: int
    inter_gbit: int
    tokens: int
    system: str
    tflops: float
    where: str

    @property
    def exact(self) -> bool:
        return self.system == "ZeRO-3"

    @property
    def setup(self) -> tuple[Any, ...]:
        return self.model, self.gpus, self.inter_gbit, self.tokens

    @property
    def parameters(self) -> int:
        return 12 * self.layers * self.hidden**2 + VOCABULARY * self.hidden

    @property
    def flops(self) -> float:
        """Megatron's formula, with activation recomputation."""
        l, h = self.layers, self.hidden  # noqa: E741
        return 96 * self.tokens * l * h * h * (1 + SEQUENCE / (6 * h) + VOCABULARY / (16 * l * h))

    @property
    def seconds(self) -> float:
        return self.flops / (self.tflops * 1e12)


class Parameters(NamedTuple):
    """What is fitted; the first two are shares of line rate, `hop` is in microseconds, `overlap` per width of model."""

    few_cards: float
    many_cards: float
    tflops: float
    hop: float
    overlap_6144: float
    overlap_8192: float


START = Parameters(0.9, 0.9, 69.0, 10.0, 0.4, 0.4)
LOW = Parameters(0.3, 0.3, 40.0, 0.0, 0.0, 0.0)
HIGH = Parameters(1.0, 1.0, 110.0, 40.0, 1.0, 1.0)


def load() -> list[Row]:
    """The rows that are used: no interpolated ones, and one of each setup."""
    content = json.loads(Path(__file__).with_name("zeropp_rows.json").read_text())
    rows: dict[Any, Row] = {}
    for fields in content["rows"]:
        row = Row(**fields)
        if not (row.inter_gbit == 100 and row.gpus in (128, 256)):
            rows.setdefault((row.setup, row.system), row)
    return list(rows.values())


def cluster_of(row: Row, parameters: Parameters) -> Cluster:
    share = parameters.few_cards if row.inter_gbit <= 200 else parameters.many_cards
    v100 = processor("v100")
    compute = Compute(v100.peak, Figure(parameters.tflops * 1e12 / v100.peak.value), v100.memory, v100.memory_bandwidth)
    return Cluster(
        row.nodes,
        row.gpus // row.nodes,
        intra=Link(Figure(150e9), Figure(0.8), Figure(3e-6), Figure(20e-6)),
        inter=Link(Figure(row.inter_gbit * 1e9 / 8), Figure(share), Figure(parameters.hop * 1e-6), Figure(20e-6)),
        compute=compute,
    )


def _ring(num_bytes: float, rings: int, row: Row, cluster: Cluster) -> Cost:
    """A ring over all GPUs for each of a layer's messages; `rings` one after the other where scales go apart."""
    rate = min(cluster.inter.rate, cluster.intra.rate)
    hops = rings * MESSAGES_PER_LAYER * row.layers * (row.gpus - 1)
    return Cost(num_bytes * (row.gpus - 1) / row.gpus / rate + hops * cluster.inter.hop.value)


def _zeropp(row: Row, cluster: Cluster) -> Cost:
    """DeepSpeed's three: int8 weights by a ring over all GPUs, codes and scales apart; float16 weights inside the node;
    4-bit gradients in two hops, one after the other."""
    whole, local, nodes = 2.0 * row.parameters, cluster.ranks_per_node, row.nodes
    messages = MESSAGES_PER_LAYER * row.layers
    forward = _ring(whole / 2, 2, row, cluster)
    secondary = whole * (local - 1) / local / cluster.intra.rate
    backward = Cost(secondary + messages * (local - 1) * cluster.intra.hop.value)
    inter = whole / 4 * (nodes - 1) / nodes / cluster.inter.rate
    intra = whole / 4 * (local - 1) / local / cluster.intra.rate
    starts = cluster.intra.start_seconds(2 * local) + cluster.inter.start_seconds(2 * nodes)
    gradients = Cost(inter + intra + messages * starts)
    # Bytes that pass the codec: values and int8 codes of weights, each way; values and 4-bit codes of gradients in
    # each hop.
    codec = whole * (2 * 1.5 + 2 * 1.25) / cluster.compute.codec_rate
    return forward + backward + gradients + Cost(seconds=codec, codec=codec)


def predict(row: Row, parameters: Parameters) -> float:
    """Seconds of the row's step."""
    cluster = cluster_of(row, parameters)
    cost = _ring(2.0 * row.parameters, 1, row, cluster) * 3 if row.exact else _zeropp(row, cluster)
    overlap = parameters.overlap_6144 if row.hidden == 6144 else parameters.overlap_8192
    return combine(row.flops / cluster.compute.flops, cost, overlap)


def line_rate(row: Row) -> float:
    """What a user would reckon by hand: (C + 3V) / (C + 0.75V) at line rate and half of peak."""
    compute = row.flops / (LINE_RATE_PEAK_SHARE * processor("v100").peak.value)
    volume = 2.0 * row.parameters / (row.inter_gbit * 1e9 / 8)
    return compute + (3 if row.exact else 0.75) * volume


def fit(rows: Sequence[Row]) -> Parameters:
    """Least squares of the relative error over `rows`."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped, unused-ignore]

    scale = [high - low for low, high in zip(LOW, HIGH, strict=True)]
    found = least_squares(
        lambda values: [math.log(predict(row, Parameters(*values)) / row.seconds) for row in rows],
        START,
        bounds=(LOW, HIGH),
        x_scale=scale,
    )
    return Parameters(*(float(value) for value in found.x))


@dataclass(frozen=True)
class Errors:
    """Relative errors: of exact steps, each predicted by a fit to the other ones; of ZeRO++ steps and speed-ups, by a
    fit to all exact steps."""

    exact: list[float]
    zeropp: list[float]
    speedup: list[float]

    def summary(self) -> dict[str, float]:
        return {
            "exact_mean": fmean(self.exact),
            "zeropp_mean": fmean(self.zeropp),
            "speedup_mean": fmean(self.speedup),
            "speedup_worst": max(self.speedup),
            "speedup_within_10_percent": sum(error <= 0.1 for error in self.speedup) / len(self.speedup),
        }


def _off(predicted: float, real: float) -> float:
    return abs(predicted / real - 1)


def _compressed(rows: Sequence[Row], seconds: Any) -> tuple[list[float], list[float]]:
    exact = {row.setup: row for row in rows if row.exact}
    steps, speedups = [], []
    for row in rows:
        if not row.exact:
            base = exact[row.setup]
            steps.append(_off(seconds(row), row.seconds))
            speedups.append(_off(seconds(base) / seconds(row), base.seconds / row.seconds))
    return steps, speedups


def errors(rows: Sequence[Row]) -> tuple[Errors, Parameters]:
    """The model's errors, and its parameters from all exact rows."""
    exact = [row for row in rows if row.exact]
    held_out = [_off(predict(row, fit([other for other in exact if other is not row])), row.seconds) for row in exact]
    parameters = fit(exact)
    return Errors(held_out, *_compressed(rows, lambda row: predict(row, parameters))), parameters


def errors_of_line_rate(rows: Sequence[Row]) -> Errors:
    """The same of the reckoning by hand, which has nothing to fit."""
    exact = [_off(line_rate(row), row.seconds) for row in rows if row.exact]
    return Errors(exact, *_compressed(rows, line_rate))


def errors_without_model(rows: Sequence[Row], model: str) -> Errors:
    """Errors on the rows of `model`, fitted to the exact rows of the others. The overlap, which depends on the model's
    width, is the others'."""
    fitted = fit([row for row in rows if row.exact and row.model != model])
    overlap = fitted.overlap_6144 if model != "18B" else fitted.overlap_8192
    fitted = fitted._replace(overlap_6144=overlap, overlap_8192=overlap)
    own = [row for row in rows if row.model == model]
    exact = [_off(predict(row, fitted), row.seconds) for row in own if row.exact]
    return Errors(exact, *_compressed(own, lambda row: predict(row, fitted)))
