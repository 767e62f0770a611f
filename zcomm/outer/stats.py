"""What an OuterStep has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OuterStats:
    """What an OuterStep has done on this rank: ``inner_steps`` of the training, the rest since it was made.

    ``reductions`` of fragments, evaluations included, have sent ``sent_bytes`` from this rank; all-reduces in float32
    would have sent ``exact_bytes``. ``in_flight``: fragments under way. It has waited ``limit_seconds`` for
    ``max_rate``, and ``wait_seconds`` for transfers. On a GPU the host does not wait for these.
    """

    inner_steps: int
    reductions: int
    sent_bytes: int
    exact_bytes: int
    in_flight: int
    limit_seconds: float
    wait_seconds: float
