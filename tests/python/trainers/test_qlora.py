"""QLoRA with bitsandbytes' own layers and PEFT's adapters: packed codes of every storage dtype have Gloo's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.expected import assert_same_bits
from support.worlds import run
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import zcomm

pytestmark = pytest.mark.slow

WIDTH = 512


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    tiny_llama.require("bitsandbytes", "peft")


def make(storage: torch.dtype) -> nn.Module:
    import bitsandbytes
    from peft import LoraConfig, get_peft_model

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = (
                bitsandbytes.nn.Linear4bit(
                    WIDTH, WIDTH, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", quant_storage=storage
                )
                for _ in range(2)
            )

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.up(values)))

    layer = Layer().to("cpu")  # packs the codes
    adapted = get_peft_model(layer, LoraConfig(r=8, target_modules=["up", "down"]))  # type: ignore[arg-type]
    return adapted.to(torch.bfloat16) if storage == torch.bfloat16 else adapted


def layers_with_codes(model: nn.Module) -> list[nn.Module]:
    import bitsandbytes

    return [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]


def shard(model: nn.Module, how: str) -> nn.Module:
    if how.startswith("FSDP1"):
        return FullyShardedDataParallel(model, use_orig_params="original" in how, device_id=torch.device("cpu"))
    for layer in layers_with_codes(model):
        fully_shard(layer)
    fully_shard(model)
    if "compress" in how:
        zcomm.fsdp.compress(model)
    return model


def outputs(how: str, storage: torch.dtype) -> tuple[torch.Tensor, int]:
    """The model's outputs, which depend on the codes alone, as LoRA begins at zero; and compressed gathers."""
    model = shard(make(storage), how)
    values = torch.randn(4, WIDTH, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = torch.stack([model(values) for _ in range(2)])
    return found, zcomm.stats().all_gather.calls if dist.get_backend() == "zcomm" else 0


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", ["FSDP2", "FSDP2, compress", "FSDP1, original parameters"])
def test_outputs_are_those_of_gloo(how: str, storage: torch.dtype) -> None:
    if how.startswith("FSDP1") and storage == torch.uint8:
        pytest.skip("FSDP1 flattens parameters of one dtype alone")
    world: dict[str, Any] = {"nodes": [0, 0, 1, 1], "env": {"ZCOMM_MIN_BYTES": "1024"}}
    want = run(lambda: outputs(how.removesuffix(", compress"), storage), 4, backend="gloo")
    for (found, _), (theirs, _) in zip(run(lambda: outputs(how, storage), 4, **world), want, strict=True):
        assert_same_bits(found, theirs)
