"""Every Python block of the README and of the pages in docs runs as it is printed; those that need a GPU say so.

The programs of docs/trainers are whole programs, and have tests of their own in tests/python/trainers.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.worlds import run
from torch import nn
from torch.distributed.fsdp import fully_shard

import zcomm

ROOT = Path(__file__).parents[3]
NEEDS_GPU = "a GPU"  # in a comment of the block


def blocks(page: Path) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {f"{page.name}, block {number}": text for page in PAGES for number, text in enumerate(blocks(page))}


class Model(nn.Module):
    """Model of 16 bits with the names that the pages use: its weights may be lossless."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(64, 64)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Layer(nn.Module):
    """A frozen matrix and its adapter, under PEFT's names."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 8)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 64)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.lora_B["default"](self.lora_A["default"](x))


def training() -> dict[str, Any]:
    """A model before fully_shard, and the functions that a loop calls."""
    model = Model()

    def train_step(model: nn.Module) -> None:
        model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()

    return {
        **{"dist": dist, "fully_shard": fully_shard, "zcomm": zcomm, "model": model},
        **{"train": train_step, "train_step": train_step, "validate": train_step},
    }


def grouped(sharded: bool) -> Callable[[], dict[str, Any]]:
    """Make the same names in a group."""

    def names() -> dict[str, Any]:
        dist.init_process_group("zcomm")
        made = training()
        if sharded:
            fully_shard(made["model"].lm_head)
            fully_shard(made["model"])
        return made

    return names


def of_a_site() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def train_step(model: nn.Module) -> None:
        model(torch.ones(2, 64)).square().mean().backward()

    functions = {"train_step": train_step, "validate": train_step}
    return {"dist": dist, "torch": torch, "zcomm": zcomm, "model": model, **functions}


# Names that a block finds when it begins.
NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md, block 0": training,
    "quick-start.md, block 0": dict,
    "options.md, block 0": training,
    "options.md, block 1": lambda: {"zcomm": zcomm},
    "fine-tuning.md, block 0": grouped(sharded=False),
    "traces.md, block 0": grouped(sharded=True),
    "traces.md, block 1": grouped(sharded=True),
    "outer.md, block 0": of_a_site,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name: str, tmp_path: Path) -> None:
    code = compile(BLOCKS[name], name, "exec")
    comments = " ".join(re.findall("#(.*)", BLOCKS[name]))
    assert (name in NAMES) != (NEEDS_GPU in comments), "a block runs here, or says that it needs a GPU"
    if name not in NAMES:
        return

    def body() -> None:
        os.chdir(tmp_path)  # for what it writes
        exec(code, NAMES[name]())
        if dist.is_initialized():
            dist.destroy_process_group()

    run(body, 2, backend=None, launched=True, env={"ZCOMM_SAMPLE_ERRORS_EVERY": "1", "ZCOMM_MIN_BYTES": "1"})


def test_every_block_that_is_prepared_is_there() -> None:
    assert NAMES.keys() <= BLOCKS.keys()


def test_pages_of_trainers_have_one_program_each() -> None:
    """The one that their tests run."""
    for page in (ROOT / "docs" / "trainers").glob("*.md"):
        assert len(blocks(page)) == (page.name != "README.md"), page.name
