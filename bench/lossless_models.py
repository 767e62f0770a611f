"""Bits per weight of lossless differences, step by step, while models of other people train.

    .venv/bin/python bench/lossless_models.py

A Llama of transformers learns the sources of the Python standard library with AdamW; a ResNet of transformers learns to
tell rendered characters apart, with SGD and with AdamW. Both begin at random weights: warm-up, cosine, then fine-tuning
at constant rates. Weights are kept in float32, and each step multiplies what bfloat16 has of them, as FSDP2 with mixed
precision does. After each step the difference of all bfloat16 weights to those of the step before is encoded. So are
those of their payloads in 8 and 4 bits (narrow_weights.py), with the order-0 entropy of the bytes' differences.

Keeps the curves in --out, and of the payloads some steps; bench/pictures.py draws the curves. Needs transformers and
matplotlib.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

import results_file
from narrow_weights import PAYLOADS
from zcomm import codec

WARMUP = 20
TUNING_STEPS = 14  # at each rate
HEADER_BYTES = 64
console = Console()

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Case:
    """A model, what it learns, and how."""

    name: str
    make: Callable[[], tuple[torch.nn.Module, Batches]]
    loss: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    tuning_rates: tuple[float, ...]


@dataclass
class Curve:
    """What one case took; a value for each step."""

    name: str
    parameters: int
    rates: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)


@dataclass
class Payload:
    """The weights in one format of fewer bits, and what their differences took: of some steps, by learning rate."""

    name: str
    kept: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.uint8))
    steps: list[dict[str, float]] = field(default_factory=list)

    def keep(self, weights: list[torch.Tensor]) -> None:
        """Keep all weights as FSDP2 would send them."""
        sent = torch.cat([PAYLOADS[self.name](weight) for weight in weights]).numpy()
        self.kept = sent[: sent.size // 2 * 2].copy()

    def measure(self, rate: float, weights: list[torch.Tensor]) -> None:
        """Measure the difference to the kept weights."""
        base = self.kept
        self.keep(weights)
        changes = np.bincount(self.kept - base, minlength=256) / base.size
        entropy = -float(np.sum(changes[changes > 0] * np.log2(changes[changes > 0])))
        body, _ = codec.encode_difference(self.kept, base)
        numel = sum(weight.numel() for weight in weights)
        bits = {"bits": 8 * (body.size + HEADER_BYTES) / numel, "entropy": entropy * base.size / numel}
        self.steps.append({"rate": rate, **bits})

    def __str__(self) -> str:
        steps = (f"{step['bits']:.3g} ({step['entropy']:.3g}) at {step['rate']:.2g}" for step in self.steps)
        return f"{self.name}: {', '.join(steps)}"


def words(size: int) -> torch.Tensor:
    """The standard library's sources as numbers of words, the ``size`` most frequent; 0 for others."""
    root = Path(sysconfig.get_path("stdlib"))
    text = "".join(path.read_text(errors="replace") for path in sorted(root.glob("*.py")))
    found = re.findall(r"\w+|\s+|[^\w\s]", text)
    numbers = {word: i + 1 for i, (word, _) in enumerate(Counter(found).most_common(size - 1))}
    return torch.tensor([numbers.get(word, 0) for word in found])


def llama() -> tuple[torch.nn.Module, Batches]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip
    text = words(4096)

    def batches() -> Batches:
        generator = torch.Generator().manual_seed(0)
        while True:
            starts = torch.randint(len(text) - 64, (8, 1), generator=generator)
            tokens = text[starts + torch.arange(64)]
            yield tokens, tokens

    return model, batches()


def characters() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 1, 32, 32] of 62 characters in the fonts that matplotlib brings, and their numbers."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    fonts = sorted((Path(matplotlib.get_data_path()) / "fonts" / "ttf").glob("DejaVu*.ttf"))
    images, labels = [], []
    for path in fonts:
        for size in (18, 24):
            font = ImageFont.truetype(str(path), size)
            for number, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"):
                image = Image.new("L", (32, 32))
                ImageDraw.Draw(image).text((16, 16), letter, fill=255, font=font, anchor="mm")
                images.append(np.asarray(image, np.float32) / 255)
                labels.append(number)
    return torch.from_numpy(np.stack(images))[:, None], torch.tensor(labels)


def resnet() -> tuple[torch.nn.Module, Batches]:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic",
            num_labels=62,
        )
    )  # fmt: skip
    images, labels = characters()

    def batches() -> Batches:
        generator = torch.Generator().manual_seed(0)
        while True:
            chosen = torch.randint(len(labels), (64,), generator=generator)
            noise = 0.2 * torch.randn(64, 1, 32, 32, generator=generator)
            shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
            yield torch.roll(images[chosen], shift, (2, 3)) + noise, labels[chosen]

    return model, batches()


def next_word(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=labels).loss
    return loss


def class_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(pixel_values=images).logits, labels)


def adamw(rate: float) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    return lambda weights: torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


CASES = [
    Case("Llama, AdamW 6e-4", llama, next_word, adamw(6e-4), (3e-5, 1e-5, 1e-6)),
    Case("ResNet, AdamW 1e-3", resnet, class_of, adamw(1e-3), (3e-5, 1e-5, 1e-6)),
    Case(
        "ResNet, SGD 0.05", resnet, class_of, lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9), (1e-3,)
    ),
]


def schedule(peak: float, steps: int, tuning_rates: tuple[float, ...]) -> list[float]:
    """Of each step: up, a cosine down to 1 %, then each of the others for some steps."""
    rates = []
    for step in range(steps):
        down = 0.505 + 0.495 * math.cos(math.pi * max(step - WARMUP, 0) / max(steps - WARMUP, 1))
        rates.append(peak * min((step + 1) / WARMUP, 1.0) * down)
    return rates + [rate for rate in tuning_rates for _ in range(TUNING_STEPS)]


def rounded(weights: list[torch.Tensor]) -> np.ndarray[Any, Any]:
    """All weights as bfloat16, end to end."""
    flat = torch.cat([weight.detach().flatten() for weight in weights]).to(torch.bfloat16)
    return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def measure(case: Case, steps: int) -> Curve:
    torch.manual_seed(0)
    model, batches = case.make()
    parameters = list(model.parameters())
    masters = [parameter.detach().clone() for parameter in parameters]
    curve = Curve(case.name, sum(master.numel() for master in masters))
    optimizer = case.optimizer(masters)
    kept = rounded(masters).copy()
    matrices = [master for master in masters if master.dim() > 1]
    curve.payloads = [Payload(name) for name in PAYLOADS]
    previous_rate = 0.0
    rates = schedule(optimizer.param_groups[0]["lr"], steps, case.tuning_rates)
    told = {WARMUP, steps - 1, *range(steps + TUNING_STEPS - 1, len(rates), TUNING_STEPS)}
    for step, rate in enumerate(rates):
        if step >= steps and rate != previous_rate:
            optimizer = case.optimizer(masters)  # as who fine-tunes begins
        previous_rate = rate
        optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master.to(torch.bfloat16))
        loss = case.loss(model, *next(batches))
        gradients = torch.autograd.grad(loss, parameters)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        body, _ = codec.encode_difference(rounded(masters), kept)
        for each in curve.payloads:
            if step in told:
                each.measure(rate, matrices)
            elif step + 1 in told:
                each.keep(matrices)
        curve.rates.append(float(f"{rate:.4g}"))
        curve.bits.append(round(8 * (body.size + HEADER_BYTES) / curve.parameters, 4))
    return curve


def main(
    steps: Annotated[int, typer.Option(min=WARMUP + 1, help="Of the first training.")] = 160,
    out: Annotated[Path, typer.Option(help="Folder.")] = results_file.RESULTS,
) -> None:
    """Train each model, and tell how many bits each step's difference takes."""
    isa = results_file.own_isa()
    table = Table("model", "M parameters", "peak", "mean", "end of cosine", "then, at the rate")
    for case in CASES:
        curve = measure(case, steps)
        first, tuned = curve.bits[:steps], curve.bits[steps:]
        last = [f"{tuned[TUNING_STEPS * (i + 1) - 1]:.3g} at {rate:g}" for i, rate in enumerate(case.tuning_rates)]
        figures = [f"{max(first):.2f}", f"{np.mean(first):.2f}", f"{first[-1]:.2f}"]
        table.add_row(curve.name, f"{curve.parameters / 1e6:.1f}", *figures, ", ".join(last))
        steps_of_curve = [{"rate": rate, "bits": bits} for rate, bits in zip(curve.rates, curve.bits, strict=True)]
        machine, facts = results_file.cpu_machine(isa), {"parameters": curve.parameters}
        one = results_file.measured(curve.name, machine, ("rate", "bits"), steps_of_curve, **facts)
        results_file.keep(out / f"lossless_models-{isa}.jsonl", [one])
        for each in curve.payloads:
            name, columns = f"{curve.name}, {each.name}", ("rate", "bits", "entropy")
            found = results_file.measured(name, machine, columns, each.steps)
            results_file.keep(out / f"narrow_weights-{isa}.jsonl", [found])
            console.print(f"{curve.name}, bits per weight (order-0 entropy), {each}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
