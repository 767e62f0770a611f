"""The pictures of the pages, from the files of bench/results, and the diagrams: `make docs` draws them into
build/pictures, each also for the site's dark colors.

python -m bench.pictures [FOLDER]

A page has a comment in a picture's place, `<!-- picture: NAME: what it shows -->`. The site shows the picture there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

from bench import diagrams, results_file, tables
from bench.convergence import report


def study(path: Path) -> None:
    report.plot(tables.study_rows(), path)


def lossless_models(path: Path) -> None:
    """Bits per weight, step by step, of each training."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    (measurements,) = results_file.load("lossless_models").values()
    for name, curve in measurements.items():
        bits = [record["bits"] for record in curve.records]
        axes.plot(range(1, len(bits) + 1), bits, label=f"{name}, {curve.facts['parameters'] / 1e6:.1f} M")
    for whole, name in ((8.06, "int8:256"), (4.06, "int4:256")):
        axes.axhline(whole, color="gray", linewidth=0.8, linestyle="--")
        axes.text(0, whole, name, va="bottom", color="gray")
    axes.set(xlabel="step", ylabel="bits per bfloat16 weight", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def outer_sites(path: Path) -> None:
    """Loss of training at sites, with and without losses of one."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    (measurements,) = results_file.load("outer_sites").values()
    curves = measurements["curves"]
    for column, label, width in (("calm", "undisturbed", 3.0), ("disturbed", "sites lost and started again", 1.2)):
        points = [(record["step"], record[column]) for record in curves.records if record[column] is not None]
        axes.plot(*zip(*points, strict=True), label=label, linewidth=width)
    losses = dict(points)
    for what, marker in (("lost", "C3x"), ("returned", "C2o")):
        steps = [step for change, _, step in curves.facts["changes"] if change == what and step in losses]
        axes.plot(steps, [losses[step] for step in steps], marker, label=f"a site {what}", fillstyle="none")
    axes.set(xlabel="inner steps", ylabel="loss on held-out text", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


PICTURES: dict[str, Callable[[Path], None]] = {
    "study": study,
    "lossless_models": lossless_models,
    "outer_sites": outer_sites,
    **diagrams.DIAGRAMS,
}
DARK = ["dark_background", {"figure.facecolor": "#1e2129", "axes.facecolor": "#1e2129", "savefig.facecolor": "#1e2129"}]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else results_file.ROOT / "build" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(folder / f"{name}.png")
        with matplotlib.style.context(DARK):
            draw(folder / f"{name}-dark.png")


if __name__ == "__main__":
    main()
