"""What the codec's kernels take from computing beside them: the planner's `taken_share`, which decides where calls are
hidden.

Matrix products of bfloat16 run on one stream, the codec's kernels or copies on another, which is done first. `taken` is
the time by which the products get longer, over the time of the kernels by themselves. `delay` is the time of the
kernels with products, over the same. zcomm's streams have high priority by default. Medians of rounds in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.one_gpu import stage
from bench.one_gpu.real_shapes import Pieces
from codec_cuda import Copier

SIZE = stage.pick(8192, 64)
VALUES_BYTES = stage.pick(1 << 28, 1 << 12)  # of a pass
PRODUCTS = stage.pick(40, 2)
ROUNDS = stage.pick(7, 2)
SHARE = 0.4  # of the products' time, that the kernels take by themselves
PRIORITIES = {"high": -1, "normal": 0}
HOLD = 50_000_000  # cycles, in which the host queues all
COLUMNS = (
    *("priority", "operation", "format", "dtype", "gigabytes", "products_ms", "alone_ms", "slowed_ms", "side_ms"),
    *("slowdown_ms_per_gb", "taken", "delay"),
)

Call = Callable[[], object]


def seconds(other: Any, product: Call, num_products: int, side: Call, num_sides: int) -> tuple[float, float]:
    """Of so many products, and of so many sides on the stream `other`, which start together."""
    own = torch.cuda.current_stream()
    start, end, other_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(HOLD)
    start.record(own)
    other.wait_event(start)
    with torch.cuda.stream(other):
        for _ in range(num_sides):
            side()
    other_end.record(other)
    for _ in range(num_products):
        product()
    end.record(own)
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3, start.elapsed_time(other_end) * 1e-3


def beside(other: Any, product: Call, side: Call, moved_bytes: int) -> dict[str, Any]:
    """The figures of one kind of sides. There are fewer of them if they take longer than the products."""
    seconds(other, product, 2, side, 2)
    products, sides_of_ten = seconds(other, product, PRODUCTS, side, 0)[0], seconds(other, product, 0, side, 10)[1]
    num = max(1, int(SHARE * products / (sides_of_ten / 10)))
    while True:
        rounds = [
            (
                seconds(other, product, PRODUCTS, side, 0)[0],
                seconds(other, product, 0, side, num)[1],
                *seconds(other, product, PRODUCTS, side, num),
            )
            for _ in range(ROUNDS)
        ]
        products, alone, slowed, side_seconds = (statistics.median(times) for times in zip(*rounds, strict=True))
        if side_seconds <= slowed or num == 1:
            break
        num //= 2
    gigabytes = num * moved_bytes / 1e9
    return {
        "gigabytes": gigabytes,
        "products_ms": products * 1e3,
        "alone_ms": alone * 1e3,
        "slowed_ms": slowed * 1e3,
        "side_ms": side_seconds * 1e3,
        "slowdown_ms_per_gb": (slowed - products) * 1e3 / gigabytes,
        "taken": (slowed - products) / alone,
        "delay": side_seconds / alone,
    }


def sides(other: Any) -> Iterator[tuple[str, str, str, int, Call]]:
    """Operation, format, dtype, bytes that a pass moves, and the pass, whose tensors live until it is measured."""
    for dtype, format in ((torch.bfloat16, "int8:256"), (torch.float32, "int8:128")):
        pieces = Pieces(1, VALUES_BYTES // dtype.itemsize, dtype, format)
        for row, call in (pieces.encode(other.cuda_stream), pieces.decode(other.cuda_stream)):
            yield row.operation, format, row.dtype, row.moved_bytes, call
    yield "copy", "", "", 2 * VALUES_BYTES, Copier("cuda")(2 * VALUES_BYTES)


def rows() -> Iterator[dict[str, Any]]:
    a, b, c = (torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(3))

    def product() -> object:
        return torch.matmul(a, b, out=c)

    for priority, number in PRIORITIES.items():
        other = torch.cuda.Stream(priority=number)
        for operation, format, dtype, moved, side in sides(other):
            figures = beside(other, product, side, moved)
            yield {"priority": priority, "operation": operation, "format": format, "dtype": dtype, **figures}


if __name__ == "__main__":
    stage.keep(stage.output(__doc__), "beside_gemm", COLUMNS, rows())
