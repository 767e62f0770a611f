"""What the project claims, and whether a report's figures confirm it.

PASS: even the unfavourable end of every 95 % interval keeps the claim. FAIL: some interval lies wholly beyond it.
INVALID: the measurement cannot tell, and the cause says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zcomm._units import rate_text, size_text
from zcomm_bench.planner.report import PLANNER_ERROR

SLOWER = 1.02
SHARE_OF_BYTE_RATIO = 0.95
LOSS = 0.01
BASELINE_SHARE = 0.8  # of what the link should carry: NCCL's bus bandwidth between nodes of 8 x 400 Gbit/s is 320 GB/s
SLOWEST_RANK = 1.25  # times the median rank
# docs/planning.md, "How far off it is": of calls behind a link, and of steps, at worst; and on average.
CALL_ERROR, STEP_ERROR, MEAN_ERROR = 0.20, 0.15, PLANNER_ERROR
MODEL_FROM_BYTES = 1 << 20

PASS, FAIL, INVALID = "PASS", "FAIL", "INVALID"
Figures = Mapping[str, Any]
Range = tuple[str, float, float]  # what, and its interval


@dataclass(frozen=True)
class Verdict:
    """On one claim; `why` has the figure that decides."""

    claim: str
    verdict: str
    why: str


def judge(found: Sequence[Range], limit: float, unit: str = "{:.3f}", at_least: bool = False) -> tuple[str, str]:
    """Whether all of `found` are at most `limit`, or at least."""
    sign = -1 if at_least else 1

    def ends(one: Range) -> tuple[float, float]:
        """The favourable and the unfavourable one, as of an upper limit."""
        return min(sign * one[1], sign * one[2]), max(sign * one[1], sign * one[2])

    what, low, high = max(found, key=lambda one: (ends(one)[0] > sign * limit, ends(one)[1]))
    best, worst = ends((what, low, high))
    text = f"{what}: {unit.format(low)} to {unit.format(high)}, expected at {'least' if at_least else 'most'} "
    text += unit.format(limit)
    if best > sign * limit:
        return FAIL, text
    return (INVALID, f"the noise is too large to tell: {text}") if worst > sign * limit else (PASS, f"at worst {text}")


def of(figures: Figures, report: Mapping[str, Any]) -> list[Verdict]:
    """A verdict on every claim. Speed means nothing where the exact baseline, a rank or the noise is not sound."""
    causes, exact = unsound(figures, report), not_compressed(figures)
    claims: dict[str, tuple[Callable[[Figures], tuple[str, str]], list[str]]] = {
        "bits": (bits, []),
        'never more than 2 % slower under compress="auto"': (auto, causes),
        "95 % of the byte ratio on slow links": (slow_links, causes + exact),
        "step": (step, causes),
        "the model's error": (model, slow_ranks(figures) + exact),
        **({"drill": (drill, [])} if "drill" in figures else {}),
    }
    verdicts = []
    for claim, (decide, against) in claims.items():
        verdict, why = (INVALID, "; ".join(against)) if against else decide(figures)
        verdicts.append(Verdict(claim, verdict, why))
    return verdicts


def unsound(figures: Figures, report: Mapping[str, Any]) -> list[str]:
    """What makes all claims of speed INVALID."""
    if "noise" not in figures or not figures["networks"]:
        return ["sanity and noise were not measured"]
    link = report["link"]["bytes_per_second"]
    causes = slow_baseline(figures["networks"][0], link)
    causes += slow_ranks(figures)
    for row in figures["noise"]:
        low, high = row["ratio"]["low"], row["ratio"]["high"]
        if low > SLOWER or high < 1 / SLOWER:
            causes.append(f"{cell_text(row)}: exact differs from itself by {low:.3f} to {high:.3f}")
    return causes


def slow_baseline(network: Figures, link: float | None) -> list[str]:
    if link is None:
        return ["nobody says what the link should carry: --link RATE"]
    return [
        f"the exact baseline is slow: {row['collective']} reaches {rate_text(row['bytes_per_second'])}, "
        f"{row['share']:.0%} of {rate_text(link)}, expected {BASELINE_SHARE:.0%}"
        for row in network["baseline"]
        if row["share"] < BASELINE_SHARE
    ]


def slow_ranks(figures: Figures) -> list[str]:
    return [
        f"rank {found['rank']} is slow: its {name} takes {found['over_median']:.2f} times as long as the median rank's"
        for name, found in figures.get("ranks", {}).items()
        if found["over_median"] > SLOWEST_RANK
    ]


def not_compressed(figures: Figures) -> list[str]:
    """Cells in which calls of the way named "compressed" were exact."""
    names = [what for what, cell in sound_cells(figures) if not cell["compressed_calls"]]
    return [f"not compressed at all: {', '.join(names)}"] if names else []


def cell_text(row: Mapping[str, Any]) -> str:
    return f"{row['collective']} of {size_text(row['bytes'])}"


def bits(figures: Figures) -> tuple[str, str]:
    if "bits" not in figures:
        return INVALID, "not measured"
    found = figures["bits"]
    if found["wrong"]:
        return FAIL, found["wrong"][0] + (f", and {len(found['wrong']) - 1} more" if len(found["wrong"]) > 1 else "")
    if found["not_compressed"]:
        return INVALID, f"not compressed at all: {', '.join(found['not_compressed'])}"
    return PASS, f"{found['calls']} calls have the bits of the reference on all ranks"


def sound_cells(figures: Figures) -> list[tuple[str, Mapping[str, Any]]]:
    """Those of the network as it is, and of others whose exact baseline is sound."""
    first, *others = figures["networks"]
    sound = [first] + [
        each for each in others if all((row["share"] or 0) >= BASELINE_SHARE for row in each["baseline"])
    ]
    named = [(each, "" if each is first else f", {each['name']}") for each in sound]
    return [(f"{cell_text(cell)}{suffix}", cell) for each, suffix in named for cell in each["cells"]]


def auto(figures: Figures) -> tuple[str, str]:
    found = [
        (what, cell["auto_over_exact"]["low"], cell["auto_over_exact"]["high"]) for what, cell in sound_cells(figures)
    ]
    return judge(found, SLOWER) if found else (INVALID, "not measured")


def slow_links(figures: Figures) -> tuple[str, str]:
    slow = [(what, cell["share_of_byte_ratio"]) for what, cell in sound_cells(figures) if cell["slow_link"]]
    if not slow:
        return INVALID, "no link here is slow: all else takes more than a tenth of the time of its bytes"
    return judge([(what, share["low"], share["high"]) for what, share in slow], SHARE_OF_BYTE_RATIO, at_least=True)


def step(figures: Figures) -> tuple[str, str]:
    if not figures.get("steps"):
        return INVALID, "not measured"
    found = []
    for row in figures["steps"]:
        what = f"width {row['model']['width']}, {row['model']['batch'] * row['model']['sequence']} tokens"
        if not all(row["compressed_calls"].values()):
            return INVALID, f"{what}: FSDP2's calls were not compressed"
        if not abs(row["loss_over_exact"] - 1) <= LOSS:  # NaN, too, fails
            return FAIL, f"{what}: the loss is {row['loss_over_exact'] - 1:+.2%} off the exact one"
        found.append((f"{what}, seconds over exact ones", row["over_exact"]["low"], row["over_exact"]["high"]))
    return judge(found, SLOWER)


def model(figures: Figures) -> tuple[str, str]:
    """Errors of compressed calls and steps, against those that the project states."""
    cells = [(what, cell) for what, cell in sound_cells(figures) if cell["bytes"] >= MODEL_FROM_BYTES]
    calls = [(what, *magnitude(cell["error"])) for what, cell in cells]
    steps = [("the step", *magnitude(row["error"])) for row in figures.get("steps", [])]
    if not calls or not steps:
        return INVALID, "not measured"
    mean = fmean(abs(cell["error"]["value"]) for _, cell in cells)
    judged = [judge(calls, CALL_ERROR, "{:.1%}"), judge(steps, STEP_ERROR, "{:.1%}")]
    text = f"calls {mean:.1%} on average, limit {MEAN_ERROR:.0%}"
    if mean > MEAN_ERROR:
        judged.append((FAIL, text))
    worst = next((each for verdict in (FAIL, INVALID) for each in judged if each[0] == verdict), None)
    return worst or (PASS, f"{text}; {judged[0][1]}; {judged[1][1]}")


def magnitude(error: Mapping[str, float]) -> tuple[float, float]:
    """The smallest and the largest magnitude in an interval."""
    low, high = sorted((abs(error["low"]), abs(error["high"])))
    return (0.0 if error["low"] <= 0 <= error["high"] else low), high


def drill(figures: Figures) -> tuple[str, str]:
    found = figures["drill"]
    if found["wrong"]:
        return FAIL, "; ".join(found["wrong"])
    return PASS, f"rank {found['victim']} was killed, all others said so within {found['slowest_seconds']:.1f} s"
