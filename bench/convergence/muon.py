"""Muon (Jordan et al., 2024) over shards: each rank orthogonalizes the momentum of some matrices, whose shards it gets
from all ranks and whose updates it sends back, by two all-to-alls of bfloat16."""

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zcomm.testing import LocalRank, LocalWorld

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration; it brings singular values close to 1
ITERATIONS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """The (m, n) matrix with singular values near 1 in place of those of ``matrix``, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    x = wide / (wide.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if matrix.size(0) <= matrix.size(1) else x.T


class Muon:
    """Steps some columns of shards, (ranks, elements of a shard), that hold matrices. ``shapes`` are those of the
    matrices by their first columns; ``formats`` is what the all-to-alls travel in."""

    def __init__(
        self, world: LocalWorld, shards: nn.Parameter, shapes: dict[int, tuple[int, int]], formats: str
    ) -> None:
        self._world, self._shards, self._shapes, self._formats = world, shards, shapes, formats
        self._momentum = {begin: torch.zeros_like(shards[:, :length]) for begin, length in self._lengths().items()}
        self.bytes: list[tuple[float, float]] = []  # that a rank has sent inside its node and to others, step by step

    def _lengths(self) -> dict[int, int]:
        return {begin: rows * columns // self._world.size for begin, (rows, columns) in self._shapes.items()}

    @torch.no_grad()
    def step(self, before: Tensor, learning_rate: float) -> None:
        """Replace what another optimizer has made of the matrices, which ``before`` has as they were."""
        assert self._shards.grad is not None
        momenta = {}
        for begin, length in self._lengths().items():
            gradient = self._shards.grad[:, begin : begin + length]
            momentum = self._momentum[begin].lerp_(gradient, 1 - MOMENTUM)
            momenta[begin] = gradient.lerp(momentum, MOMENTUM).bfloat16()
        begins, self._sent = list(momenta), [0.0, 0.0]
        for first in range(0, len(begins), self._world.size):
            owned = begins[first : first + self._world.size]  # by rank
            for begin, update in self._updates(owned, momenta).items():
                # As large as an update of AdamW (Liu et al., arXiv 2502.16982): one learning rate serves both.
                scale = 0.2 * math.sqrt(max(self._shapes[begin]))
                columns = slice(begin, begin + update.size(1))
                self._shards[:, columns] = before[:, columns] - learning_rate * scale * update.float()
        self.bytes.append((self._sent[0], self._sent[1]))

    def _updates(self, owned: Sequence[int], momenta: dict[int, Tensor]) -> dict[int, Tensor]:
        """Orthogonalized shards, (ranks, elements of a shard), of the matrices that the first ranks own."""
        lengths = [momenta[begin].size(1) for begin in owned] + [0] * (self._world.size - len(owned))
        back = {begin: torch.empty_like(momenta[begin]) for begin in owned}

        def body(rank: LocalRank) -> tuple[int, int]:
            own = lengths[rank.rank]
            matrix = torch.empty(own * rank.size, dtype=torch.bfloat16)
            mine, theirs = [own] * rank.size, torch.cat([momenta[begin][rank.rank] for begin in owned])
            there = rank.all_to_all(theirs, matrix, splits=lengths, out_splits=mine, formats=self._formats)
            if own:
                shape = self._shapes[owned[rank.rank]]
                matrix = orthogonalize(matrix.float().reshape(shape)).bfloat16().reshape(-1).contiguous()
            received = torch.empty_like(theirs)
            again = rank.all_to_all(matrix, received, splits=mine, out_splits=lengths, formats=self._formats)
            for begin, part in zip(owned, received.split(lengths[: len(owned)]), strict=True):
                back[begin][rank.rank] = part
            return (
                there.intra_node_bytes + again.intra_node_bytes,
                there.inter_node_bytes + again.inter_node_bytes,
            )

        of_ranks = self._world.run(body)
        for link in (0, 1):
            self._sent[link] += statistics.fmean(sent[link] for sent in of_ranks)
        return back
