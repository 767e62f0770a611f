"""Fine-tuning with LoRA adapters under FSDP2, on nodes joined by a slow link: seconds per step and bytes between nodes.

A small Llama, whose own weights are frozen, with the adapters of PEFT. Over gloo, over zcomm, and over zcomm with
secondary shards; each with the adapters in the FSDP units of their blocks, and in units of their own.

Needs peft and transformers: pip install peft transformers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import matrix_dtype
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_gpt import load_corpus, mean_and_sum, sample, sent_by_node

import zcomm
from zcomm_bench.lab import network

WARMUP_STEPS = 2  # connections and allocations; frozen weights are gathered for the first time
BACKENDS = {"gloo": ("gloo", False), "zcomm": ("zcomm", False), "zcomm, secondary shards": ("zcomm", True)}
UNITS = {"adapters in their blocks' units": False, "adapters in units of their own": True}

console = Console(highlight=False)


def make_model(width: int, layers: int, sequence: int) -> nn.Module:
    """GPT in which only the adapters are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, max_position_embeddings=sequence,
    )  # fmt: skip
    model: nn.Module = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    return model


def shard(model: nn.Module, own_units: bool) -> None:
    """Shard each block as a unit; with ``own_units`` the adapters of a block form another unit."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": policy}
    for block in model.base_model.model.model.layers:
        if own_units:
            adapters = [
                part for name, part in block.named_modules() if ".lora_" in name and isinstance(part, nn.Linear)
            ]
            fully_shard(adapters, **given)
        fully_shard(block, **given)
    fully_shard(model, **given)


def train(model: nn.Module, steps: int, batch: int, sequence: int) -> dict[str, float]:
    """Return seconds and bytes of a step after the warm-up, and the last loss, over all ranks."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    corpus, _ = load_corpus()
    start, sent_before = 0.0, None
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            _, sent_before = mean_and_sum(torch.zeros(1), sent_by_node())
            start = time.perf_counter()
        text = sample(corpus, batch, sequence - 1, seed=step * dist.get_world_size() + dist.get_rank())
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    seconds = (time.perf_counter() - start) / steps
    mean_loss, sent = mean_and_sum(loss.detach(), sent_by_node())
    counted = sent is not None and sent_before is not None
    return {"seconds": seconds, "bytes": (sent - sent_before) / steps if counted else float("nan"), "loss": mean_loss}


def work(steps: int, batch: int, sequence: int, width: int, layers: int, dtype: torch.dtype) -> None:
    """Run every variant on this rank, each in a new process group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, size, is_master=rank == 0)
    for name, (backend, secondary) in BACKENDS.items():
        for units, own_units in UNITS.items():
            part = dist.PrefixStore(f"{name}, {units}", store)
            dist.init_process_group(backend, store=part, rank=rank, world_size=size)
            torch.manual_seed(0)
            model = make_model(width, layers, sequence)
            shard(model, own_units)
            if secondary:
                zcomm.fsdp.compress(model)
            with matrix_dtype.MultiplyAs(dtype):
                figures = train(model, steps, batch, sequence)
            if rank == 0:
                print(json.dumps({"backend": name, "units": units, **figures}), flush=True)
            dist.barrier()
            dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in train_gpt.py


def show(results: list[dict[str, Any]]) -> None:
    table = Table()
    for title in ("", "adapters in", "seconds per step", "MB between nodes per step", "last loss"):
        table.add_column(title, justify="left" if title in ("", "adapters in") else "right")
    for result in results:
        units = result["units"].removeprefix("adapters in ")
        figures = f"{result['seconds']:.3f}", f"{result['bytes'] / 1e6:.2f}", f"{result['loss']:.4f}"
        table.add_row(result["backend"], units, *figures)
    console.print(table)


def main(
    nodes: Annotated[str, typer.Option(help="Nodes x ranks per node.")] = "2x2",
    link: Annotated[str, typer.Option(help='Limit of each node\'s link: "100mbit", "1gbit".')] = "100mbit",
    steps: Annotated[int, typer.Option(min=1, help="That are measured, after two of warm-up.")] = 5,
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 1,
    sequence: Annotated[int, typer.Option(help="Bytes per sequence.")] = 64,
    width: Annotated[int, typer.Option(help="Model width, a multiple of 64.")] = 256,
    layers: int = 4,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("out/lora.json"),
    worker: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare LoRA fine-tuning over gloo, zcomm, and zcomm with secondary shards."""
    if worker:
        work(steps, batch, sequence, width, layers, getattr(torch, worker))
        return
    speed = matrix_dtype.measure()
    console.print(str(speed), soft_wrap=True)
    numbers = {"--steps": steps, "--batch": batch, "--sequence": sequence, "--width": width, "--layers": layers}
    argv = [sys.executable, __file__, "--worker", speed.faster]
    argv += [str(word) for pair in numbers.items() for word in pair]
    results: list[dict[str, Any]] = []
    console.print(f"{nodes} ranks, {link} between nodes, {len(BACKENDS) * len(UNITS)} trainings")
    try:
        launched = network.launch(argv, nodes=nodes, rate=link, on_line=lambda line: results.append(json.loads(line)))
    except network.RankFailed as error:
        console.print(str(error), markup=False, style="red")
        raise typer.Exit(1) from None
    if launched.note:
        console.print(f"warning: {launched.note}", markup=False, style="yellow")
    show(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"nodes": nodes, "link": link, **numbers, "runs": results}, indent=2) + "\n")
    console.print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
