"""Medians and their 95 % intervals by bootstrap. The random numbers are NumPy's legacy ones, whose stream is frozen:
the same samples give the same interval everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 1000
_LOW, _HIGH = 2.5, 97.5


@dataclass(frozen=True)
class Interval:
    """A median and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def of_median(samples: Sequence[float]) -> Interval:
    """Raises ValueError without samples."""
    if not samples:
        raise ValueError("samples: expected at least 1, got 0")
    values = np.asarray(samples, np.float64)
    picks = np.random.RandomState(0).randint(0, values.size, (RESAMPLES, values.size))
    low, high = np.percentile(np.median(values[picks], axis=1), (_LOW, _HIGH))
    return Interval(float(np.median(values)), float(low), float(high))


def of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """Of numerator / denominator, pair by pair: what the two have in common cancels."""
    return of_median([one / other for one, other in zip(numerators, denominators, strict=True)])


def turns(samples: Sequence[float]) -> list[float]:
    """The sum of both samples of each turn, in which every way goes once forth and once back: a drift cancels."""
    return [first + second for first, second in zip(samples[::2], samples[1::2], strict=True)]
