"""What ``python -m zcomm_bench plan`` shows: a table of options, one line of advice, a plot, and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zcomm._units import rate_text, size_text, time_text
from zcomm_bench.planner.cluster import CHANNEL_RATE, CHANNELS_PER_PEER, NVLINK_CHANNEL_RATE, Cluster, Figure
from zcomm_bench.planner.step import Option, Prediction, predict
from zcomm_bench.planner.workload import Workload

# Predicted speed-ups are off by 5 % on average and by 18 % at worst (test_validation.py): a smaller gain may be none.
PLANNER_ERROR = 0.1
_NUM_POINTS = 60


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predictions for one workload on one cluster, the first of which is exact."""

    workload: Workload
    cluster: Cluster
    overlap: Figure
    predictions: tuple[Prediction, ...]

    @property
    def exact(self) -> Prediction:
        """The fastest exact layout that fits: what a user would have without compression."""
        fitting = [each for each in self.predictions if each.fits and each.option.is_exact]
        return min(fitting, key=lambda each: each.step_seconds, default=self.predictions[0])

    def speedup(self, prediction: Prediction) -> float:
        return self.exact.step_seconds / prediction.step_seconds

    @property
    def fastest(self) -> Prediction:
        """Of the options that fit; exact where the gain is within the planner's error, or where nothing fits."""
        fitting = [each for each in self.predictions if each.fits]
        fastest = min(fitting, key=lambda each: each.step_seconds, default=self.exact)
        return fastest if self._gains(fastest) else self.exact

    @property
    def best(self) -> Prediction:
        """The fastest option, or exact weights where they are as fast within the planner's error."""
        limit = self.fastest.step_seconds * (1 + PLANNER_ERROR)
        equal = (each for each in self.predictions if each.fits and self._gains(each) and each.step_seconds <= limit)
        return next((each for each in equal if each.option.is_lossless), self.fastest)

    @property
    def shown(self) -> Prediction:
        """What plots and tables hold against exact: the advice, or the last option where that is to stay exact."""
        return self.predictions[-1] if self.best is self.exact else self.best

    def _gains(self, prediction: Prediction) -> bool:
        return self.speedup(prediction) > 1 + PLANNER_ERROR

    @property
    def advice(self) -> str:
        if not self.exact.fits:
            return (
                f"Does not fit: the states alone need {size_text(self.exact.memory_bytes)} per rank, "
                f"{size_text(self.cluster.compute.memory.value)} are there."
            )
        if self.best is self.exact:
            layout = f' with "{self.exact.option.name}"' if self.exact is not self.predictions[0] else ""
            return (
                f"Stay exact{layout}: no option that fits gains more than the planner's error of {PLANNER_ERROR:.0%}."
            )
        gain = f'{self.speedup(self.best):.1f} times as fast as "{self.exact.option.name}", predicted'
        if self.best is not self.fastest:
            gain += f'; "{self.fastest.option.name}", which rounds weights, is faster by less than the planner\'s error'
        return f"Use {self.best.option.name} ({gain}):\n{self.best.option.paste}"


def make(workload: Workload, cluster: Cluster, options: Sequence[Option], overlap: Figure) -> Plan:
    predictions = tuple(predict(option, workload, cluster, overlap) for option in options)
    return Plan(workload, cluster, overlap, predictions)


def show(plan: Plan, console: Any) -> None:
    """Print the assumptions, a row per option, the collectives, and the advice."""
    from rich import box
    from rich.table import Table

    console.print(assumptions(plan))
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("option", "step", "band", "speed-up", "exposed", "between nodes", "memory per rank"):
        table.add_column(title, justify="left" if title == "option" else "right")
    for each in plan.predictions:
        memory = f"{size_text(each.memory_bytes)}{'' if each.fits else ', does not fit'}"
        table.add_row(
            each.option.name,
            time_text(each.step_seconds),
            f"{time_text(each.low)} .. {time_text(each.high)}",
            f"{plan.speedup(each):.2f}x",
            f"{each.exposed:.0%}",
            size_text(each.inter_bytes),
            memory,
        )
    console.print(table)
    parts = Table(box=box.SIMPLE_HEAD)
    for title in ("option", "collective", "calls alone", "links", "codec", "node sends", "rank sends inside"):
        parts.add_column(title, justify="left" if title in ("option", "collective") else "right")
    for each in plan.predictions:
        for name, cost in each.costs.items():
            times = (time_text(part) for part in (cost.seconds, cost.wire, cost.codec))
            parts.add_row(each.option.name, name, *times, size_text(cost.inter_bytes), size_text(cost.intra_bytes))
    console.print(parts)
    console.print(plan.advice, soft_wrap=True)  # lines to paste


def gpu_figures(cluster: Cluster) -> list[tuple[str, Figure, str]]:
    """What one GPU can tell of a call's cost: a name, the figure, and its text."""
    compute, launch = cluster.compute, cluster.launch
    figures = [
        ("codec", compute.codec_share, f"{compute.codec_rate / 1e9:.3g} GB/s read and written"),
        ("taken from computing beside it", compute.taken_share, f"{compute.taken_share.value:.0%} of the codec's time"),
    ]
    if launch.is_queued:
        times = (launch.group, launch.message, launch.kernel, launch.event)
        texts = (
            f"{name} {time_text(time)}"
            for name, time in zip(("group", "message", "kernel", "event"), times, strict=True)
        )
        figures.append(("the host's time", Figure(launch.group, launch.source), ", ".join(texts)))
    if cluster.nodes > 1 and cluster.rate_between(cluster.nodes - 1) < cluster.inter.rate:
        text = f"{CHANNELS_PER_PEER} x {CHANNEL_RATE / 1e9:g} GB/s"
        figures.append(("NCCL's channels to a rank of another node", Figure(CHANNEL_RATE), text))
    if cluster.ranks_per_node > 1 and cluster.rate_inside < cluster.intra.rate:
        text = f"{cluster.channels_inside} x {NVLINK_CHANNEL_RATE / 1e9:g} GB/s"
        figures.append(("NCCL's channels inside a node", Figure(NVLINK_CHANNEL_RATE), text))
    return figures


def assumptions(plan: Plan) -> str:
    """The figures that decide most, and their sources; `to_json` has all of the cluster."""
    cluster, inter, intra, compute = plan.cluster, plan.cluster.inter, plan.cluster.intra, plan.cluster.compute
    workload = plan.workload
    figures = [
        ("link of a node", inter.bandwidth, rate_text(inter.bandwidth.value)),
        ("its share for large messages", inter.efficiency, f"{inter.efficiency.value:.0%}"),
        ("a ring's hop between nodes", inter.bulk_hop, time_text(inter.bulk_hop.value)),
        ("link of a rank inside its node", intra.bandwidth, f"{intra.bandwidth.value / 1e9:g} GB/s"),
        ("its share for large messages", intra.efficiency, f"{intra.efficiency.value:.0%}"),
        ("peak of a rank", compute.peak, f"{compute.peak.value / 1e12:g} TFLOP/s"),
        ("share of peak", compute.efficiency, f"{compute.efficiency.value:.0%}"),
        *gpu_figures(cluster),
        (
            "codec of differences",
            compute.lossless_share,
            f"{compute.lossless_rate / 1e9:.3g} GB/s read and written",
        ),
        ("bits of a weight's difference", workload.bits_per_weight, f"{workload.bits_per_weight.value:.2g} of 16"),
        ("overlap of compute and network", plan.overlap, f"{plan.overlap.value:.0%}"),
    ]
    lines = [
        f"{cluster.nodes} x {cluster.ranks_per_node} ranks, {workload.num_parameters / 1e9:.3g} B parameters, "
        f"{workload.tokens} tokens x {workload.micro_batches} micro-batches per rank. Activations are not counted."
    ]
    lines += [f"  {name}: {text} ({figure.source})" for name, figure, text in figures]
    if workload.accumulated_bytes:
        lines.append(f"  gradients: accumulated whole, {size_text(workload.accumulated_bytes)} per rank (given)")
    elif workload.micro_batches > 1:
        lines.append("  gradients: reduced in each micro-batch (assumed)")
    if cluster.ranks > 384:
        lines.append("  Nothing above 384 ranks was validated: there, ring latency decides, and flatters compression.")
    return "\n".join(lines)


def to_json(plan: Plan) -> dict[str, Any]:
    """The same for programs: seconds, bytes and sources."""
    return {
        "schema": "zcomm-plan/1",
        "workload": dataclasses.asdict(plan.workload),
        "cluster": dataclasses.asdict(plan.cluster),
        "overlap": dataclasses.asdict(plan.overlap),
        "options": [
            {
                **dataclasses.asdict(each),
                "speedup": plan.speedup(each),
                "exposed": each.exposed,
                "inter_bytes": each.inter_bytes,
            }
            for each in plan.predictions
        ],
        "advice": plan.advice,
        "use": plan.best.option.name,
        "planner_error": PLANNER_ERROR,
    }


def _at(plan: Plan, bandwidth: float) -> Cluster:
    link = dataclasses.replace(plan.cluster.inter, bandwidth=Figure(bandwidth, plan.cluster.inter.bandwidth.source))
    return dataclasses.replace(plan.cluster, inter=link)


def sweep(plan: Plan) -> tuple[list[float], dict[str, list[float]]]:
    """Bandwidths of a node's link in bytes per second, from a 32nd to 32 times the user's, and each option's steps."""
    own = plan.cluster.inter.bandwidth.value
    rates = [own * 32.0 ** (2 * i / (_NUM_POINTS - 1) - 1) for i in range(_NUM_POINTS)]
    steps = {
        each.option.name: [
            predict(each.option, plan.workload, _at(plan, rate), plan.overlap).step_seconds for rate in rates
        ]
        for each in plan.predictions
    }
    return rates, steps


def crossover(rates: Sequence[float], exact: Sequence[float], other: Sequence[float]) -> float | None:
    """The lowest bandwidth from which on exact is as fast as `other`; None if it never is in the sweep."""
    for rate, ours, theirs in zip(rates, exact, other, strict=True):
        if ours <= theirs:
            return rate
    return None


def plot(plan: Plan, path: Path) -> None:
    """Draw the step over the bandwidth of a node's link: the user's link, compute alone, and the crossover."""
    import matplotlib.pyplot as plt

    rates, steps = sweep(plan)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    gbit = [rate * 8 / 1e9 for rate in rates]
    for name, seconds in steps.items():
        axes.plot(gbit, seconds, label=name)
    axes.axhline(plan.exact.compute_seconds, color="gray", linestyle=":", label="compute alone")
    own = plan.cluster.inter.bandwidth.value * 8 / 1e9
    axes.axvline(own, color="black", linestyle="--", label=f"your link: {own:g} Gbit/s")
    name = plan.shown.option.name
    met = crossover(rates, steps[plan.exact.option.name], steps[name])
    if met is not None:
        label = f"exact is as fast as {name}: {met * 8 / 1e9:.3g} Gbit/s"
        axes.axvline(met * 8 / 1e9, color="tab:red", linestyle="--", label=label)
    axes.set(xscale="log", yscale="log", xlabel="bandwidth of a node's link, Gbit/s", ylabel="seconds per step")
    axes.set_title(f"{plan.cluster.nodes} x {plan.cluster.ranks_per_node} ranks, a model, not a measurement")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
