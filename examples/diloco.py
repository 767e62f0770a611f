"""Train a small GPT at sites that average what they changed, in 4 bits, every so many steps: DiLoCo with zcomm.outer.

torchrun --nproc-per-node 2 examples/diloco.py                          two sites, a process each, on this machine
torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/diloco.py                  at real ones
torchrun --nproc-per-node 2 examples/diloco.py --checkpoint out/diloco   goes on from there, saves at the end

Rank 0 prints a JSON object after every outer step, with the loss of all sites' mean parameters, and one at the end.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from train_gpt import GPT, load_corpus, sample

import zcomm


def main(
    steps: int = 400,
    every: Annotated[int, typer.Option(help="Inner steps from one outer step to the next.")] = 50,
    fragments: Annotated[int, typer.Option(help="Parts of the model that take turns.")] = 4,
    delay: Annotated[int, typer.Option(help="Inner steps that hide a fragment's way.")] = 8,
    format: str = "int4:64",
    max_rate: Annotated[str | None, typer.Option(help='What a site may send on average, "40mbit".')] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder: a file of each rank.")] = None,
    width: int = 128,
    layers: int = 2,
    sequence: int = 128,
    batch: int = 8,
) -> None:
    dist.init_process_group("zcomm")
    torch.manual_seed(0)  # all sites begin with the same model
    model = GPT(width, layers, sequence)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    outer = zcomm.outer.OuterStep(sgd, every=every, fragments=fragments, delay=delay, format=format, max_rate=max_rate)
    file = checkpoint / f"rank{dist.get_rank()}.pt" if checkpoint else None
    parts = {"model": model, "inner": inner, "sgd": sgd, "outer": outer}
    if file is not None and file.exists():
        for name, state in torch.load(file, weights_only=True).items():
            parts[name].load_state_dict(state)
    text, held_out = load_corpus()
    first = outer.stats().inner_steps
    for step in range(first, first + steps):
        loss = model(sample(text, batch, sequence, seed=step * dist.get_world_size() + dist.get_rank()))
        loss.backward()
        inner.step()
        inner.zero_grad()
        outer.step()
        if (step + 1) % every == 0:
            with outer.averaged(), torch.no_grad():  # of all sites; afterwards each goes on with its own
                held_out_loss = model(sample(held_out, batch, sequence, seed=0))
            if dist.get_rank() == 0:
                losses = {"loss": round(loss.item(), 4), "held_out_loss": round(held_out_loss.item(), 4)}
                print(json.dumps({"step": step + 1, **losses, **vars(outer.stats())}), flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    outer.synchronize()  # the end: the sites have one model
    stats = outer.stats()
    if dist.get_rank() == 0:
        print(json.dumps({"sent_mb": stats.sent_bytes / 1e6, "in_float32_mb": stats.exact_bytes / 1e6}))
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
