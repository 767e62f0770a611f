"""Prints what the default collectives would take on GPUs, by the planner's model. No call here is measured; the first
lines say which of the figures below are.

make gpu-model
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zcomm import _core
from zcomm_bench.planner import collectives, measured, report, step
from zcomm_bench.planner.cluster import Cluster, Figure, inter_link, intra_link, processor
from zcomm_bench.planner.workload import DTYPE_BYTES, Workload, from_config

GATHER, REDUCE = "int8:256", "int8:128/int4:128"
MEBIBYTES = (1, 4, 16, 64, 256, 1024)
TOKENS = (1024, 2048, 4096, 8192)
# On an H100 a kernel began 0.8 ms late beside matrix products of 1.45 ms (bench/results/beside_gemm-*.jsonl).
PRODUCT_WAIT = 0.8e-3
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}


def cluster(nodes: int, ranks_per_node: int, intra: str, gbit: int, gpu: str = "h100") -> Cluster:
    """GPUs that have `gbit` of the network each."""
    network = inter_link(f"{gbit * ranks_per_node}gbit")
    assumed = Cluster(nodes, ranks_per_node, intra_link(intra), network, processor(gpu))
    return measured.applied(assumed, gpu)


MACHINES = {
    "8, NVLink": cluster(1, 8, "nvlink4", 400),
    "2x8, NVLink, 400 Gbit/s": cluster(2, 8, "nvlink4", 400),
    "2x8, NVLink, 100 Gbit/s": cluster(2, 8, "nvlink4", 100),
    "16x8, NVLink, 400 Gbit/s": cluster(16, 8, "nvlink4", 400),
    "16x8, NVLink, 100 Gbit/s": cluster(16, 8, "nvlink4", 100),
    "8, PCIe 4": cluster(1, 8, "pcie4", 100),
    "2x8, PCIe 4, 100 Gbit/s": cluster(2, 8, "pcie4", 100),
}
SCALE = {
    **{f"{nodes}x8": cluster(nodes, 8, "nvlink4", 400) for nodes in (1, 2, 8, 16, 64)},
    "1x72": cluster(1, 72, "nvlink5", 400, "b200"),
}


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def calls() -> Iterator[str]:
    """A row per machine and size: calls on bfloat16 by themselves."""
    yield "| GPUs | MiB | exact NCCL, µs | all-gather, µs | times as fast | reduce-scatter, µs | times as fast |"
    yield "|---|---|---|---|---|---|---|"
    for name, machine in MACHINES.items():
        for mebibytes in MEBIBYTES:
            size = mebibytes << 19
            exact = collectives.exact(size, "bfloat16", machine).seconds
            gather = collectives.gather(size, "bfloat16", GATHER, machine).seconds
            reduce = collectives.reduce(size, "bfloat16", REDUCE, machine).seconds
            yield (
                f"| {name} | {mebibytes} | {microseconds(exact)} | {microseconds(gather)} | {exact / gather:.2f} | "
                f"{microseconds(reduce)} | {exact / reduce:.2f} |"
            )


def layers() -> Iterator[str]:
    """A row per size of cluster: one layer of a 70B model by itself, the time that it takes from a GEMM, and the same
    call beside matrix products without end, where every kernel and every group of NCCL waits for one. FSDP2's gather
    leaves its wires, and is decoded where FSDP2 copies: neither copy is counted."""
    (layer, _), _ = from_config(LLAMA_70B, sequence=4096)
    size = layer.num_elements
    alone_heads = "exact, ms | one call, ms | times as fast | from a GEMM, ms"
    yield f"| GPUs | call | {alone_heads} | beside products: exact, ms | one call, ms | times as fast |"
    yield "|---|---|---|---|---|---|---|---|---|"
    calls = ("gather of bfloat16", "bfloat16", GATHER), ("reduction of float32", "float32", REDUCE)
    for name, machine in SCALE.items():
        busy = replace(machine, product_wait=PRODUCT_WAIT)
        for call, dtype, format in calls:
            make = collectives.late_gather if format == GATHER else collectives.reduce
            alone, beside = (
                (collectives.exact(size, dtype, each).seconds, make(size, dtype, format, each))
                for each in (machine, busy)
            )
            taken = alone[1].codec * machine.compute.taken_share.value
            yield (
                f"| {name} | {call} | {alone[0] * 1e3:.2f} | {alone[1].seconds * 1e3:.2f} | "
                f"{alone[0] / alone[1].seconds:.2f} | {taken * 1e3:.2f} | {beside[0] * 1e3:.2f} | "
                f"{beside[1].seconds * 1e3:.2f} | {beside[0] / beside[1].seconds:.2f} |"
            )


def pulled(trace: Sequence[_core.TraceStep], machine: Cluster) -> collectives.Cost:
    """The time of a compressed call on GPUs whose memory peers of a node can read: of something that is not built.

    A kernel reads what it decodes or sums over NVLink: it takes the longer of that and of its time at its own memory.
    One kernel runs at a time. NCCL moves only what leaves the node. Flags tell that wires are there, a hop later.
    """
    launch, kind = machine.launch, _core.TraceStep.Kind
    thread = processor = network = unread = 0.0
    ends: list[tuple[float, float]] = []  # of the network, and bytes to be read
    for work in trace:
        if work.kind == kind.CODEC:
            thread += launch.kernel
            seconds = max(work.num_bytes / machine.compute.codec_rate, unread / machine.intra.rate)
            processor = max(processor, thread) + launch.start + seconds
            unread = 0.0
        elif work.kind == kind.WAIT:
            thread += launch.event
            end, num_bytes = ends[work.number]
            processor = max(processor, end) + (machine.intra.hop.value if num_bytes else 0.0)
            unread += num_bytes
        else:
            if outside := work.sent.inter_node * machine.ranks_per_node:
                num_messages = 2 * (machine.nodes - 1)
                thread += 2 * launch.event + launch.group + num_messages * launch.message
                network = max(thread, processor, network) + machine.inter.start_seconds(num_messages)
                network += outside / machine.rate_between(machine.nodes - 1)
            ends.append((network if outside else processor, work.sent.intra_node))
    return collectives.Cost(max(thread, processor))


def pulls() -> Iterator[str]:
    """A row per machine, call and size: over NCCL, and with pull kernels inside a node."""
    yield "| GPUs | call | MiB | exact NCCL, µs | over NCCL, µs | pulled in nodes, µs | times as fast as exact |"
    yield "|---|---|---|---|---|---|---|"
    made = (collectives.gather, "bfloat16", GATHER), (collectives.reduce, "float32", REDUCE)
    for name in ("1x8", "2x8", "8x8"):
        for call, dtype, format in made:
            for mebibytes in MEBIBYTES:
                machine, size = SCALE[name], (mebibytes << 20) // DTYPE_BYTES[dtype]
                exact = collectives.exact(size, dtype, machine).seconds
                now, then = (call(size, dtype, format, machine, time).seconds for time in (collectives.timed, pulled))
                times = " | ".join(microseconds(seconds) for seconds in (exact, now, then))
                yield f"| {name} | {call.__name__} of {dtype} | {mebibytes} | {times} | {exact / then:.2f} |"


def copies(work: Workload, machine: Cluster, gpu: str) -> float:
    """Seconds that FSDP2's copies take from computing in an exact step, as measured, else at the rate of memory:
    gathered values into the parameters, gradients into the reduced buffer. Compressed calls have none, with
    zcomm.fsdp.compress()."""
    gathered, reduced = DTYPE_BYTES[work.gather_dtype], DTYPE_BYTES[work.reduce_dtype]
    values = sum(work.gathers(unit) * unit.num_elements for unit in work.units)
    rates = {row["pass"]: row["gbps"] * 1e9 for row in measured.read("fsdp_copies", gpu)[0]}
    memory = machine.compute.memory_bandwidth.value
    seconds = values * 2 * gathered / rates.get("split_with_sizes_copy", memory)
    num_bytes = work.num_parameters * work.reductions * (gathered + reduced)
    return float(seconds + num_bytes / rates.get("chunk_cat", memory))


def steps() -> Iterator[str]:
    """A row per size of cluster and tokens: steps of a 70B model, exact over compressed. `fused` adds FSDP2's copies to
    the exact step."""
    yield "| GPUs | tokens per GPU | exact step, s | times as fast, half hidden | all | half, fused | all, fused |"
    yield "|---|---|---|---|---|---|---|"
    exact, compressed = step.OPTIONS[0], step.OPTIONS[2]
    for name, machine in SCALE.items():
        for tokens in TOKENS:
            work = Workload(*from_config(LLAMA_70B, sequence=1024), tokens)
            seconds = [
                [step.predict(option, work, machine, Figure(overlap)).step_seconds for option in (exact, compressed)]
                for overlap in (0.5, 1.0)
            ]
            spared = [0.0, copies(work, machine, "b200" if name == "1x72" else "h100")]
            gains = " | ".join(f"{(before + more) / now:.2f}" for more in spared for before, now in seconds)
            yield f"| {name} | {tokens} | {seconds[0][0]:.2f} | {gains} |"


def figures() -> Iterator[str]:
    """What the tables rest on, and whether it was measured on such a GPU."""
    for gpu, machine in (("h100", SCALE["2x8"]), ("b200", SCALE["1x72"])):
        for name, figure, text in report.gpu_figures(machine):
            yield f"{gpu}, {name}: {text} ({figure.source})"


if __name__ == "__main__":
    for table in (figures, calls, layers, pulls, steps):
        print(*table(), sep="\n", end="\n\n")
