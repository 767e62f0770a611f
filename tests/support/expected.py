"""Expected results of compressed collectives, bit for bit: the steps of the design in terms of ``zcomm.reference``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

from zcomm import reference

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Nodes = Sequence[int]  # the node of each rank
HALF_STEP = 0.5 * (1 + 2**-7)  # of absmax / qmax: the scale is rounded up to 8 significant bits


def values_of(tensor: torch.Tensor) -> reference.Values:
    """The elements of ``tensor`` as the reference takes them: bfloat16 as bit patterns."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.int16).numpy().view(np.uint16) if flat.dtype == torch.bfloat16 else flat.numpy()


def tensor_of(values: reference.Values, dtype: torch.dtype) -> torch.Tensor:
    values = np.ascontiguousarray(values)
    if dtype == torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def roundtrip(tensor: torch.Tensor, format: str) -> torch.Tensor:
    name = NAMES[tensor.dtype]
    wire = reference.encode(values_of(tensor), format)
    return tensor_of(reference.decode(wire, format, tensor.numel(), name), tensor.dtype)


def all_gather(shards: Sequence[torch.Tensor], format: str) -> torch.Tensor:
    """Every rank's shard (n,) -> what every rank gathers (size * n,)."""
    return torch.cat([roundtrip(shard, format) for shard in shards])


def reduce_scatter(
    inputs: Sequence[torch.Tensor], owner: int, formats: str, nodes: Nodes, factor: float = 1.0
) -> torch.Tensor:
    """Every rank's contribution (n,) to the shard of ``owner`` -> that shard (n,)."""
    inside, between = formats.split("/") if "/" in formats else (formats, formats)
    dtype, num = inputs[0].dtype, inputs[0].numel()
    name = NAMES[dtype]
    values = [values_of(tensor) for tensor in inputs]

    def term(sender: int, summing: int) -> tuple[reference.Bytes, str]:
        format = "exact" if sender == summing else inside if nodes[sender] == nodes[summing] else between
        return reference.encode(values[sender], format), format

    members = [[rank for rank in range(len(nodes)) if nodes[rank] == node] for node in dict.fromkeys(nodes)]
    if not _is_hierarchical(members):
        terms = [term(sender, owner) for sender in range(len(nodes))]
        return tensor_of(reference.decode_sum(terms, num, name, factor=factor, wire_dtype=name), dtype)

    local = next(ranks.index(owner) for ranks in members if owner in ranks)
    sums = []
    for ranks in members:
        terms = [term(sender, ranks[local]) for sender in ranks]
        if owner in ranks:
            sums.append((reference.decode_sum(terms, num, "float32", wire_dtype=name).view(np.uint8), "exact"))
        else:
            sums.append((reference.decode_sum_encode(terms, num, between, wire_dtype=name), between))
    return tensor_of(reference.decode_sum(sums, num, name, factor=factor), dtype)


def all_reduce(inputs: Sequence[torch.Tensor], formats: str, nodes: Nodes, factor: float = 1.0) -> torch.Tensor:
    """Every rank's tensor (n,) -> what every rank gets (n,)."""
    inside, between = formats.split("/") if "/" in formats else (formats, formats)
    blocks = [max(reference.parse_format(format).block_size, 1) for format in (inside, between)]
    size, num = len(inputs), inputs[0].numel()
    granule = math.lcm(*blocks)
    shard = math.ceil(num / size / granule) * granule  # whole blocks
    pieces = [tensor.split(shard) for tensor in inputs] if num else []
    gathered = []
    for owner in range(size):
        parts = [one[owner] for one in pieces if owner < len(one)]
        if parts:
            gathered.append(roundtrip(reduce_scatter(parts, owner, formats, nodes, factor), inside))
    return torch.cat(gathered) if gathered else inputs[0].clone()


def digest(tensor: torch.Tensor) -> str:
    """A short text that two tensors share if they have the same bits."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    """Fails with the first element that differs."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    got, want = got.reshape(-1), want.reshape(-1)
    differs = (got.view(torch.uint8) != want.view(torch.uint8)).nonzero()
    if differs.numel():
        first = int(differs[0]) // got.element_size()
        raise AssertionError(f"{what}: element {first} of {len(got)}: got {got[first]!r}, want {want[first]!r}")


def _is_hierarchical(members: list[list[int]]) -> bool:
    return len(members) > 1 and len(members[0]) > 1 and len({len(ranks) for ranks in members}) == 1
