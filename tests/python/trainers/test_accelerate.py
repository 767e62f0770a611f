"""Hugging Face Accelerate over zcomm: DDP, FSDP2 and DeepSpeed, against the same training over gloo."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.expected import assert_same_bits
from support.page_programs import Printed
from support.tiny_llama import COMPRESSED, STEPS, Result
from support.trainer_contract import SIZE, TrainerContract
from support.worlds import run
from torch import nn
from torch.distributed.tensor import DTensor

import zcomm

pytestmark = pytest.mark.slow

KINDS = ["DDP", "FSDP2", "DeepSpeed"]


@pytest.fixture(scope="module", autouse=True)
def accelerate() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    tiny_llama.require("accelerate", "deepspeed", "transformers")
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # see test_deepspeed.py
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def make_accelerator(kind: str, backend: str, precision: str = "no") -> Any:
    from accelerate import Accelerator, DistributedType, PartialState
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    if kind == "DeepSpeed":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 1000,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
        return Accelerator(
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend)],
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        )
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    if kind == "FSDP2":
        # Accelerate offers FSDP on accelerators only. What it does with a model does not depend on the device.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        plugin = accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
        if precision != "no":
            plugin.set_mixed_precision(precision)
    return accelerator


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def train(kind: str, backend: str, steps: int, as_users_do: bool) -> Result:
    accelerator, result = make_accelerator(kind, backend), Result()
    model = tiny_llama.make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    if as_users_do and kind == "DDP":
        model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
    for step in range(steps):
        batch = tiny_llama.make_batch(step, accelerator.process_index)
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if step == 0 and kind != "DeepSpeed":
            named = [(name.removeprefix("module."), p.grad) for name, p in model.named_parameters()]
            result.gradients = {name: whole(gradient) for name, gradient in named}
        if kind != "DeepSpeed":  # its engine clips, steps and clears in backward()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(tiny_llama.mean_over_ranks(loss))
    return result.count()


class TestTraining(TrainerContract):
    train = staticmethod(train)
    jobs = KINDS
    exact_jobs = gradient_jobs = ("DDP", "FSDP2")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_gathers_and_saves_is_exact(kind: str) -> None:
    """gather() and get_state_dict(), with the options by default."""

    def body() -> None:
        accelerator = make_accelerator(kind, "zcomm")
        model = tiny_llama.make_model()
        want = {name: value.clone() for name, value in model.state_dict().items()}
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        saved = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert {name.removeprefix("module.") for name in saved} == want.keys()
            for name, value in saved.items():
                assert_same_bits(value, want[name.removeprefix("module.")], name)
        values = torch.randn(50_000, generator=torch.Generator().manual_seed(accelerator.process_index))
        gathered = accelerator.gather(values).view(SIZE, -1)
        assert_same_bits(gathered[accelerator.process_index], values)

    run(body, SIZE, backend=None, launched=True, env=COMPRESSED)


@pytest.mark.timeout(600)  # of two trainings by four ranks
@pytest.mark.parametrize("gradients", ["exact", "compressed"])
def test_lossless_weights_train_as_exact_weights_do(gradients: str) -> None:
    """Weights are equal bit for bit; exact gradients are gloo's. docs/trainers/accelerate.md has the user's line."""

    def train_exactly(backend: str, differences: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        accelerator = make_accelerator("FSDP2", backend, "bf16")
        model = tiny_llama.make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        weights = "lossless" if differences else "exact"
        compression = zcomm.fsdp.compress(model, weights=weights) if backend == "zcomm" else None
        losses = []
        for step in range(STEPS):
            batch = tiny_llama.make_batch(step, accelerator.process_index)
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(tiny_llama.mean_over_ranks(loss))
        if compression is not None:
            generations = [stats.generation for stats in compression.stats().values()]
            assert generations == ([STEPS] * 4 if differences else [0] * 4)
        return losses, {name: whole(parameter) for name, parameter in model.named_parameters()}

    def trained_exactly(backend: str, differences: bool, **env: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        two_nodes = {**COMPRESSED, "ZCOMM_NODE_SIZE": "2", **env}
        return run(
            lambda: train_exactly(backend, differences), 4, backend=None, launched=True, env=two_nodes, seconds=290
        )[0]

    if gradients == "exact":
        want = trained_exactly("gloo", False)
        got = trained_exactly("zcomm", True, ZCOMM_REDUCE_SCATTER="exact")
    else:
        want = trained_exactly("zcomm", False, ZCOMM_ALL_GATHER="exact")
        got = trained_exactly("zcomm", True)
    assert got[0] == want[0]
    for name, parameter in want[1].items():
        assert_same_bits(got[1][name], parameter, name)


@pytest.mark.parametrize("own_units", [False, True])
def test_frozen_weights_cross_nodes_once_if_adapters_have_units_of_their_own(own_units: bool) -> None:
    """docs/fine-tuning.md shows this setup."""
    tiny_llama.require("peft")

    def body() -> None:
        from peft import LoraConfig, get_peft_model
        from torch.distributed.fsdp import fully_shard

        accelerator = make_accelerator("FSDP2", "zcomm")
        model = get_peft_model(tiny_llama.make_model(), LoraConfig(r=8, target_modules="all-linear"))
        layers = model.base_model.model.model.layers
        for layer in layers if own_units else []:
            parts = layer.named_modules()
            fully_shard([part for name, part in parts if ".lora_" in name and isinstance(part, nn.Linear)])
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        secondary = zcomm.fsdp.compress(model)
        for step in range(3):
            batch = tiny_llama.make_batch(step, accelerator.process_index)
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        gathers = {name: stats.gathers_inter_node for name, stats in secondary.stats().items()}
        for i in range(len(layers)):
            assert gathers.pop(f"base_model.model.model.layers.{i}") == (1 if own_units else 3)
        assert gathers.pop("base_model.model.model.embed_tokens") == gathers.pop("base_model.model.lm_head") == 1
        assert list(gathers.values()) == [0] + [3] * len(layers) * own_units  # the root has no weights left

    run(body, 4, backend=None, launched=True, env=COMPRESSED | {"ZCOMM_NODE_SIZE": "2"})


def test_a_cpu_takes_the_name_from_init_process_group_only() -> None:
    def body() -> None:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs

        with pytest.raises(ValueError, match="backend zcomm is not available, please use gloo"):
            Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="zcomm")])

    run(body, 1, backend=None, launched=True)


def with_the_handler() -> Printed:
    """The page's program on a CPU, with the handler that it uses on GPUs."""
    one = Printed.of("accelerate")
    return dataclasses.replace(one, program=one.program.replace("torch.cuda.is_available()", "True"))


def test_ranks_that_train_on_their_own_are_told_of(tmp_path: Path) -> None:
    """Accelerate does so on CPUs that nobody has named."""
    assert with_the_handler().run(tmp_path).count("zcomm compressed nothing in this job of 2 ranks") == 1


def test_the_program_of_the_page_under_accelerate_launch(tmp_path: Path) -> None:
    launch = "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 --main_process_port 0 train.py"
    one = dataclasses.replace(with_the_handler(), command=f"DS_ACCELERATOR=cpu {launch}")
    assert re.search(r"all_gather +\d+ .*\nreduce_scatter +\d+ ", one.run(tmp_path))
