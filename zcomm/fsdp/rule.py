"""How one parameter group of FSDP2 is sent."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from zcomm.distributed.binding import _c10d
from zcomm.feedback import ErrorFeedback

# Lossless weights are planned in this format, whatever the process group has: the plan tells whether they may be
# compressed, and what they are weighed against.
_INSTEAD_OF_LOSSLESS = "int8:256"


@dataclass(frozen=True, eq=False)
class Rule:
    """How one parameter group is sent. Formats are those of the process group where None. ``exempt`` says of each of
    its parameters if it is sent exactly. ``owner`` made the rule, and lives as long; its ``number`` counts owners."""

    number: int
    weights: str | None
    gradients: str | None
    error_feedback: ErrorFeedback | None
    fused: bool
    exempt: Sequence[bool] = ()
    owner: object = None

    @property
    def is_lossless(self) -> bool:
        return self.weights == "lossless"

    @functools.cached_property
    def formats(self) -> _c10d.PolicyOverride:
        """Read once."""
        all_exempt = all(self.exempt)  # named "exact" here, so that policy="auto" weighs no gain
        weights = _INSTEAD_OF_LOSSLESS if self.is_lossless else "exact" if all_exempt else self.weights
        named = {"all_gather": weights, "reduce_scatter": "exact" if all_exempt else self.gradients}
        return _c10d.PolicyOverride(**{name: format for name, format in named.items() if format})
