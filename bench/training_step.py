"""A training step by how weights cross nodes: exact, as int8, and as lossless differences.

python bench/training_step.py                      2 nodes of 2 ranks behind links of 1 Gbit/s, in network namespaces
python bench/training_step.py --rate 100mbit --out bench/results      keeps the figures
python bench/training_step.py --quick              three turns of a tiny model
python bench/training_step.py --device cuda --width 512 --layers 8     on GPUs, which ranks share if there are fewer

The same ranks train copies of the model of examples/train_gpt.py, a step of each in turn: whatever else runs on the
machine meets them alike. They differ in how weights are sent; gradients have the default formats. int8 and differences
have secondary shards, so that weights cross nodes once in a step. Exact formats have none: there weights cross nodes
twice. With --uncompressed there is a copy whose gradients are exact, too: that of torch's own backend. With --unchecked
there is one as int8 whose gathers do not look for changed weights: no hash of the rank's shard, and no agreement of the
ranks. What these cost is the ratio of the two.

A time is of the slowest rank, from a barrier to the end of its optimizer's step. A ratio is of two steps of one turn.
The losses with differences must be those with exact weights, bit for bit: a difference is an error.
"""

import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import results_file
import zcomm
from zcomm_bench.lab import gpus, network

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_gpt import GPT, agreed_dtype, bits_per_weight, load_corpus, mean_and_sum, sample, sent_by_node, shard

WAYS = {"exact": "exact", "int8": None, "lossless": "lossless"}  # how weights are sent
UNCOMPRESSED, UNCHECKED = "uncompressed", "int8, unchecked"
WARMUP_TURNS = 2  # connections, memory, and whole weights as the first difference
MODEL = {"width": 256, "layers": 4, "sequence": 128}
QUICK = {"width": 64, "layers": 1, "sequence": 32}


class Copy:
    """A model, and how it is trained. All copies begin with the same weights."""

    def __init__(
        self, way: str, model: dict[str, int], dtype: torch.dtype, learning_rate: float, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        self._model = GPT(model["width"], model["layers"], model["sequence"], dtype).to(device)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        shard(self._model)
        weights = None if way == UNCHECKED else WAYS.get(way, "exact")
        gradients = "exact" if way == UNCOMPRESSED else None
        self._compression = zcomm.fsdp.compress(
            self._model, weights=weights, gradients=gradients, exempt=(), check=way != UNCHECKED
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._device = device

    def step(self, text: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._model(text)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def measured_step(self, text: torch.Tensor) -> dict[str, Any]:
        """Seconds, bytes that left all nodes, bits per weight and the mean loss, the same on all ranks."""
        before = sent_by_node()
        dist.barrier()
        start = time.perf_counter()
        loss = self.step(text.to(self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        mean_loss, sent = mean_and_sum(loss, sent_by_node() - before)
        bits = bits_per_weight(self._compression)
        return {"seconds": taken.item(), "inter_node_bytes": sent, "bits_per_weight": bits, "loss": mean_loss}


def own_device(device: str) -> torch.device:
    """Of this rank. On a GPU steps are repeatable, as those of two copies must be the same."""
    if device == "cpu":
        return torch.device("cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    return torch.device("cuda", gpus.place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), interface))


def measure_rank(
    turns: int, batch: int, learning_rate: float, model: dict[str, int], ways: Sequence[str], device_type: str
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for some calls
    device = own_device(device_type)
    dist.init_process_group("zcomm")
    dtype = agreed_dtype("auto" if device_type == "cpu" else "bfloat16")
    copies = {way: Copy(way, model, dtype, learning_rate, device) for way in ways}
    text, _ = load_corpus()
    for turn in range(-WARMUP_TURNS, turns):
        number = (turn + WARMUP_TURNS) * dist.get_world_size() + dist.get_rank()
        sequences = sample(text, batch, model["sequence"], seed=number)
        first = turn % len(ways)  # another one in each turn
        for way in (*ways[first:], *ways[:first]):
            measured = copies[way].measured_step(sequences)
            if turn >= 0 and dist.get_rank() == 0:
                print(json.dumps({"way": way, **measured}), flush=True)
    if dist.get_rank() == 0:
        print(json.dumps({"parameters": copies["exact"].num_parameters, "multiply_as": str(dtype)}), flush=True)
    dist.destroy_process_group()


def figures_of(ways: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way: medians, and the quartiles of its ratios to int8, step by step."""
    rows = []
    for way, measured in ways.items():
        ratios = [own / int8 for own, int8 in zip(measured["seconds"], ways["int8"]["seconds"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"way": way, "over_int8": middle, "low": low, "high": high, "not_slower": sum(r <= 1 for r in ratios)}
        for name in ("seconds", "inter_node_bytes", "bits_per_weight"):
            row[name] = None if None in measured[name] else statistics.median(measured[name])
        rows.append(row)
    return rows


def show(report: dict[str, Any]) -> None:
    conditions = ", ".join(str(report[name]) for name in ("nodes", "rate", "learning_rate"))
    table = Table(title=f"nodes, link, learning rate: {conditions}; on {report.get('gpu', report['isa'])}")
    for name in ("weights", "seconds", "over int8's", "not slower", "MB between nodes", "bits per weight"):
        table.add_column(name, justify="left" if name == "weights" else "right", no_wrap=name == "weights")
    for row in figures_of(report["ways"]):
        is_int8, sent, bits = row["way"] == "int8", row["inter_node_bytes"], row["bits_per_weight"]
        table.add_row(
            row["way"],
            f"{row['seconds']:.4f}",
            "" if is_int8 else f"{row['over_int8']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
            "" if is_int8 else f"{row['not_slower']} of {report['turns']}",
            "not known" if sent is None else f"{sent / 1e6:.2f}",
            "" if bits is None else f"{bits:.2f}",
        )
    Console().print(table)


KEPT = ("way", "seconds", "over_int8", "low", "high", "inter_node_bytes", "bits_per_weight")


def keep(report: dict[str, Any], folder: Path) -> None:
    gpu, isa = report.get("gpu"), report["isa"]
    machine = results_file.gpu_machine(gpu) if gpu else results_file.cpu_machine(isa)
    facts = {name: report[name] for name in ("nodes", "rate", "learning_rate", "parameters", "turns")}
    name = "{nodes}_{rate}_{learning_rate:g}".format(**facts)
    one = results_file.measured(name, machine, KEPT, figures_of(report["ways"]), **facts)
    results_file.keep(folder / f"training_step-{gpus.chip(gpu) if gpu else isa}.jsonl", [one])


def main(
    turns: Annotated[int, typer.Option(min=2, help="Steps of each copy that are measured.")] = 40,
    nodes: Annotated[str, typer.Option(help="NODESxRANKS")] = "2x2",
    rate: Annotated[str, typer.Option(help='Of a node\'s link: "100mbit", "1gbit", "unlimited".')] = "1gbit",
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 2,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of every step.")] = 1e-3,
    width: Annotated[int, typer.Option(min=64, help="Of the model, a multiple of 64.")] = MODEL["width"],
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = MODEL["layers"],
    uncompressed: Annotated[bool, typer.Option(help="A copy whose gradients are exact, too.")] = False,
    unchecked: Annotated[bool, typer.Option(help="A copy whose gathers do not look for changed weights.")] = False,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    quick: Annotated[bool, typer.Option(help="Three turns of a tiny model.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder that keeps the figures, such as bench/results.")] = None,
) -> None:
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f'--device: expected "cpu" or "cuda", got {device!r}')
    model = QUICK if quick else {**MODEL, "width": width, "layers": layers}
    turns = 3 if quick else turns
    ways = [*([UNCOMPRESSED] if uncompressed else []), *WAYS, *([UNCHECKED] if unchecked else [])]
    if "RANK" in os.environ:
        measure_rank(turns, batch, learning_rate, model, ways, device)
        return
    report: dict[str, Any] = {
        "nodes": nodes, "rate": rate, "learning_rate": learning_rate, "turns": turns, "isa": results_file.own_isa(),
        **(gpus.facts() if device == "cuda" else {}), "ways": {way: {} for way in ways},
    }  # fmt: skip

    def take(line: str) -> None:
        record = json.loads(line)
        if (way := record.pop("way", None)) is None:
            report.update(record)
        else:
            for name, value in record.items():
                report["ways"][way].setdefault(name, []).append(value)

    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS repeats its results
    launched = network.launch([sys.executable, *sys.argv], nodes=nodes, rate=rate, env=environment, on_line=take)
    if launched.note:
        Console().print(f"warning: {launched.note}", markup=False)
        report["rate"] = "none"
    if report["ways"]["lossless"]["loss"] != report["ways"]["exact"]["loss"]:
        raise SystemExit("the losses with differences are not those with exact weights")
    show(report)
    if out is not None:
        keep(report, out)


if __name__ == "__main__":
    typer.run(main)
