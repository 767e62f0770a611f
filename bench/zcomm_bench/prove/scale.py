"""What is measured, and how much of it: on a cluster, and in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

# As mixed precision has them. Planner and codec name dtypes as torch does, the benchmark as nccl-tests.
CALLS = {"all_gather": "bfloat16", "reduce_scatter": "float32", "all_reduce": "float32"}
BENCH_DTYPES = {"bfloat16": "bfloat16", "float32": "float"}
GATHER, REDUCE = "int8:256", "int8:128/int4:128"  # the defaults, named so that no environment changes them
FORMATS = {"all_gather": GATHER, "reduce_scatter": REDUCE, "all_reduce": REDUCE}
NOISE_CALLS = ("all_gather", "reduce_scatter")
LARGEST = 2  # sizes, over networks of fewer cards


@dataclass(frozen=True)
class Model:
    """Of the training step: a decoder of `layers`, each a unit of FSDP2. A rank's step has `batch` sequences."""

    width: int
    layers: int
    sequence: int
    batch: int
    vocabulary: int = 1024


@dataclass(frozen=True)
class Scale:
    """`sizes` are those of the sweep in bytes; `noise_sizes` and `beside_bytes` of the calls that are measured against
    themselves, and beside matrix multiplications. A cell of the sweep takes about `cell_seconds`, and at most `turns`
    turns. `bits_elements`: of a shard. Training steps go in `blocks` of `block_steps`, exact and compressed in turn."""

    sizes: tuple[int, ...]
    noise_sizes: tuple[int, ...]
    beside_bytes: int
    cell_seconds: float
    turns: int
    bits_elements: int
    matrix: int
    models: tuple[Model, ...]
    blocks: int
    block_steps: int
    drill_seconds: float = 30.0


_KIB, _MIB = 1 << 10, 1 << 20
CLUSTER = Scale(
    sizes=tuple(64 * _KIB * 4**power for power in range(8)),
    noise_sizes=(_MIB, 64 * _MIB, 1024 * _MIB),
    beside_bytes=256 * _MIB,
    cell_seconds=8.0,
    turns=60,
    bits_elements=20_003,
    matrix=8192,
    models=(Model(2048, 16, 1024, 1, 32_000), Model(2048, 16, 1024, 4, 32_000)),
    blocks=8,
    block_steps=8,
)
REHEARSAL = Scale(
    sizes=(64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB, 8 * _MIB),
    noise_sizes=(256 * _KIB, 4 * _MIB),
    beside_bytes=_MIB,
    cell_seconds=8.0,
    turns=40,
    bits_elements=5_003,
    matrix=384,
    models=(Model(256, 2, 128, 2),),
    blocks=8,
    block_steps=4,
)
