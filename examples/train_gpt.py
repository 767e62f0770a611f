"""Train a small byte-level GPT with FSDP2 on the sources of the Python standard library.

Nothing here knows what a backend does: `--backend gloo` and `--backend zcomm` differ by that word alone.

torchrun --nproc-per-node 4 examples/train_gpt.py --backend zcomm

Rank 0 prints one JSON object per line: "start", then a "step" for every step, then "end".
"""

import contextlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import matrix_dtype
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY = 256
HEAD_SIZE = 64
WARMUP_STEPS = 5
VALIDATION_EVERY = 20  # every so many files are held out
VALIDATION_SEQUENCES = 16  # per rank


class Linear(nn.Linear):
    """Linear layer without bias. Multiplies in the dtype ``multiply_as``; the result has the input's dtype."""

    def __init__(self, inputs: int, outputs: int, multiply_as: torch.dtype | None) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.multiply_as = multiply_as

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.multiply_as or x.dtype
        return F.linear(x.to(dtype), self.weight.to(dtype)).to(x.dtype)


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, width: int, multiply_as: torch.dtype | None) -> None:
        super().__init__()
        self.num_heads = width // HEAD_SIZE
        self.multiply_as = multiply_as
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = Linear(width, 3 * width, multiply_as)
        self.attention_out = Linear(width, width, multiply_as)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.up = Linear(width, 4 * width, multiply_as)
        self.down = Linear(4 * width, width, multiply_as)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, HEAD_SIZE)
        query, key, value = heads.permute(2, 0, 3, 1, 4).to(self.multiply_as or x.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).to(x.dtype)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.feed_forward_norm(x))))
        return x + hidden


class GPT(nn.Module):
    """Model from bytes to the loss of predicting the next byte. Multiplies matrices in the dtype ``multiply_as``, by
    default that of the weights."""

    def __init__(self, width: int, num_layers: int, sequence: int, multiply_as: torch.dtype | None = None) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, multiply_as) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = Linear(width, VOCABULARY, multiply_as)
        for name, parameter in self.named_parameters():
            if name in ("bytes.weight", "positions.weight"):
                # Starts far larger than a step's change, or the first steps overshoot and the loss spikes.
                nn.init.normal_(parameter, std=0.5)
            elif parameter.dim() == 2:
                # Residual branches start small, so that depth does not grow the activations.
                scale = 1 / math.sqrt(2 * num_layers) if name.endswith(("attention_out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, text: Tensor) -> Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        return F.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())

    def logits(self, text: Tensor) -> Tensor:
        """Return the logits of the byte after each."""
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.float()


def load_corpus() -> tuple[Tensor, Tensor]:
    """Read the standard library's sources in a fixed order, as bytes to train on and bytes held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests"}
    paths = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(paths):
        (held_out if number % VALIDATION_EVERY == 0 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def sample(corpus: Tensor, count: int, sequence: int, seed: int) -> Tensor:
    """Draw `count` random pieces of text, one byte longer than `sequence` for the last target."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - sequence, (count, 1), generator=generator)
    return corpus[starts + torch.arange(sequence + 1)].long()


def shard(model: GPT) -> None:
    """Apply FSDP2 as in its documentation: each block is a unit, weights in bf16, gradients reduced in fp32."""
    mesh = init_device_mesh(model.head.weight.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def local_gradient(model: nn.Module) -> np.ndarray:
    """Concatenate this rank's shards of all gradients."""
    gradients = []
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients.append(parameter.grad.to_local().flatten())
    return torch.cat(gradients).numpy()


def sent_by_node() -> float:
    """Return the bytes that have left this node, by its interface's counter; NaN if unknown. Local rank 0 counts."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface == "lo":
        return math.nan
    if os.environ["LOCAL_RANK"] != "0":
        return 0.0
    # Unlike /sys/class/net, this file always shows the network namespace of the process that reads it.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return float(counters.split()[8])
    raise RuntimeError(f"no network interface {interface!r}")


def mean_and_sum(loss: Tensor, count: float) -> tuple[float, int | None]:
    """Return the mean of every rank's loss, and the sum of every rank's count or None if unknown."""
    values = torch.tensor([loss.item() / dist.get_world_size(), count], dtype=torch.float64)
    dist.all_reduce(values)
    return values[0].item(), None if math.isnan(values[1]) else int(values[1])


def bits_per_weight(secondary: Any) -> float | None:
    """Return the bits per weight of the last lossless gathers of all modules to another node; None without any."""
    modules = [module for module in secondary.stats().values() if module.generation > 0] if secondary else []
    if not modules:
        return None
    # Weighted by memory, as a module's kept bytes are proportional to its weights.
    kept = sum(module.memory_bytes for module in modules)
    bits: float = sum(module.bits_per_weight * module.memory_bytes for module in modules) / kept
    return bits


def report(event: str, **values: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **values}), flush=True)


@contextlib.contextmanager
def limited(step: int, seconds: float | None) -> Iterator[None]:
    """End this process with a message if the body takes longer."""

    def give_up() -> None:
        print(f"step {step} was not done after {seconds:.0f} s, the limit of --step-limit", file=sys.stderr, flush=True)
        os._exit(1)

    if seconds is None:
        yield
        return
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def agreed_dtype(multiply_as: str) -> torch.dtype:
    """Return the named dtype, or, for "auto", the one that rank 0 multiplies faster in."""
    if multiply_as == "auto":
        names = [matrix_dtype.measure().faster if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(names)
        (multiply_as,) = names
    dtype: torch.dtype = getattr(torch, multiply_as)
    return dtype


def backend_options(formats: dict[str, Any]) -> Any:
    """Return options for the backend, or None if only defaults are asked for."""
    if not formats:
        return None
    import zcomm

    return zcomm.Options(**formats)


def main(
    backend: Annotated[str, typer.Option(help='"gloo", "zcomm" or any other that torch knows.')] = "gloo",
    steps: int = 40,
    batch: Annotated[int, typer.Option(help="Sequences per rank and step.")] = 2,
    sequence: Annotated[int, typer.Option(help="Bytes per sequence.")] = 128,
    width: Annotated[int, typer.Option(help=f"Model width, a multiple of {HEAD_SIZE}.")] = 256,
    layers: int = 4,
    learning_rate: float = 1e-3,
    seed: int = 0,
    gradients: Annotated[
        Path | None, typer.Option(help="Folder for the first step's gradients, a file per rank.")
    ] = None,
    all_gather: Annotated[str | None, typer.Option(help='zcomm\'s format for weights, "int8:256".')] = None,
    reduce_scatter: Annotated[str | None, typer.Option(help='For gradients, "int8:128/int4:128".')] = None,
    all_reduce: Annotated[str | None, typer.Option(help='For all-reduce, "exact".')] = None,
    micro_batches: Annotated[int, typer.Option(help="That a step accumulates gradients over.")] = 1,
    secondary_shards: Annotated[bool, typer.Option(help="zcomm's: weights cross nodes once in a step.")] = False,
    lossless: Annotated[bool, typer.Option(help="With secondary shards, weights are exact.")] = False,
    multiply_as: Annotated[str, typer.Option(help='"bfloat16", "float32", or "auto": the faster one.')] = "auto",
    step_limit: Annotated[float | None, typer.Option(help="Seconds; a longer step ends the run.")] = None,
) -> None:
    """Train under torchrun, or anything that sets the same environment."""
    if width % HEAD_SIZE != 0:
        raise typer.BadParameter(f"--width: expected a multiple of {HEAD_SIZE}, got {width}")
    if multiply_as not in ("auto", "bfloat16", "float32"):
        raise typer.BadParameter(f'--multiply-as: expected "auto", "bfloat16" or "float32", got {multiply_as!r}')
    named = {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    dist.init_process_group(backend, pg_options=backend_options({k: v for k, v in named.items() if v is not None}))
    rank = dist.get_rank()

    train, held_out = load_corpus()
    torch.manual_seed(seed)
    model = GPT(width, layers, sequence, agreed_dtype(multiply_as))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shard(model)
    secondary = None
    if secondary_shards:
        import zcomm

        secondary = zcomm.fsdp.compress(model, weights="lossless" if lossless else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    # Decays to zero: a run that ends at full speed ends at a point that the last batches chose.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0) * (1 - step / steps)
    )

    dist.barrier()
    world_size = dist.get_world_size()
    tokens_per_step = micro_batches * batch * sequence * world_size
    report("start", parameters=num_parameters, world_size=world_size, tokens_per_step=tokens_per_step)
    start = time.perf_counter()
    for step in range(1, steps + 1):
        with limited(step, step_limit):
            for micro_batch in range(micro_batches):
                number = (seed * steps + step) * micro_batches + micro_batch
                loss = model(sample(train, batch, sequence, seed=number * world_size + rank)) / micro_batches
                model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
                loss.backward()
            if step == 1 and gradients is not None:
                np.save(gradients / f"gradient{rank}.npy", local_gradient(model))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            mean_loss, sent = mean_and_sum(loss.detach() * micro_batches, sent_by_node())  # last micro-batch's loss
        seconds, bits = time.perf_counter() - start, bits_per_weight(secondary)
        report("step", step=step, loss=mean_loss, seconds=seconds, inter_node_bytes=sent, bits_per_weight=bits)

    with torch.no_grad():
        loss = model(sample(held_out, VALIDATION_SEQUENCES, sequence, seed=rank))
    report("end", validation_loss=mean_and_sum(loss, 0.0)[0])
    dist.destroy_process_group()
    sys.stdout.flush()
    # Skips the interpreter's shutdown, in which torch's threads abort about one run in fifty, also with gloo.
    os._exit(0)


if __name__ == "__main__":
    typer.run(main)
