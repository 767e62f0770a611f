"""What one module of FSDP2 has sent how."""

from __future__ import annotations

from dataclasses import dataclass


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
