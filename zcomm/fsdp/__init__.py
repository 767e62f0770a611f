"""FSDP2 beyond what a change of backend gives: formats for modules and parameters, and weights that cross nodes once.

    zcomm.fsdp.compress(model, weights="lossless")

It comes before or after ``fully_shard``, and again for parts of the model that are to differ.
"""

from zcomm.fsdp.compression import Compression, compress
from zcomm.fsdp.rule import ModuleStats
from zcomm.fsdp.selection import Selector, one_dimensional, smaller_than

__all__ = ["Compression", "ModuleStats", "Selector", "compress", "one_dimensional", "smaller_than"]
