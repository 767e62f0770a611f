"""How one parameter group of FSDP2 is sent: its rule, and what was sent under it."""

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
        all_exempt = all(self.exempt)  # named "exact" here, so that compress="auto" weighs no gain
        weights = _INSTEAD_OF_LOSSLESS if self.is_lossless else "exact" if all_exempt else self.weights
        named = {"all_gather": weights, "reduce_scatter": "exact" if all_exempt else self.gradients}
        return _c10d.PolicyOverride(**{name: format for name, format in named.items() if format})


@dataclass
class ModuleStats:
    """What one module of FSDP2 sends how, and what this rank has sent for it so far. Bytes are counted when a call is
    done."""

    weights: str  #: the format, or "lossless"; "" is the process group's format
    gradients: str
    elements: int  #: of all its parameters
    exempt_elements: int  #: of them, those that are sent exactly
    gathers: int = 0  #: those that zcomm made
    gathers_inter_node: int = 0  #: to a secondary shard, from the shards of all ranks
    gathers_intra_node: int = 0  #: from secondary shards, inside the node
    gathers_plain: int = 0  #: left exact by the options, or of weights that cannot be watched
    gathers_beyond_limit: int = 0  #: without a secondary shard, as ``max_bytes`` is used up
    gathered_intra_node_bytes: int = 0  #: sent to ranks of the same node
    gathered_inter_node_bytes: int = 0  #: sent to other nodes
    gathers_fused: int = 0  #: into the parameters, without a copy
    reduces: int = 0
    reduces_fused: int = 0  #: from the gradients, without a copy
    reduced_intra_node_bytes: int = 0
    reduced_inter_node_bytes: int = 0
    memory_bytes: int = 0  #: of this rank's secondary shard
    generation: int = 0  #: of lossless differences: gathers since whole weights were sent, that one included
    bits_per_weight: float = 0.0  #: of the last lossless difference to another node, or bits per byte; 0 without one
