"""Expected results of compressed collectives, bit for bit, as tensors: those of ``zcomm_bench.expected``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zcomm_bench import expected
from zcomm_bench.expected import Nodes
from zcomm_bench.tensors import tensor_of, values_of

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
HALF_STEP = 0.5 * (1 + 2**-7)  # of absmax / qmax: the scale is rounded up to 8 significant bits


def roundtrip(tensor: torch.Tensor, format: str) -> torch.Tensor:
    return tensor_of(expected.roundtrip(values_of(tensor), DTYPE_NAMES[tensor.dtype], format), tensor.dtype)


def all_gather(shards: Sequence[torch.Tensor], format: str) -> torch.Tensor:
    """Every rank's shard (n,) -> what every rank gathers (size * n,)."""
    dtype = shards[0].dtype
    return tensor_of(expected.all_gather([values_of(shard) for shard in shards], DTYPE_NAMES[dtype], format), dtype)


def reduce_scatter(
    inputs: Sequence[torch.Tensor], owner: int, formats: str, nodes: Nodes, factor: float = 1.0
) -> torch.Tensor:
    """Every rank's contribution (n,) to the shard of ``owner`` -> that shard (n,)."""
    dtype = inputs[0].dtype
    values = [values_of(tensor) for tensor in inputs]
    return tensor_of(expected.reduce_scatter(values, DTYPE_NAMES[dtype], owner, formats, nodes, factor), dtype)


def all_reduce(inputs: Sequence[torch.Tensor], formats: str, nodes: Nodes, factor: float = 1.0) -> torch.Tensor:
    """Every rank's tensor (n,) -> what every rank gets (n,)."""
    dtype = inputs[0].dtype
    values = [values_of(tensor) for tensor in inputs]
    return tensor_of(expected.all_reduce(values, DTYPE_NAMES[dtype], formats, nodes, factor), dtype)


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
