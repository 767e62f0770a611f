"""The pictures of a report: speed-up over size, and the model beside the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zcomm._units import size_text
from zcomm_bench.prove import report
from zcomm_bench.prove.scale import CALLS


def draw(made: Mapping[str, Any], folder: Path) -> None:
    """speed_up.png and model.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for network in made["figures"]["networks"][:1] for cell in network["cells"]]
    for name, draw_cells in (("speed_up", speed_up), ("model", model)):
        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        draw_cells(axes, cells)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        figure.suptitle(report.title(made), fontsize=10)
        figure.savefig(folder / f"{name}.png", dpi=120)
        pyplot.close(figure)


def speed_up(axes: Any, cells: list[Mapping[str, Any]]) -> None:
    """Of compressed calls, with intervals; and of those that "auto" makes."""
    for collective in CALLS:
        rows = [cell for cell in cells if cell["collective"] == collective]
        sizes, found = [row["bytes"] for row in rows], [row["speedup"] for row in rows]
        below = [each["value"] - each["low"] for each in found]
        above = [each["high"] - each["value"] for each in found]
        line = axes.errorbar(
            sizes, [each["value"] for each in found], (below, above), marker="o", capsize=3, label=collective
        )
        color = line.lines[0].get_color()
        axes.plot(
            sizes, [1 / row["auto_over_exact"]["value"] for row in rows], ":", color=color, label=f"{collective}, auto"
        )
        axes.plot(sizes, [row["byte_ratio"] for row in rows], "--", color=color, linewidth=0.8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", ylabel="times as fast as exact; dashed: the ratio of bytes")
    _name_sizes(axes, cells)


def model(axes: Any, cells: list[Mapping[str, Any]]) -> None:
    """Errors of the predictions of compressed calls."""
    for collective in CALLS:
        rows = [cell for cell in cells if cell["collective"] == collective]
        errors = [100 * row["error"]["value"] for row in rows]
        axes.plot([row["bytes"] for row in rows], errors, marker="o", label=collective)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(xscale="log", ylabel="predicted over measured, % off")
    _name_sizes(axes, cells)


def _name_sizes(axes: Any, cells: list[Mapping[str, Any]]) -> None:
    sizes = sorted({cell["bytes"] for cell in cells})
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30)
    axes.minorticks_off()
