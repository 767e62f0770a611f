"""The diagrams of the pages: what goes where, and when. `bench.pictures` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

INSIDE, BETWEEN, OWN = "tab:blue", "tab:orange", "tab:gray"  # links of a node, links between nodes, no link
RANKS = {(node, rank): (3.0 * node, 1.6 * (1 - rank)) for node in range(2) for rank in range(2)}

Place = tuple[int, int]  # node, local rank
Bar = tuple[int, float, float, str, str]  # row, begin, length, color, text


def _ranks(axes: Any, title: str) -> None:
    """Draw two nodes of two ranks."""
    for node in range(2):
        axes.add_patch(pyplot.Rectangle((3 * node - 0.7, -0.6), 1.4, 2.8, fill=False, edgecolor=OWN, linestyle="--"))
        axes.text(3 * node, 2.35, f"node {node}", ha="center", color=OWN)
    for (node, rank), (x, y) in RANKS.items():
        axes.add_patch(pyplot.Circle((x, y), 0.32, fill=False, edgecolor=OWN))
        axes.text(x, y, str(2 * node + rank), ha="center", va="center")
    axes.set(xlim=(-1, 4), ylim=(-0.9, 2.8), title=title, aspect="equal")
    axes.axis("off")


def _arrows(axes: Any, pairs: Iterable[tuple[Place, Place]]) -> None:
    for start, end in pairs:
        color = INSIDE if start[0] == end[0] else BETWEEN
        style = {"arrowstyle": "-|>", "color": color, "shrinkA": 15, "shrinkB": 15, "linewidth": 1.8}
        axes.annotate("", RANKS[end], RANKS[start], arrowprops={**style, "connectionstyle": "arc3,rad=0.12"})


def hops(path: Path) -> None:
    """What rank 0 sends in an all-gather and a reduce-scatter of two nodes of two ranks."""
    figure, ((gather, forward), (reduce, across)) = pyplot.subplots(2, 2, figsize=(8, 7), layout="constrained")
    _ranks(gather, "all-gather, first hop: rank 0 sends its wire")
    _arrows(gather, [((0, 0), (0, 1)), ((0, 0), (1, 0))])
    _ranks(forward, "second hop: rank 2 forwards it inside its node")
    _arrows(forward, [((1, 0), (1, 1))])
    _ranks(reduce, "reduce-scatter, first hop: slots by local rank")
    _arrows(reduce, [((0, 0), (0, 1)), ((0, 1), (0, 0)), ((1, 0), (1, 1)), ((1, 1), (1, 0))])
    _ranks(across, "second hop: sums of a node")
    _arrows(across, [((0, 0), (1, 0)), ((1, 0), (0, 0)), ((0, 1), (1, 1)), ((1, 1), (0, 1))])
    lines = [pyplot.Line2D([], [], color=color) for color in (INSIDE, BETWEEN)]
    names = ["inside a node: int8", "between nodes: int8 weights, int4 gradients"]
    figure.legend(lines, names, loc="outside lower center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _timeline(axes: Any, rows: list[str], bars: Iterable[Bar], title: str) -> None:
    for row, begin, length, color, text in bars:
        axes.barh(len(rows) - 1 - row, length, left=begin, height=0.7, color=color, alpha=0.75, edgecolor="none")
        axes.text(begin + length / 2, len(rows) - 1 - row, text, ha="center", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), rows[::-1])
    axes.set_xticks([])
    axes.set_title(title, fontsize=10)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def pipeline(path: Path) -> None:
    """A call in one chunk and in four: encode 1, link 4, decode 1 of 6 units of time."""
    figure, both = pyplot.subplots(2, 1, figsize=(8, 4), layout="constrained", sharex=True)
    rows = ["encode", "link", "decode"]
    one = [(0, 0.0, 1.0, INSIDE, ""), (1, 1.0, 4.0, BETWEEN, ""), (2, 5.0, 1.0, INSIDE, "")]
    _timeline(both[0], rows, one, "one chunk: the link waits for the codec")
    chunks: list[Bar] = []
    for chunk in range(4):
        link = 0.25 + chunk
        chunks += [(0, max(0.0, link - 1 if chunk else 0.0), 0.25, INSIDE, str(chunk + 1))]
        chunks += [(1, link, 1.0, BETWEEN, str(chunk + 1)), (2, link + 1, 0.25, INSIDE, str(chunk + 1))]
    _timeline(both[1], rows, chunks, "four chunks: the link is busy, the codec works meanwhile")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def secondary(path: Path) -> None:
    """Gathers of one layer in a step of FSDP2, without and with secondary shards."""
    figure, both = pyplot.subplots(2, 1, figsize=(8, 4), layout="constrained", sharex=True)
    rows = ["between nodes", "inside a node", "computation"]
    compute: list[Bar] = [
        (2, 2.0, 2.0, OWN, "forward"),
        (2, 6.0, 3.0, OWN, "backward"),
        (2, 11.0, 1.0, OWN, "step"),
    ]
    reduce: list[Bar] = [(1, 9.0, 0.7, INSIDE, "reduce"), (0, 9.7, 1.3, BETWEEN, "reduce")]
    forward: list[Bar] = [(0, 0.0, 1.5, BETWEEN, "gather"), (1, 1.5, 0.5, INSIDE, "")]
    again: list[Bar] = [(0, 4.0, 1.5, BETWEEN, "gather again"), (1, 5.5, 0.5, INSIDE, "")]
    _timeline(both[0], rows, [*compute, *reduce, *forward, *again], "FSDP2: weights cross nodes twice a step")
    kept: list[Bar] = [(1, 5.3, 0.7, INSIDE, "gather")]
    _timeline(both[1], rows, [*compute, *reduce, *forward, *kept], "with secondary shards: once")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


DIAGRAMS: dict[str, Callable[[Path], None]] = {"hops": hops, "pipeline": pipeline, "secondary": secondary}
