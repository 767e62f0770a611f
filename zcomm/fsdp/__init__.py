"""FSDP2 beyond what a change of backend gives: formats for each module and parameter, and secondary shards.

    fully_shard(model)
    zcomm.fsdp.compress(model)                 # norms and biases are sent exactly, in the same messages
    zcomm.fsdp.enable_secondary_shards(model)  # weights cross nodes once per optimizer step

Both take the place of FSDP2's own collectives, module by module, and work with each other in any order.
"""

from zcomm.fsdp.compress import Compression, ModuleTraffic, Selector, compress, one_dimensional, smaller_than
from zcomm.fsdp.secondary import ModuleStats, SecondaryShards, enable_secondary_shards

__all__ = [
    "Compression",
    "ModuleStats",
    "ModuleTraffic",
    "SecondaryShards",
    "Selector",
    "compress",
    "enable_secondary_shards",
    "one_dimensional",
    "smaller_than",
]
