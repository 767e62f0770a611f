"""How long a reduction's chain of kernels lasts beside matrix products: what decides how many chunks a call has.

The chain is a reduce-scatter's in two hops. A chunk has four kernels: an encode, a sum that is encoded, and two sums.
It has two NCCL groups, which a copying kernel replaces here. With `streams` "one", all kernels run on the caller's
stream. With "lanes", as in zcomm, the kernels of a step run side by side. The products are square, or the five of a
layer with 70 B parameters. `waits` is the time that products add to the chain, over the time of one product. Medians
of rounds in turn.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.one_gpu import probes, stage
from bench.one_gpu.beside_gemm import HOLD, SIZE
from bench.one_gpu.real_shapes import Pieces

ELEMENTS = stage.pick(1 << 28, 1 << 13)  # of float32, in all chunks
CHUNKS = stage.pick((1, 2, 4, 13, 26), (1, 2))
NODES, TERMS = 2, 7  # one other node, and seven other ranks of the node
LAYER = stage.pick((8192, 10240, 8192, 57344, 28672), (64, 64, 64, 64, 64))  # widths of a layer's matrices
TOKENS = stage.pick(2048, 16)
ROUNDS = stage.pick(5, 2)
COLUMNS = ("products", "streams", "chunks", "product_ms", "alone_ms", "beside_ms", "slowed_ms", "waits")

Call = Callable[[], object]


def recorded(stream: Any) -> Any:
    """An event behind what is queued on the stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class Chunk:
    """Kernels of one chunk on streams that are given with each call."""

    def __init__(self, num_elements: int) -> None:
        each = num_elements // (NODES * TERMS) // 128 * 128
        self.inside = Pieces(NODES * TERMS, each, torch.float32, "int8:128")
        self.own = Pieces(1, each, torch.float32, "int4:128")
        self.sums = torch.empty_like(self.own.values)
        self.room = torch.empty_like(self.inside.room)

    def encode(self, stream: int) -> Call:
        return self.inside.encode(stream)[1]

    def forward(self, stream: int) -> Call:
        own, inside = self.own, self.inside
        fields = {"wires": own.wires, "format": own.format, "terms": inside.wires[:TERMS], "term_format": inside.format}
        return probes.codec_pass(
            *(probes.SUM_ENCODE, own.jobs, "float32"), **fields, own=[own.values.data_ptr()], stream=stream
        )

    def total(self, stream: int) -> Call:
        job = [(self.sums.data_ptr(), self.own.each)]
        fields = {"terms": self.own.wires, "term_format": self.own.format, "own": [self.own.values.data_ptr()]}
        return probes.codec_pass(probes.SUM, job, "float32", **fields, stream=stream)

    def group(self) -> None:
        torch.add(self.inside.room, 0, out=self.room)


class Chain:
    """A reduction of so many chunks. With lanes, kernels of a step fork from the caller's stream and join it."""

    def __init__(self, num_chunks: int, num_lanes: int) -> None:
        self.caller, self.groups = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self.lanes = [torch.cuda.Stream(priority=-1) for _ in range(num_lanes)]
        self.chunks = [Chunk(ELEMENTS // num_chunks) for _ in range(num_chunks)]

    def __call__(self) -> Any:
        done = list[Any]()
        last = len(self.chunks) + 3
        for step in range(last + 1):
            kernels = [(step, "encode"), (step - 2, "forward"), (step - 3, "total"), (step - 4, "total")]
            if step >= 2:
                self.caller.wait_event(done[step - 2])
            self._run([(chunk, name) for chunk, name in kernels if 0 <= chunk < len(self.chunks)])
            self.groups.wait_event(recorded(self.caller))
            with torch.cuda.stream(self.groups):
                if step < last - 1:
                    self.chunks[min(step, len(self.chunks) - 1)].group()
            done.append(recorded(self.groups))
        self.caller.wait_event(done[-1])
        return recorded(self.caller)

    def _run(self, kernels: list[tuple[int, str]]) -> None:
        streams = itertools.cycle(self.lanes or [self.caller])
        for (chunk, name), stream in zip(kernels, streams, strict=False):
            stream.wait_event(recorded(self.caller))
            with torch.cuda.stream(stream):
                getattr(self.chunks[chunk], name)(stream.cuda_stream)()
        for lane in self.lanes:
            self.caller.wait_event(recorded(lane))


def seconds(chain: Chain | None, product: Call, num_products: int) -> tuple[float, float]:
    """Of the products, and of the chain, which start together."""
    own = torch.cuda.current_stream()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HOLD)
    start.record(own)
    chain_end = end
    if chain is not None:
        chain.caller.wait_event(start)
        chain_end = chain()
    for _ in range(num_products):
        product()
    end.record(own)
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3, start.elapsed_time(chain_end) * 1e-3


def products() -> Iterator[tuple[str, Call]]:
    a, b, c = (torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))
    yield f"square {SIZE}", lambda: torch.matmul(a, b, out=c)
    inputs = [torch.empty(TOKENS, width, dtype=torch.bfloat16, device="cuda") for width in LAYER]
    matrices = [torch.empty(width, LAYER[0], dtype=torch.bfloat16, device="cuda") for width in LAYER]
    pairs = itertools.cycle(list(zip(inputs, matrices, strict=True)))
    yield f"of a layer, {TOKENS} tokens", lambda: torch.matmul(*next(pairs))


def rows() -> Iterator[dict[str, Any]]:
    for name, product in products():
        num = stage.pick(20, 2)
        for _ in range(2):
            of_one = seconds(None, product, num)[0] / num
        for num_chunks in CHUNKS:
            for streams, num_lanes in (("one", 0), ("lanes", 4)):
                chain = Chain(num_chunks, num_lanes)
                seconds(chain, product, 1)
                longest = int(seconds(chain, product, 0)[1] / of_one) + 6 * num_chunks + 10
                rounds = [(seconds(chain, product, 0)[1], *seconds(chain, product, longest)) for _ in range(ROUNDS)]
                alone, slowed, beside = (statistics.median(times) for times in zip(*rounds, strict=True))
                yield {
                    "products": name,
                    "streams": streams,
                    "chunks": num_chunks,
                    "product_ms": of_one * 1e3,
                    "alone_ms": alone * 1e3,
                    "beside_ms": beside * 1e3,
                    "slowed_ms": (slowed - longest * of_one) * 1e3,
                    "waits": (beside - alone) / of_one,
                }


if __name__ == "__main__":
    stage.keep(stage.output(__doc__), "chains", COLUMNS, rows())
