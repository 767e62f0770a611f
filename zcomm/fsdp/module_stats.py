"""What one module of FSDP2 has sent how."""

from __future__ import annotations

from dataclasses import dataclass

from zcomm.fsdp import _fsdp2
from zcomm.fsdp.collectives import Collectives
from zcomm.fsdp.rule import Rule
from zcomm.fsdp.secondary_shard import KeptValues, SecondaryShard


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


def stats_of(group: Collectives, rule: Rule) -> ModuleStats:
    """Return what the group has sent under ``rule``."""
    numels = [_fsdp2.num_elements(param) for param in group.params]
    made = ModuleStats(
        weights=rule.weights or "",
        gradients=rule.gradients or "",
        elements=sum(numels),
        exempt_elements=sum(numel for numel, exempt in zip(numels, rule.exempt, strict=True) if exempt),
        gathers=group.gathered.calls,
        gathers_plain=group.gathers_exact,
        gathers_fused=group.gathers_fused,
        reduces_fused=group.reduces_fused,
        gathered_intra_node_bytes=group.gathered.intra_node_bytes,
        gathered_inter_node_bytes=group.gathered.inter_node_bytes,
        reduces=group.reduced.calls,
        reduced_intra_node_bytes=group.reduced.intra_node_bytes,
        reduced_inter_node_bytes=group.reduced.inter_node_bytes,
    )
    shard = group.strategy
    if isinstance(shard, SecondaryShard):
        made.gathers += shard.intra_node.calls
        made.gathered_intra_node_bytes += shard.intra_node.intra_node_bytes
        made.gathered_inter_node_bytes += shard.intra_node.inter_node_bytes
        made.gathers_inter_node = shard.gathers_inter_node
        made.gathers_intra_node = shard.gathers_intra_node
        made.gathers_plain += shard.gathers_plain
        made.gathers_beyond_limit = shard.gathers_beyond_limit
        made.memory_bytes = shard.memory_bytes
    if isinstance(shard, KeptValues):
        made.generation, made.bits_per_weight = shard.generation, shard.bits_per_weight
    return made
