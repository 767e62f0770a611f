"""A Llama of 172,352 parameters, built from a configuration, and the data that it learns in the tests of trainers."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm

STEPS = 50
VOCABULARY = 512
# The nodes are of one rank, so that gradients take the 4-bit format that crosses nodes; as variables, as a trainer
# makes the groups.
COMPRESSED = {"ZCOMM_MIN_BYTES": "1024", "ZCOMM_NODE_SIZE": "1"}
EXACT = {"ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "exact"}


def require(*packages: str) -> None:
    """Imports what a test needs; skips it if that is not installed, unless TESTS_REQUIRE_TRAINERS=1 asks for an error.

    Here, in the process that ranks are forked from: an import takes longer than a world.
    """
    for package in packages:
        if os.environ.get("TESTS_REQUIRE_TRAINERS") == "1":
            importlib.import_module(package)
        else:
            pytest.importorskip(package, reason=f"{package} is not installed: make test-slow installs it")


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip


def make_batch(step: int, rank: int) -> torch.Tensor:
    """Tokens of two sequences, each token three times the one before plus one."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = [torch.randint(0, VOCABULARY, (2,), generator=generator)]
    while len(tokens) < 32:
        tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
    return torch.stack(tokens, dim=1)


@dataclass
class Result:
    """Results on rank 0; losses are the mean over ranks."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step
    compressed: dict[str, int] = field(default_factory=dict)  # collective -> calls
    exact: dict[str, set[str]] = field(default_factory=dict)  # collective -> why some were not, but for small ones

    def count(self) -> Result:
        """Fills in what all groups of this process counted."""
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            self.compressed[name], self.exact[name] = 0, set()
            for group in dist.distributed_c10d._world.pg_map:
                if dist.get_backend(group) == "zcomm":
                    one = getattr(zcomm.stats(group), name)
                    self.compressed[name] += one.calls
                    self.exact[name] |= {
                        why for why, calls in one.exact.items() if why != "min_bytes" and calls.bytes >= 1024
                    }
        return self


def mean_over_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().float().reshape(1)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def largest_gradients(size: int) -> list[float]:
    """The largest gradient of each rank's first batch, in float32."""
    maxima = []
    for rank in range(size):
        model = make_model()
        batch = make_batch(0, rank)
        model(input_ids=batch, labels=batch).loss.backward()
        maxima.append(max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None))
    return maxima


def assert_close(got: Result, want: Result) -> None:
    """The loss falls as under gloo, within 1 % in the end, and is not the same: something was compressed."""
    assert got.losses != want.losses
    assert want.losses[-1] < 0.95 * want.losses[0], want.losses
    assert abs(got.losses[-1] - want.losses[-1]) <= 0.01 * want.losses[-1], (got.losses, want.losses)


def assert_same(got: Result, want: Result) -> None:
    """Every loss and gradient, to the last bit; ``got`` may be of fewer steps."""
    assert not any(got.compressed.values())
    assert got.losses == want.losses[: len(got.losses)]
    assert got.gradients.keys() == want.gradients.keys() and got.gradients
    for name, gradient in want.gradients.items():
        assert torch.equal(got.gradients[name].view(torch.uint8), gradient.view(torch.uint8)), name
