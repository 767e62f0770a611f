"""What the runs say: gaps with their confidence, the rule that picks a default, table and plots."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

from bench.convergence.cases import CASES, OUTER, Configuration
from bench.table_text import markdown

Record = Mapping[str, Any]

LIMIT = 0.2  # percent: what a mean gap of a default stays below
# In large models, by others: ZeRO++ (arXiv 2306.10209), SDP4Bit (arXiv 2410.15526).
TRIED_ELSEWHERE = {"exact", "bf16", "int8", "int4"}
# Two-sided 95 % quantiles of Student's t distribution by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
BEGIN, END = "<!-- study: begin -->", "<!-- study: end -->"

# Decibels; None where nothing is lost.
SNR = Sequence[float | None]


@dataclass
class Row:
    """One configuration over its seeds. Gaps of the loss of held-out text are in percent of the exact run's loss."""

    case: str
    weights: str
    gradients: str
    words: str  # what is in neither: "flat", "feedback", "lossless"
    intra_node_bytes: int  # per rank and step
    inter_node_bytes: int
    gaps: list[float] = field(default_factory=list)  # to the exact run of the same seed
    gradient_snr: list[SNR] = field(default_factory=list)  # per seed, of every parameter
    weight_snr: list[SNR] = field(default_factory=list)
    gradient_snr_along: list[SNR] = field(default_factory=list)  # per seed, step by step
    origins: list[str] = field(default_factory=list)  # per seed: the commit and the machine of the run
    same_bits: list[bool] = field(default_factory=list)  # of lossless: whether the run is that with exact weights
    is_choice: bool = False

    @property
    def family(self) -> tuple[bool, bool]:
        """Configurations that the rule chooses among: what is compressed in them."""
        return self.weights != "exact", self.gradients != "exact"

    @property
    def is_candidate(self) -> bool:
        """Whether it may be a default: blocks as zcomm.fsdp.compress lays them, no memory of earlier steps, and nothing
        that only a model as small as this one was trained with."""
        kinds = {formats.split(":")[0] for formats in (self.weights, *self.gradients.split("/"))}
        return self.case == "usual" and any(self.family) and not self.words and kinds <= TRIED_ELSEWHERE

    @property
    def name(self) -> str:
        named = {"weights": self.weights, "gradients": self.gradients}
        name = ", ".join(f"{what} {formats}" for what, formats in named.items() if formats != "exact") or "exact"
        return f"{name}, {self.words}" if self.words else name

    @property
    def half_interval(self) -> float | None:
        """The 95 % confidence interval of the gap is this on either side; None of fewer than two seeds."""
        if len(self.gaps) < 2:
            return None
        return T95[len(self.gaps) - 1] * statistics.stdev(self.gaps) / len(self.gaps) ** 0.5

    @property
    def passes(self) -> bool:
        return len(self.gaps) > 1 and statistics.fmean(self.gaps) < LIMIT


def summarize(records: Sequence[Record]) -> list[Row]:
    """One row per configuration, in the order of ``records``, without the seeds that have no exact run."""

    def key(record: Record) -> tuple[str, str, str, str]:
        configuration = record["configuration"]
        words = Configuration(**configuration).words
        return configuration["case"], configuration["weights"], configuration["gradients"], words

    runs = {(key(record), record["seed"]): record for record in records}
    rows: dict[tuple[str, str, str, str], Row] = {}
    for record in records:
        case, weights, gradients, words = key(record)
        exact = runs.get(((case, "exact", "exact", ""), record["seed"]))
        if exact is None:
            continue
        reference = exact["validation_loss"]
        row = rows.setdefault(key(record), Row(*key(record), record["intra_node_bytes"], record["inter_node_bytes"]))
        twin = runs.get(((case, weights, gradients, ""), record["seed"]))
        if words == "lossless" and twin is not None and twin["cpu"] == record["cpu"]:
            row.same_bits.append(record["bits"] == twin["bits"])
        row.origins.append(f"Commit `{record['commit']}`, {record['cpu']}.")
        row.gaps.append(100 * (record["validation_loss"] / reference - 1))
        row.gradient_snr.append(record["gradient_snr_db"])
        row.weight_snr.append(record["weight_snr_db"])
        row.gradient_snr_along.append(record["gradient_snr_along_db"])
    choose(list(rows.values()))
    return list(rows.values())


def is_apart(case: str) -> bool:
    """Whether the rule does not count this case."""
    return case in OUTER or (case in CASES and CASES[case].muon)


def choose(rows: Sequence[Row]) -> None:
    """Marks, in each family, the candidate that passes in all cases with AdamW that it was trained in, with the fewest
    bytes between nodes, then inside, then the first. Outer steps do not count."""
    failed = {row.name for row in rows if len(row.gaps) > 1 and not row.passes and not is_apart(row.case)}
    for family in {row.family for row in rows}:
        passing = [row for row in rows if row.family == family and row.is_candidate and row.passes]
        passing = [row for row in passing if row.name not in failed]
        if passing:
            min(passing, key=lambda row: (row.inter_node_bytes, row.intra_node_bytes)).is_choice = True


def median_and_worst(runs: Sequence[SNR]) -> tuple[float, float] | None:
    """Of the parameters that lose something, each by its median over seeds."""
    of_parameters = zip(*runs, strict=True)
    lossy = [[value for value in values if value is not None] for values in of_parameters]
    medians = [statistics.median(values) for values in lossy if values]
    return (statistics.median(medians), min(medians)) if medians else None


def noise(rows: Sequence[Row]) -> str:
    """How far runs drift apart by themselves: the least that differs from exact, and all rows, in a sentence. "" of
    fewer than two seeds."""
    drifting = [row for row in rows if row.name != "exact" and len(row.gaps) > 1]
    harmless = next((row for row in drifting if row.name == "gradients bf16"), None)
    if harmless is None:
        return ""
    pooled = statistics.fmean(statistics.variance(row.gaps) for row in drifting) ** 0.5
    return (
        f"Standard deviation over seeds: {statistics.stdev(harmless.gaps):.2f} % with gradients in bf16, "
        f"{pooled:.2f} % as the root mean square of the {len(drifting)} compressed rows."
    )


HEADERS = ("weights", "gradients", "KB between", "gap %", "gradient SNR dB", "weight SNR dB", "verdict")


def kilobytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e3:.1f}" if 0 < num_bytes < 10_000 else f"{num_bytes / 1e3:.0f}"


def cells(row: Row) -> list[str]:
    def snr(formats: str, runs: list[SNR]) -> str:
        found = None if formats == "exact" else median_and_worst(runs)
        return "{:.0f}, {:.0f}".format(*found) if found else ""

    exact = row.name == "exact"
    half = row.half_interval
    gap = f"{statistics.fmean(row.gaps):+.2f}" + (f" ± {half:.2f}" if half is not None else "")
    verdict = "" if exact or half is None else "chosen" if row.is_choice else "passes" if row.passes else "no"
    if row.same_bits:
        verdict = "same bits" if all(row.same_bits) else "other bits"
    return [
        row.weights,
        f"{row.gradients}, {row.words}" if row.words else row.gradients,
        kilobytes(row.inter_node_bytes),
        "" if exact else gap,
        *(snr(row.gradients, row.gradient_snr), snr(row.weights, row.weight_snr)),
        verdict,
    ]


def _cases(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {case: [row for row in rows if row.case == case] for case in dict.fromkeys(row.case for row in rows)}


def markdown_of(rows: Sequence[Row]) -> str:
    """A table for each case. A column that says nothing of any row is left out, and so are verdicts on outer steps,
    which the rule does not count."""
    lines = []
    for case, of_case in _cases(rows).items():
        filled = [cells(row) for row in of_case]
        kept = [bool({*column} - {"", "exact"}) for column in zip(*filled, strict=True)]
        kept[HEADERS.index("verdict")] &= case not in OUTER
        table = [list(compress(line, kept)) for line in (HEADERS, *filled)]
        origins = dict.fromkeys(origin for row in of_case for origin in row.origins)
        lines += [f'Case "{case}":', "", *markdown(table[0], table[1:])]
        lines += ["", " ".join((*origins, noise(of_case))).strip(), ""]
    return "\n".join(lines)


def write_markdown(rows: Sequence[Row], page: Path) -> None:
    """Replaces what stands between the two marks in ``page``."""
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page}: expected the lines '{BEGIN}' and '{END}'")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text("\n".join([before + BEGIN, markdown_of(rows), END + after]))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Every configuration's gap with its interval, and the gradients' signal-to-noise ratio along training; a line of
    plots for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = _cases(rows)
    if not cases:
        return
    heights = [max(4.0, 0.3 * len(of_case)) for of_case in cases.values()]
    figure, lines = pyplot.subplots(
        len(cases), 2, figsize=(14, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for (case, of_case), (gaps, snrs) in zip(cases.items(), lines, strict=True):
        compressed = [row for row in of_case if row.name != "exact"]
        for place, row in enumerate(compressed):
            half = row.half_interval
            color = "C7" if half is None else "C2" if row.passes else "C3"
            gaps.plot(row.gaps, [place] * len(row.gaps), ".", color=color, alpha=0.4)
            if half is not None:
                style: dict[str, Any] = {"fmt": "D" if row.is_choice else "o", "color": color, "capsize": 3}
                gaps.errorbar(statistics.fmean(row.gaps), place, xerr=half, **style)
        gaps.axvline(0, color="gray", linewidth=1)
        gaps.axvline(LIMIT, color="gray", linewidth=1, linestyle=":", label=f"{LIMIT} %")
        gaps.set_yticks(range(len(compressed)), [row.name for row in compressed], fontsize=8)
        gaps.invert_yaxis()
        gaps.set_xscale("symlog", linthresh=1.0)
        gaps.set(xlabel="validation loss over that of the exact run (%), 95 % interval", title=case)
        gaps.legend(fontsize=8)
        for number, row in enumerate(row for row in compressed if row.weights == "exact" and row.gradients != "exact"):
            along = [[snr for snr in step if snr is not None] for step in zip(*row.gradient_snr_along, strict=True)]
            points = [(i / max(1, len(along) - 1), statistics.median(step)) for i, step in enumerate(along) if step]
            label = f"{row.gradients} {row.words}"
            snrs.plot(
                *zip(*points, strict=True), label=label, linestyle=("-", "--", ":")[number // 10 % 3], linewidth=1.3
            )
        snrs.set(xlabel="part of the training", ylabel="gradient SNR (dB), median parameter", title=case)
        if snrs.lines:
            snrs.legend(fontsize=7)
        for axes in (gaps, snrs):
            axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
