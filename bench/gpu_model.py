"""Prints what the default collectives would take on GPUs, by the planner's model. No call here is measured; the first
lines say which of the figures below are.

make gpu-model
"""

from __future__ import annotations

from collections.abc import Iterator

from zcomm_bench.planner import collectives, measured, report, step
from zcomm_bench.planner.cluster import Cluster, Figure, inter_link, intra_link, processor
from zcomm_bench.planner.workload import Workload, from_config

GATHER, REDUCE = "int8:256", "int8:128/int4:128"
MEBIBYTES = (1, 4, 16, 64, 256, 1024)
TOKENS = (1024, 2048, 4096, 8192)
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
    """A row per size of cluster: one layer of a 70B model, by itself, and the time that it takes from a GEMM."""
    (layer, _), _ = from_config(LLAMA_70B, sequence=4096)
    size = layer.num_elements
    yield "| GPUs | call | exact, ms | one call, ms | times as fast | beside a GEMM, ms |"
    yield "|---|---|---|---|---|---|"
    for name, machine in SCALE.items():
        exact = collectives.exact(size, "bfloat16", machine), collectives.exact(size, "float32", machine)
        made = (
            collectives.gather(size, "bfloat16", GATHER, machine),
            collectives.reduce(size, "float32", REDUCE, machine),
        )
        for call, before, now in zip(("gather of bfloat16", "reduction of float32"), exact, made, strict=True):
            taken = now.codec * machine.compute.taken_share.value
            yield (
                f"| {name} | {call} | {before.seconds * 1e3:.2f} | {now.seconds * 1e3:.2f} | "
                f"{before.seconds / now.seconds:.2f} | {taken * 1e3:.2f} |"
            )


def steps() -> Iterator[str]:
    """A row per size of cluster and tokens: steps of a 70B model, exact over compressed."""
    yield "| GPUs | tokens per GPU | exact step, s | times as fast, half hidden | all hidden |"
    yield "|---|---|---|---|---|"
    exact, compressed = step.OPTIONS[0], step.OPTIONS[2]
    for name, machine in SCALE.items():
        for tokens in TOKENS:
            work = Workload(*from_config(LLAMA_70B, sequence=1024), tokens)
            seconds = [
                [step.predict(option, work, machine, Figure(overlap)).step_seconds for option in (exact, compressed)]
                for overlap in (0.5, 1.0)
            ]
            gains = " | ".join(f"{before / now:.2f}" for before, now in seconds)
            yield f"| {name} | {tokens} | {seconds[0][0]:.2f} | {gains} |"


def figures() -> Iterator[str]:
    """What the tables rest on, and whether it was measured on such a GPU."""
    for gpu, machine in (("h100", SCALE["64x8"]), ("b200", SCALE["1x72"])):
        for name, figure, text in report.gpu_figures(machine):
            yield f"{gpu}, {name}: {text} ({figure.source})"


if __name__ == "__main__":
    for table in (figures, calls, layers, steps):
        print(*table(), sep="\n", end="\n\n")
