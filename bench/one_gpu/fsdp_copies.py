"""FSDP2's copies of a layer of Llama 70B against the codec in their place.

FSDP2 copies what it has gathered into the parameters (split_with_sizes_copy, bfloat16), and gradients into the input
of its reduction, cast to float32 (chunk_cat). A compressed call comes on top: it decodes into what is copied then, and
encodes what was copied. `into parameters` and `of gradients` are the codec's kernels alone, straight into the
parameters and out of bfloat16 gradients, as a fusion would run them. The same bytes go over the links either way.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.one_gpu import probes, stage
from zcomm import codec
from zcomm_bench import gpu_clock

SHRINK = stage.pick(1, 128)
WIDTH, KEYS, HIDDEN = 8192 // SHRINK, 1024 // SHRINK, 28672 // SHRINK
LAYER = [
    *((WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH)),
    *((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (WIDTH,), (WIDTH,)),
]
RANKS = stage.pick((8, 64), (4, 8))
REPEATS = stage.pick(9, 1)
GATHERED_AS, REDUCED_AS = "int8:256", "int8:128"
COLUMNS = ("ranks", "pass", "traffic_bytes", "ms", "gbps")

Passes = dict[str, tuple[int, Callable[[], object]]]  # bytes read and written, and the pass


def split(tensors: list[torch.Tensor], ranks: int) -> list[probes.Job]:
    """The parts of all ranks, each shard's behind the other's, as FSDP2 lays them: rank by rank, tensor by tensor."""
    parts = []
    for rank in range(ranks):
        for tensor in tensors:
            num = tensor.numel() // ranks
            parts.append((tensor.data_ptr() + rank * num * tensor.element_size(), num))
    return parts


class Wires:
    """Room for the wires of jobs."""

    def __init__(self, jobs: list[probes.Job], dtype: str, format: str) -> None:
        sizes = [codec.wire_bytes(format, dtype, num) for _, num in jobs]
        self.nbytes = sum(sizes)
        self.room = torch.zeros(self.nbytes + 16 * len(sizes), dtype=torch.uint8, device="cuda")
        self.addresses, at = [], self.room.data_ptr()
        for size in sizes:
            self.addresses.append(at)
            at += -(-size // 16) * 16


def gathered(ranks: int) -> Passes:
    """After a gather of bfloat16."""
    parameters = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in LAYER]
    total = sum(parameter.numel() for parameter in parameters)
    flat = torch.empty(ranks, total // ranks, dtype=torch.bfloat16, device="cuda").normal_()
    sizes = [parameter.numel() // ranks for parameter in parameters]
    views = [parameter.view(ranks, -1) for parameter in parameters]

    def split_copy() -> None:
        torch.split_with_sizes_copy(flat, sizes, dim=1, out=views)

    stream = torch.cuda.current_stream().cuda_stream
    in_flat = [(row.data_ptr(), row.numel()) for row in flat]
    whole, parts = Wires(in_flat, "bfloat16", GATHERED_AS), split(parameters, ranks)
    by_part = Wires(parts, "bfloat16", GATHERED_AS)

    def decode(jobs: list[probes.Job], wires: Wires) -> Callable[[], object]:
        fields = {"wires": wires.addresses, "format": GATHERED_AS, "stream": stream, "keep": wires.room}
        probes.codec_pass(probes.ENCODE, jobs, "bfloat16", **fields)()
        return probes.codec_pass(probes.DECODE, jobs, "bfloat16", **fields)

    return {
        "split_with_sizes_copy": (4 * total, split_copy),
        "decode": (2 * total + whole.nbytes, decode(in_flat, whole)),
        "decode into parameters": (2 * total + by_part.nbytes, decode(parts, by_part)),
    }


def reduced(ranks: int) -> Passes:
    """Before a reduction in float32 of bfloat16 gradients."""
    gradients = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in LAYER]
    total = sum(gradient.numel() for gradient in gradients)
    flat = torch.empty(ranks, total // ranks, dtype=torch.float32, device="cuda")

    def chunk_cat() -> None:
        torch._chunk_cat(gradients, dim=0, num_chunks=ranks, out=flat)

    chunk_cat()
    stream = torch.cuda.current_stream().cuda_stream
    in_flat = [(row.data_ptr(), row.numel()) for row in flat]
    whole, parts = Wires(in_flat, "float32", REDUCED_AS), split(gradients, ranks)
    by_part = Wires(parts, "bfloat16", REDUCED_AS)

    def encode(jobs: list[probes.Job], dtype: str, wires: Wires) -> Callable[[], object]:
        fields = {"wires": wires.addresses, "format": REDUCED_AS, "stream": stream, "keep": wires.room}
        return probes.codec_pass(probes.ENCODE, jobs, dtype, **fields)

    return {
        "chunk_cat": (6 * total, chunk_cat),
        "encode": (4 * total + whole.nbytes, encode(in_flat, "float32", whole)),
        "encode of gradients": (2 * total + by_part.nbytes, encode(parts, "bfloat16", by_part)),
    }


def rows() -> Iterator[dict[str, Any]]:
    for ranks in RANKS:
        for make in (gathered, reduced):
            passes = make(ranks)
            times = gpu_clock.seconds_of([call for _, call in passes.values()], REPEATS)
            for (name, (traffic, _)), own in zip(passes.items(), times, strict=True):
                seconds = statistics.median(own)
                figures = {"traffic_bytes": traffic, "ms": seconds * 1e3, "gbps": traffic / seconds / 1e9}
                yield {"ranks": ranks, "pass": name, **figures}
            del passes


if __name__ == "__main__":
    stage.keep(stage.output(__doc__), "fsdp_copies", COLUMNS, rows())
