"""Train a small GPT at sites that average what they changed, in 4 bits, every so many steps: DiLoCo with zcomm.outer.

torchrun --nproc-per-node 2 examples/diloco.py                          two sites, a process each, on this machine
torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/diloco.py                  at real ones
torchrun --nproc-per-node 2 examples/diloco.py --checkpoint out/diloco   goes on from there, saves at the end

Sites that come and go, each started and lost when it likes:

python -m zcomm meet                                                    at one place
python examples/diloco.py --meeting HOST:29511 --site 0                 at each site, with its number

Rank 0, or a site that comes and goes, prints a JSON object after every outer step, with the loss of all sites' mean
parameters, and one at the end.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from train_gpt import GPT, load_corpus, sample

import zcomm

LEARNING_RATE = 1e-3
MOST_SITES, MOST_STEPS = 64, 10**6  # each draws other batches


def main(
    steps: int = 400,
    every: Annotated[int, typer.Option(help="Inner steps from one outer step to the next.")] = 50,
    fragments: Annotated[int, typer.Option(help="Parts of the model that take turns.")] = 4,
    delay: Annotated[int, typer.Option(help="Inner steps that hide a fragment's way.")] = 8,
    format: str = "int4:64",
    max_rate: Annotated[str | None, typer.Option(help='What a site may send on average, "40mbit".')] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder: a file of each rank.")] = None,
    meeting: Annotated[str | None, typer.Option(help="host:port where sites that come and go meet.")] = None,
    site: Annotated[int, typer.Option(help="With --meeting: the number of this one, by which it takes its data.")] = 0,
    timeout: Annotated[float, typer.Option(help="With --meeting: seconds after which a silent site is lost.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the model and the batches, the same at all sites.")] = 0,
    decay: Annotated[bool, typer.Option(help="Learning rate falls to 0 in the last fifth of the steps.")] = False,
    width: int = 128,
    layers: int = 2,
    sequence: int = 128,
    batch: int = 8,
) -> None:
    sites = zcomm.outer.Sites(meeting, name=f"{site:04d}", timeout=timeout) if meeting else None
    if sites is None:
        dist.init_process_group("zcomm")
        site = dist.get_rank()
    torch.manual_seed(seed)  # all sites begin with the same model
    model = GPT(width, layers, sequence)
    inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    sgd = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    outer = zcomm.outer.OuterStep(
        sgd, every=every, fragments=fragments, delay=delay, format=format, max_rate=max_rate, sites=sites
    )
    file = checkpoint / f"rank{site}.pt" if checkpoint else None
    parts = {"model": model, "inner": inner, "sgd": sgd, "outer": outer}
    if file is not None and file.exists():
        for name, state in torch.load(file, weights_only=True).items():
            parts[name].load_state_dict(state)
    text, held_out = load_corpus()
    last = outer.stats().inner_steps + steps if sites is None else steps
    while (step := outer.stats().inner_steps) < last:  # a site that comes takes over the number of the others
        if decay:
            inner.param_groups[0]["lr"] = LEARNING_RATE * min(5 * (1 - step / last), 1)
        loss = model(sample(text, batch, sequence, seed=(seed * MOST_STEPS + step) * MOST_SITES + site))
        loss.backward()
        inner.step()
        inner.zero_grad()
        outer.step()
        if outer.stats().inner_steps % every == 0:
            with outer.averaged(), torch.no_grad():  # of all sites; afterwards each goes on with its own
                held_out_loss = model(sample(held_out, batch, sequence, seed=0))
            if site == 0 or sites is not None:
                losses = {"loss": round(loss.item(), 4), "held_out_loss": round(held_out_loss.item(), 4)}
                print(json.dumps({"step": step + 1, **losses, **vars(outer.stats())}), flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    outer.synchronize()  # the end: the sites have one model
    with torch.no_grad():
        held_out_loss = model(sample(held_out, 8 * batch, sequence, seed=1))
    stats = outer.stats()
    if site == 0 or sites is not None:
        sent = {"sent_mb": stats.sent_bytes / 1e6, "in_float32_mb": stats.exact_bytes / 1e6}
        print(json.dumps({"held_out_loss": round(held_out_loss.item(), 4), **sent}), flush=True)
    if sites is None:
        dist.destroy_process_group()
    else:
        sites.close()


if __name__ == "__main__":
    typer.run(main)
