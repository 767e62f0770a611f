"""What is trained: the messages of FSDP2, which are its units, and the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zcomm_bench import files
from zcomm_bench.planner.cluster import Figure
from zcomm_bench.planner.inputs import positive

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BITS_PER_WEIGHT = Figure(3.43)  # of a lossless difference at a learning rate of 3e-4
MOST_ELEMENTS = 10**11  # of a unit: 30 layers of Llama 3.1 405B. Units are planned chunk by chunk
STATE_BYTES = 16  # per parameter, sharded: float32 weight, its gradient, and two moments of AdamW


@dataclass(frozen=True)
class Unit:
    """One module that FSDP2 wraps, of `num_elements` values, which are reduced at once. There are `count` alike.

    `gathers` are those of a micro-batch. FSDP2 gathers for the forward and for the backward pass, but keeps its root
    from one to the other."""

    name: str
    num_elements: int
    count: int = 1
    gathers: int = 2

    def __post_init__(self) -> None:
        if self.num_elements > MOST_ELEMENTS:
            raise ValueError(f"model: expected at most {MOST_ELEMENTS:.0e} elements in a unit, got {self.num_elements}")


@dataclass(frozen=True)
class Workload:
    """A training step on each rank.

    `flops_per_token` counts one forward pass. `tokens` are a rank's in one micro-batch. FSDP2 reduces gradients once in
    each micro-batch. With `accumulate` it sums whole gradients, and reduces once a step: the trainer calls
    set_requires_gradient_sync(False). `recompute`: activations are computed again in the backward pass.
    `bits_per_weight`: of lossless differences.
    """

    units: tuple[Unit, ...]
    flops_per_token: float
    tokens: int
    micro_batches: int = 1
    recompute: bool = False
    gather_dtype: str = "bfloat16"
    reduce_dtype: str = "bfloat16"
    accumulate: bool = False
    bits_per_weight: Figure = BITS_PER_WEIGHT

    def __post_init__(self) -> None:
        for name in ("tokens", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("gather_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(f"{name}: expected one of {', '.join(DTYPE_BYTES)}, got {getattr(self, name)!r}")

    @property
    def num_parameters(self) -> int:
        return sum(unit.num_elements * unit.count for unit in self.units)

    @property
    def flops(self) -> float:
        """Of one rank and step: the backward pass costs two forward passes."""
        return self.flops_per_token * self.tokens * self.micro_batches * (4 if self.recompute else 3)

    def gathers(self, unit: Unit) -> int:
        """Of all modules of `unit` in a step."""
        return unit.gathers * unit.count * self.micro_batches

    @property
    def reductions(self) -> int:
        return 1 if self.accumulate else self.micro_batches

    @property
    def accumulated_bytes(self) -> int:
        """Of the whole gradient that a rank keeps from a micro-batch to the next."""
        return self.num_parameters * DTYPE_BYTES[self.reduce_dtype] if self.reductions < self.micro_batches else 0


def from_config(config: Mapping[str, Any], sequence: int) -> tuple[tuple[Unit, ...], float]:
    """Units, and FLOPs per token of a forward pass, of a dense decoder that a Hugging Face config.json describes:
    Llama and its relatives (RMSNorm, gated MLP, grouped queries), or GPT-2.

    Raises ValueError for another architecture: hand over a function that builds the module instead."""

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        return int(positive(name, default if value is None else value, whole=True))

    kind = config.get("model_type")
    if any("expert" in key for key in config):
        raise ValueError(f"model_type: expected a dense decoder, got {kind!r} with experts; use MODULE:FUNCTION")
    if kind == "gpt2":
        hidden, layers, vocabulary = size("n_embd"), size("n_layer"), size("vocab_size")
        width, inner = hidden, size("n_inner", 4 * hidden)
        layer = 4 * hidden * hidden + 2 * hidden * inner + 4 * hidden + hidden + inner + 4 * hidden
        products = 4 * hidden * hidden + 2 * hidden * inner
        root = vocabulary * hidden + size("n_positions") * hidden + 2 * hidden
    elif kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "olmo2"):
        hidden, layers, vocabulary = size("hidden_size"), size("num_hidden_layers"), size("vocab_size")
        heads = size("num_attention_heads")
        head, key_values = size("head_dim", hidden // heads), size("num_key_value_heads", heads)
        width = head * heads
        products = 2 * hidden * width + 2 * hidden * head * key_values + 3 * hidden * size("intermediate_size")
        layer = products + 2 * hidden
        tied = config.get("tie_word_embeddings", kind in ("gemma", "smollm3"))  # as transformers has it
        root = vocabulary * hidden * (1 if tied else 2) + hidden
    else:
        raise ValueError(
            f"model_type: expected gpt2, llama, mistral, qwen2, qwen3, gemma, smollm3 or olmo2, got {kind!r}; "
            "use MODULE:FUNCTION for another model"
        )
    attention = 4 * sequence * width / 2  # scores and values; causal: half of them
    flops = 2 * layers * products + layers * attention + 2 * vocabulary * hidden
    return (Unit("layer", layer, layers), Unit("root", root, gathers=1)), flops


def of_sizes(sizes: Sequence[tuple[str, int]]) -> tuple[Unit, ...]:
    """Units of names and numbers of elements as `units.units_of` has them: the last is the root."""
    *blocks, root = sizes
    return (*(Unit(name, size) for name, size in blocks), Unit(*root, gathers=1))


def load_model(name: str, sequence: int) -> tuple[tuple[Unit, ...], float]:
    """Units and FLOPs per token of a config.json, or of the module that "MODULE:FUNCTION" returns. A module counts two
    FLOPs per element that a token is multiplied with, and none for attention scores.

    Raises ValueError for what is neither."""
    path = Path(name)
    if path.suffix != ".json":
        from zcomm_bench.planner import units

        sizes, elements = units.of_function(name)
        return of_sizes(sizes), 2.0 * elements
    try:
        config = files.read(path, "a config.json")
    except ValueError as error:
        raise ValueError(f"model: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"model: expected a config.json, got a {type(config).__name__} in {path}")
    return from_config(config, sequence)
