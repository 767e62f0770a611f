"""Medians and their 95 % intervals by order statistics: these hold for few samples and for any distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from statistics import median

LEAST_SAMPLES = 6  # the smallest and the largest of fewer hold the median less often than 95 %


@dataclass(frozen=True)
class Interval:
    """A median and where it lies with at least 95 % confidence."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def of_median(samples: Sequence[float]) -> Interval:
    """Raises ValueError for fewer than LEAST_SAMPLES."""
    count, ordered = len(samples), sorted(samples)
    if count < LEAST_SAMPLES:
        raise ValueError(f"samples: expected at least {LEAST_SAMPLES}, got {count}")
    # Samples lie below the true median as coins show heads: `rare` of 2**count throws show at most `place` + 1.
    place, rare = 0, 1 + count
    while 40 * rare <= 2**count:  # 2.5 % at each end
        place += 1
        rare += comb(count, place + 1)
    return Interval(median(samples), ordered[place], ordered[-1 - place])


def of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Of numerator / denominator, pair by pair: what the two have in common cancels."""
    return of_median([one / other for one, other in zip(numerators, denominators, strict=True)])


def turns(samples: Sequence[float]) -> list[float]:
    """The sum of both samples of each turn, in which every way goes once forth and once back: a drift cancels."""
    return [first + second for first, second in zip(samples[::2], samples[1::2], strict=True)]
