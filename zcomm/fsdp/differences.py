"""Exact 16-bit weights for fewer bytes than 8-bit ones: lossless differences between nodes.

In each node the holder of a rank's shard is the rank of the same local rank, modulo the ranks of the node. Holders keep
the values of the last gather. The owner of a shard sends what has changed since; inside a node the values travel as
they are. Messages are those of docs/wire_format.md: a header, so that the size of the body that follows is known. They
go through the exact path of the process group.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist

from zcomm import _core
from zcomm.distributed.groups import nodes_of

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_TAG = 0x5A443136  # of messages between two ranks: not a trainer's own
_HEADER = struct.Struct("<IBBHQQQQ24x")  # magic, version, kind, zeros, bytes, generation, hashes of base and result
_MAGIC, _VERSION = 0x3631445A, 1
_WHOLE, _DIFFERENCE = 0, 1


class DifferenceGather:
    """The gathers of one parameter group's shards, each of ``num_elements`` values of ``dtype``.

    ``generation`` counts the gathers since whole values were sent. It is 0, and whole values come next, until a gather
    is done, while one is under way and after one that has failed."""

    def __init__(self, group: dist.ProcessGroup, backend: Any, num_elements: int, dtype: torch.dtype) -> None:
        self.generation = 0
        self.bits_per_weight = 0.0  #: that the last gather sent to a holder, headers included
        self.between_bytes = 0  #: that this rank has sent to other nodes
        self.inside_bytes = 0  #: and to ranks of its node
        self._group = group
        self._rank = backend.rank()
        nodes = nodes_of(backend)
        self._node_peers = [
            peer for peer in range(len(nodes)) if nodes[peer] == nodes[self._rank] and peer != self._rank
        ]
        holder_in = {node: holders_of(nodes, node) for node in sorted(set(nodes))}
        self._holder_here = holder_in[nodes[self._rank]]
        held = [slot for slot, holder in enumerate(self._holder_here) if holder == self._rank]
        self._owners = [slot for slot in held if nodes[slot] != nodes[self._rank]]
        self._holders = [of[self._rank] for node, of in holder_in.items() if node != nodes[self._rank]]
        self._kept = {slot: torch.empty(num_elements, dtype=dtype) for slot in held}
        self._hashes: dict[int, int] = {}
        self._sends: list[dist.Work] = []  # that hold their tensors, if a gather fails
        self._room = torch.empty(_core.max_difference_bytes(num_elements), dtype=torch.uint8)

    def is_of(self, group: dist.ProcessGroup, shard: torch.Tensor) -> bool:
        kept = self._kept[self._rank]
        return group is self._group and kept.shape == shard.shape and kept.dtype == shard.dtype

    @staticmethod
    def memory_bytes_of(backend: Any, num_elements: int) -> tuple[int, int]:
        """That this rank will keep, and the most that any rank will."""
        nodes = nodes_of(backend)
        holders = [holder for node in set(nodes) for holder in holders_of(nodes, node)]
        counts = [holders.count(rank) for rank in range(len(nodes))]
        return 2 * num_elements * counts[backend.rank()], 2 * num_elements * max(counts)

    def memory_bytes(self) -> int:
        return sum(values.nbytes for values in self._kept.values())

    def gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        """Fills ``output`` with every rank's ``shard``. Raises RuntimeError if a shard that arrives is not the one that
        its owner has."""
        base, self.generation = self.generation, 0
        self._sends = self._send(shard, base)
        for owner in self._owners:
            self._receive(owner, base)
        for work in self._sends:
            work.wait()
        self.generation = base + 1
        self._gather_inside(output)

    def gather_again(self, output: torch.Tensor) -> None:
        """The values of the last gather once more, inside the node. Raises RuntimeError if what this rank keeps of them
        has been written to."""
        for slot, kept in self._kept.items():
            if _core.hash_of_values(_view(kept)) != self._hashes[slot]:
                self._fail(slot, f"generation {self.generation} has been written to")
        self._gather_inside(output)

    def _send(self, shard: torch.Tensor, base: int) -> list[dist.Work]:
        kept = self._kept[self._rank]
        if base == 0:
            kept.copy_(shard)
            body, result = kept.view(torch.uint8), _core.hash_of_values(_view(kept))
        else:
            num_bytes, result = _core.encode_difference(_view(shard), _view(kept), self._room.data_ptr())
            body = self._room[:num_bytes]
        num_bytes = _HEADER.size + body.numel()
        base_hash = self._hashes.get(self._rank, 0) if base else 0
        fields = (_MAGIC, _VERSION, _DIFFERENCE if base else _WHOLE, 0, num_bytes, base, base_hash, result)
        header = torch.frombuffer(bytearray(_HEADER.pack(*fields)), dtype=torch.uint8)
        self._hashes[self._rank] = result
        self.bits_per_weight = 8 * num_bytes / shard.numel()
        self.between_bytes += num_bytes * len(self._holders)
        return [self._start_send(message, holder) for holder in self._holders for message in (header, body)]

    def _receive(self, owner: int, base: int) -> None:
        kept = self._kept[owner]
        header = torch.empty(_HEADER.size, dtype=torch.uint8)
        self._start_receive(header, owner).wait()
        magic, version, kind, _, num_bytes, generation, base_hash, result = _HEADER.unpack(header.numpy().tobytes())
        if (magic, version) != (_MAGIC, _VERSION):
            self._fail(owner, f"rank {owner} sent no header of version {_VERSION}")
        if generation != base or kind != (_DIFFERENCE if base else _WHOLE):
            self._fail(
                owner, f"this rank holds generation {base}, rank {owner} sent a difference to generation {generation}"
            )
        if base and base_hash != self._hashes[owner]:
            self._fail(owner, f"generation {base} of this rank and of rank {owner} are not the same")
        body_bytes = num_bytes - _HEADER.size
        most = self._room.numel() if base else kept.nbytes
        if not 0 <= body_bytes <= most or (not base and body_bytes != most):
            self._fail(owner, f"rank {owner} announced {body_bytes} bytes, expected at most {most}")
        if base:
            body = torch.empty(body_bytes, dtype=torch.uint8)
            self._start_receive(body, owner).wait()
            received = _core.decode_difference(body.data_ptr(), body_bytes, _view(kept))
        else:
            self._start_receive(kept, owner).wait()
            received = _core.hash_of_values(_view(kept))
        if received != result:
            self._fail(
                owner,
                f"what this rank has made of generation {base} is not generation {base + 1} of rank {owner}: something "
                "has written into what one of the two keeps",
            )
        self._hashes[owner] = result

    def _compare_inside(self) -> None:
        """Raises RuntimeError if a rank of the node is about to hand on values of another gather."""
        own = torch.tensor([self.generation])
        theirs = [torch.empty_like(own) for _ in self._node_peers]
        works = [self._start_send(own, peer) for peer in self._node_peers]
        works += [self._start_receive(number, peer) for number, peer in zip(theirs, self._node_peers, strict=True)]
        for work in works:
            work.wait()
        for number, peer in zip(theirs, self._node_peers, strict=True):
            if int(number) != self.generation:
                self._fail(peer, f"this rank is at generation {self.generation}, rank {peer} at {int(number)}")

    def _gather_inside(self, output: torch.Tensor) -> None:
        self._compare_inside()
        slots = output.view(-1, next(iter(self._kept.values())).numel())
        works = []
        for values in self._kept.values():
            for peer in self._node_peers:
                self.inside_bytes += values.nbytes
                works.append(self._start_send(values, peer))
        for slot, holder in enumerate(self._holder_here):
            if holder == self._rank:
                slots[slot].copy_(self._kept[slot])
            else:
                works.append(self._start_receive(slots[slot], holder))
        for work in works:
            work.wait()

    def _start_send(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        work = dist.isend(tensor, group=self._group, group_dst=peer, tag=_TAG)
        assert work is not None  # this rank is in the group
        return work

    def _start_receive(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        work = dist.irecv(tensor, group=self._group, group_src=peer, tag=_TAG)
        assert work is not None
        return work

    def _fail(self, slot: int, what: str) -> None:
        self.generation = 0
        raise RuntimeError(f"differences of slot {slot} on rank {self._rank}: {what}")


def holders_of(nodes: list[int], node: int) -> list[int]:
    """Which rank of ``node`` holds each rank's shard."""
    ranks = [rank for rank in range(len(nodes)) if nodes[rank] == node]
    local_ranks = [nodes[:rank].count(nodes[rank]) for rank in range(len(nodes))]
    return [ranks[local_rank % len(ranks)] for local_rank in local_ranks]


def _view(values: torch.Tensor) -> tuple[int, int, str]:
    return values.data_ptr(), values.numel(), DTYPES[values.dtype]
