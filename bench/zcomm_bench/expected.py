"""Expected results of compressed collectives, bit for bit: the steps of the design by ``zcomm_bench.reference``.

Values are those of the reference: NumPy arrays, bfloat16 as bit patterns. ``dtype`` is a name of its ``DTYPES``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zcomm_bench import reference
from zcomm_bench.reference import Values

Nodes = Sequence[int]  # the node of each rank


def roundtrip(values: Values, dtype: str, format: str) -> Values:
    """What arrives of values that are sent once."""
    return reference.decode(reference.encode(values, format), format, values.size, dtype)


def arrives(values: Values, dtype: str, source: int, to: int, formats: str, nodes: Nodes) -> Values:
    """What rank ``to`` has of values that rank ``source`` sends to it: its own stay as they are."""
    inside, between = _hops(formats)
    return values if source == to else roundtrip(values, dtype, inside if nodes[source] == nodes[to] else between)


def all_gather(shards: Sequence[Values], dtype: str, format: str) -> Values:
    """Every rank's shard (n,) -> what every rank gathers (size * n,)."""
    return np.concatenate([roundtrip(shard, dtype, format) for shard in shards])


def reduce_scatter(
    inputs: Sequence[Values], dtype: str, owner: int, formats: str, nodes: Nodes, factor: float = 1.0
) -> Values:
    """Every rank's contribution (n,) to the shard of ``owner`` -> that shard (n,)."""
    inside, between = _hops(formats)
    num = inputs[0].size

    def term(sender: int, summing: int) -> tuple[reference.Bytes, str]:
        format = "exact" if sender == summing else inside if nodes[sender] == nodes[summing] else between
        return reference.encode(inputs[sender], format), format

    members = [[rank for rank in range(len(nodes)) if nodes[rank] == node] for node in dict.fromkeys(nodes)]
    if not _is_hierarchical(members):
        terms = [term(sender, owner) for sender in range(len(nodes))]
        return reference.decode_sum(terms, num, dtype, factor=factor, wire_dtype=dtype)

    local = next(ranks.index(owner) for ranks in members if owner in ranks)
    sums = []
    for ranks in members:
        terms = [term(sender, ranks[local]) for sender in ranks]
        if owner in ranks:
            sums.append((reference.decode_sum(terms, num, "float32", wire_dtype=dtype).view(np.uint8), "exact"))
        else:
            sums.append((reference.decode_sum_encode(terms, num, between, wire_dtype=dtype), between))
    return reference.decode_sum(sums, num, dtype, factor=factor)


def all_reduce(inputs: Sequence[Values], dtype: str, formats: str, nodes: Nodes, factor: float = 1.0) -> Values:
    """Every rank's tensor (n,) -> what every rank gets (n,)."""
    blocks = [max(reference.parse_format(format).block_size, 1) for format in _hops(formats)]
    size, num = len(inputs), inputs[0].size
    granule = math.lcm(*blocks)
    shard = math.ceil(num / size / granule) * granule  # whole blocks
    gathered = []
    for owner in range(size):
        parts = [one[owner * shard : (owner + 1) * shard] for one in inputs]
        if parts[0].size:
            reduced = reduce_scatter(parts, dtype, owner, formats, nodes, factor)
            gathered.append(roundtrip(reduced, dtype, _hops(formats)[0]))
    return np.concatenate(gathered) if gathered else inputs[0].copy()


def _hops(formats: str) -> tuple[str, str]:
    """The formats inside a node and between nodes."""
    inside, _, between = formats.partition("/")
    return inside, between or inside


def _is_hierarchical(members: list[list[int]]) -> bool:
    return len(members) > 1 and len(members[0]) > 1 and len({len(ranks) for ranks in members}) == 1
