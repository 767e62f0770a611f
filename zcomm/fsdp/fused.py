"""Buffers that FSDP2 copies a layer into and out of, around its collectives, without their memory.

FSDP2 copies gathered shards from one buffer into the parameters, and gradients into another one, as wide as the
reduction. A :class:`Deferred` tensor stands in for either. It notes what FSDP2 copies into it, so that a gather decodes
straight into the parameters, and a reduction encodes the gradients themselves. Any other use of it gives it memory. On
a GPU a gather leaves wires, which are decoded when FSDP2 would copy: then nothing else uses the parameters' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zcomm.distributed import _fsdp2

COMPRESSIBLE = {torch.float32, torch.bfloat16, torch.float16}


class Buffer:
    """What the views of one deferred tensor share."""

    def __init__(self, allocate: Callable[[], torch.Tensor]) -> None:
        self._allocate = allocate
        self._memory: torch.Tensor | None = None
        self._ranks = 1
        self._own: tuple[Buffer, int] | None = None  # the shard to gather, and this rank
        self._gathered: Sequence[torch.Tensor] = ()
        self._decode: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._gradients: list[torch.Tensor] = []
        self._held: list[torch.Tensor] = []
        self._spent = False
        self.parts: list[torch.Tensor] = []  #: of a shard, flat

    def memory(self) -> torch.Tensor:
        """Return the buffer with what was copied into it, in memory from now on."""
        if self._spent:
            raise RuntimeError("zcomm: gradients were read once more after their reduction: use compress(fused=False)")
        if self._memory is None:
            self._memory = self._allocate()
            by_rank = self._memory.view(self._ranks, -1)
            if self.parts:
                torch.cat(self.parts, out=self._memory)
            elif self._gradients:
                _fsdp2.copy_gradients(self._gradients, by_rank)
                self._gradients = []
            elif self._gathered:
                torch.cat([part.view(self._ranks, -1) for part in self._gathered], dim=1, out=by_rank)
            elif self._decode is not None:
                self._decode([self._memory])
            elif self._own is not None:
                shard, rank = self._own
                numel = sum(part.numel() for part in shard.parts)
                shard._memory = self._memory.narrow(0, rank * numel, numel)  # FSDP2 gathers in place
                torch.cat(shard.parts, out=shard._memory)
        return self._memory

    def copy_shard(self, parts: Sequence[torch.Tensor], rank: int) -> Buffer:
        """Note the shard that this rank gathers, and return it."""
        numel = sum(part.numel() for part in parts)
        shard = Buffer(lambda: torch.empty(numel, dtype=parts[0].dtype, device=parts[0].device))
        shard.parts = [part.reshape(-1) for part in parts]
        self._own = shard, rank
        return shard

    def gather_into(self, parts: Sequence[torch.Tensor], num_ranks: int) -> None:
        """Note where a gather puts its values, each tensor with the shards of one parameter."""
        self._gathered, self._ranks = parts, num_ranks
        self._own = None

    def decode_later(self, decode: Callable[[Sequence[torch.Tensor]], None]) -> None:
        """Note a gather that has left wires, and how its values are written, each tensor with the shards of one
        parameter, or one with all. The shard is held: its parts may belong to a stream that does not wait for the
        gather, until FSDP2 drops its buffer."""
        self._decode = decode

    def copy_out(self, sizes: Sequence[int], out: Sequence[torch.Tensor]) -> None:
        """Write what was gathered to where it is not already."""
        if self._decode is not None and self._memory is None:
            return self._decode([target.view(-1) for target in out])
        if not self._gathered:
            _fsdp2.copy_parameters(self.memory().view(out[0].shape[0], -1), sizes, out)
            return
        for part, target in zip(self._gathered, out, strict=True):
            if part.data_ptr() != target.data_ptr():  # not sharded by rows: FSDP2 puts them together from a copy
                target.copy_(part.view(target.shape))

    def copy_gradients(self, gradients: Sequence[torch.Tensor], num_ranks: int) -> None:
        """Note gradients, which must not change until they are reduced."""
        self._gradients, self._ranks = list(gradients), num_ranks
        # FSDP2 drops its buffer when the stream that made gradients has waited for their reduction on another stream.
        self._held = [] if gradients[0].is_cpu else list(gradients)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients, flat, with their rows padded for all ranks; none if they have been copied."""
        if self._memory is not None or self._spent:
            return []
        return [_padded(each, self._ranks) for each in self._gradients]

    def release_gradients(self) -> None:
        """Let go of reduced gradients, on a CPU at once: FSDP2 holds its buffer until it reduces the next layer."""
        self._gradients, self._spent = [], True


def _padded(gradient: torch.Tensor, num_ranks: int) -> torch.Tensor:
    missing = -gradient.shape[0] % num_ranks
    if missing:
        gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
    return gradient.reshape(-1)


class Deferred(torch.Tensor):  # type: ignore[misc]
    """Stand-in for a buffer of FSDP2's, or a view of it."""

    buffer: Buffer

    @staticmethod
    def __new__(cls, buffer: Buffer, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Deferred:
        made: Deferred = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        made.buffer = buffer
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        return func(*tree_map(in_memory, args), **tree_map(in_memory, kwargs or {}))


def decodes_later(device: torch.device) -> bool:
    """Tell whether gathers leave wires. On a GPU parameters' memory belongs to the stream that computes; a gather runs
    on another one, which would have to wait until nothing uses that memory. On a CPU values are decoded while others
    are on their way."""
    return bool(device.type != "cpu")


def in_memory(value: Any) -> Any:
    """Return a deferred tensor with memory, anything else as it is."""
    return value.buffer.memory().view(value.shape) if isinstance(value, Deferred) else value


def _view(tensor: Deferred, size: Sequence[int]) -> Deferred:
    shape = torch.empty(tensor.shape, device="meta").view(size).shape
    return Deferred(tensor.buffer, shape, tensor.dtype, tensor.device)


def _copy_in(
    parts: Sequence[torch.Tensor], output: Deferred, sizes: Sequence[int], numel: int, rank: int
) -> tuple[Deferred, Deferred]:
    shard = output.buffer.copy_shard(parts, rank)
    return Deferred(shard, [numel], output.dtype, output.device), output


def _copy_out(output: Deferred, sizes: Sequence[int], dim: int = 0, *, out: Sequence[torch.Tensor]) -> None:
    output.buffer.copy_out(sizes, out)


def _copy_gradients(tensors: Sequence[torch.Tensor], dim: int, num_chunks: int, *, out: Deferred) -> None:
    out.buffer.copy_gradients(tensors, num_chunks)


_HANDLERS: dict[Any, Callable[..., Any]] = {torch.ops.aten.view.default: _view}
_HANDLERS.update(zip(_fsdp2.COPIES, (_copy_in, _copy_out, _copy_gradients), strict=True))
_HANDLERS.pop(None, None)


def gradients_of(reduced: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients that a reduction may read themselves, in its dtype or, where that is float32, another."""
    gradients = reduced.buffer.gradients() if isinstance(reduced, Deferred) else []
    given = {gradient.dtype for gradient in gradients}
    is_exact = given == {reduced.dtype} or (reduced.dtype == torch.float32 and given < COMPRESSIBLE)
    return gradients if is_exact else []
