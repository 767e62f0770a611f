"""Speed of the codec's kernels on what calls with default formats give them: the planner's `codec_share`.

A gather encodes one shard to int8:256 and decodes all. A reduction over nodes of 8 encodes a chunk of float32 to
int8:128 for its node, sums 7 such wires and its own values, encodes that as int4:128 for each of 10 or 63 other nodes,
and sums what comes from there. Figures are those of bench/codec.py, which tells how they are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.one_gpu import probes, stage
from codec_cuda import Copier, Pass, Row, measure
from zcomm import codec
from zcomm_bench import gpu_clock

COLUMNS = ("operation", "format", "dtype", "pieces", "moved_bytes", "median_us", "gbps", "of_copy")
REPEATS = stage.pick(25, 1)
# A slot's elements in a chunk, by the number of slots of other nodes: 128 MiB of float32 over 88 and 512 ranks.
PIECES = stage.pick({10: 380_928, 63: 131_072}, {10: 2048, 63: 256})
TERMS = 7
GATHERED = stage.pick(1 << 26, 1 << 12)  # elements of bfloat16, of all ranks


@dataclass
class ShapeRow(Row):
    pieces: int = 1


class Pieces:
    """Values of jobs of one length, their wires, and the wires that they are summed with."""

    def __init__(self, num: int, each: int, dtype: torch.dtype, format: str) -> None:
        self.num, self.each, self.format = num, each, format
        self.dtype = str(dtype).removeprefix("torch.")
        self.values = torch.empty(num * each, dtype=dtype, device="cuda").normal_()
        self.wire_bytes = codec.wire_bytes(format, self.dtype, each)
        self.room = torch.zeros(num * self.wire_bytes, dtype=torch.uint8, device="cuda")
        size = self.values.element_size() * each
        self.jobs = [(self.values.data_ptr() + i * size, each) for i in range(num)]
        self.wires = [self.room.data_ptr() + i * self.wire_bytes for i in range(num)]

    def row(self, operation: str, moved: int, format: str = "") -> ShapeRow:
        named = (operation, format or self.format, self.dtype, self.values.nbytes, moved)
        return ShapeRow(*named, pieces=self.num)

    def encode(self, stream: int = 0) -> Pass:
        return self._pass("encode", probes.ENCODE, stream)

    def decode(self, stream: int = 0) -> Pass:
        return self._pass("decode", probes.DECODE, stream)

    def _pass(self, name: str, operation: int, stream: int) -> Pass:
        fields = {"wires": self.wires, "format": self.format, "stream": stream}
        call = probes.codec_pass(operation, self.jobs, self.dtype, **fields)
        return self.row(name, self.values.nbytes + self.num * self.wire_bytes), call


def sum_encode(own: Pieces, inside: Pieces) -> Callable[[], None]:
    """The sum of own values and of TERMS wires, as `own` is encoded, piece by piece."""
    return probes.codec_pass(
        *(probes.SUM_ENCODE, own.jobs, "float32"),
        **{"wires": own.wires, "format": own.format, "terms": inside.wires, "term_format": inside.format},
        own=[values for values, _ in own.jobs],
    )


def check() -> None:
    """A batch gives the bytes of the CPU codec. Raises RuntimeError if not: a wrong one would be fast for nothing."""
    each = 512
    inside, own = Pieces(2 * TERMS, each, torch.float32, "int8:128"), Pieces(2, each, torch.float32, "int4:128")
    inside.encode()[1]()
    sum_encode(own, inside)()
    torch.cuda.synchronize()
    values, wires = own.values.cpu().split(each), inside.room.cpu().split(inside.wire_bytes)
    for i, made in enumerate(own.room.cpu().split(own.wire_bytes)):
        of_job = wires[i * TERMS : (i + 1) * TERMS]
        terms = [(values[i], "exact"), *((wire, inside.format) for wire in of_job)]
        expected = codec.decode_sum_encode(terms, each, own.format, out=torch.empty_like(made))
        if not torch.equal(expected, made):
            raise RuntimeError(f"piece {i}: expected the bytes of the CPU codec, got others")


def reduction(num: int, each: int) -> Iterator[Pass]:
    """Passes of a chunk, whose tensors live until the last is measured."""
    inside = Pieces(num * TERMS, each, torch.float32, "int8:128")
    yield inside.encode()
    own = Pieces(num, each, torch.float32, "int4:128")
    sums = torch.empty_like(own.values)
    moved = own.values.nbytes + num * (TERMS * inside.wire_bytes + own.wire_bytes)
    row = own.row(f"sum of {TERMS} and own values, encoded", moved, "int8:128 to int4:128")
    yield row, sum_encode(own, inside)
    # What the other nodes send: one slot of the owner's, from each.
    result = Pieces(1, each, torch.float32, "int4:128")
    yield (
        result.row(f"sum of {num} and own values", 2 * result.values.nbytes + num * own.wire_bytes),
        probes.codec_pass(
            *(probes.SUM, [(sums.data_ptr(), each)], "float32"),
            **{"terms": own.wires, "term_format": own.format, "own": [own.values.data_ptr()]},
        ),
    )


def passes() -> Iterator[Pass]:
    shard = Pieces(1, GATHERED // 8, torch.bfloat16, "int8:256")
    yield shard.encode()
    gathered = Pieces(8, GATHERED // 8, torch.bfloat16, "int8:256")
    gathered.encode()[1]()
    yield gathered.decode()
    del shard, gathered
    for num, each in PIECES.items():
        yield from reduction(num, each)


def rows() -> Iterator[dict[str, Any]]:
    check()
    yield from map(asdict, measure(passes(), Copier("cuda"), REPEATS, gpu_clock.seconds_of))


if __name__ == "__main__":
    stage.keep(stage.output(__doc__), "real_shapes", COLUMNS, rows())
