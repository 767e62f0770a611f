"""Hugging Face's Trainer and TRL's SFTTrainer over zcomm, with FSDP2 and DDP, against the same training over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import tiny_llama
from support.tiny_llama import COMPRESSED, EXACT, Result
from support.worlds import run

import zcomm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SIZE, STEPS, EXACT_STEPS = 2, 30, 4
TRAINERS = ["Trainer", "SFTTrainer"]


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    tiny_llama.require("accelerate", "transformers", "trl")


def make_trainer(kind: str, folder: Path, steps: int, bf16: bool) -> Any:
    """Make a trainer with FSDP2. Accelerate offers FSDP2 only on GPUs, but treats models alike on all devices."""
    from accelerate import DistributedType, PartialState
    from transformers import Trainer, TrainingArguments
    from trl import SFTConfig, SFTTrainer

    fields: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "seed": 0, "data_seed": 0, "bf16": bf16, "fsdp": True,
        "fsdp_config": {"version": 2, "reshard_after_forward": True,
                        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }  # fmt: skip
    sequences = [
        tokens for step in range(STEPS) for rank in range(SIZE) for tokens in tiny_llama.make_batch(step, rank)
    ]
    if kind == "Trainer":
        arguments: Any = TrainingArguments(**fields)
    else:
        arguments = SFTConfig(**fields, dataset_kwargs={"skip_prepare_dataset": True})
    PartialState().distributed_type = DistributedType.MULTI_GPU
    model = tiny_llama.make_model()
    if kind == "Trainer":
        data = [{"input_ids": tokens, "labels": tokens} for tokens in sequences]
        return Trainer(model, arguments, train_dataset=data)
    from datasets import Dataset

    data = Dataset.from_list([{"input_ids": tokens.tolist()} for tokens in sequences])
    return SFTTrainer(model, arguments, train_dataset=data, processing_class=make_tokenizer())


def make_tokenizer() -> Any:
    """One word for each token: the data have no text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(tiny_llama.VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        pad_token="w1",
        eos_token="w2",
        unk_token="w0",
    )


def train(kind: str, backend: str, folder: Path, steps: int, bf16: bool, differences: bool) -> Result:
    dist.init_process_group(backend)
    trainer = make_trainer(kind, folder, steps, bf16)
    secondary = zcomm.fsdp.compress(trainer.model, weights="lossless") if differences else None
    trainer.train()
    if secondary is not None:
        assert [stats.generation for stats in secondary.stats().values()] == [steps] * 4
    assert type(trainer.model_wrapped).__name__.startswith("FSDP"), type(trainer.model_wrapped)
    return Result(losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry]).count()


def trained(
    kind: str, folder: Path, backend: str = "zcomm", steps: int = STEPS, bf16: bool = False, differences: bool = False,
    **env: str,
) -> Result:  # fmt: skip
    body = lambda: train(kind, backend, folder, steps, bf16, differences)  # noqa: E731
    return run(body, SIZE, backend=None, launched=True, env=env, seconds=300)[0]


@pytest.fixture(scope="module")
def under_gloo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Result]:
    """Return results of the same training under gloo, run once per number of steps: the learning rate depends on it."""
    results: dict[tuple[str, int], Result] = {}

    def get(kind: str, steps: int) -> Result:
        if (kind, steps) not in results:
            results[kind, steps] = trained(kind, tmp_path_factory.mktemp("gloo"), "gloo", steps)
        return results[kind, steps]

    return get


@pytest.mark.parametrize("kind", TRAINERS)
def test_exact_training_is_that_of_gloo(kind: str, under_gloo: Callable[[str, int], Result], tmp_path: Path) -> None:
    got = trained(kind, tmp_path, steps=EXACT_STEPS, **COMPRESSED | EXACT)
    assert got.losses == under_gloo(kind, EXACT_STEPS).losses and len(got.losses) == EXACT_STEPS
    assert not any(got.compressed.values())


@pytest.mark.parametrize("kind", TRAINERS)
def test_compressed_training_stays_close(kind: str, under_gloo: Callable[[str, int], Result], tmp_path: Path) -> None:
    got = trained(kind, tmp_path, **COMPRESSED)
    tiny_llama.assert_close(got, under_gloo(kind, STEPS))
    assert min(got.compressed["all_gather"], got.compressed["reduce_scatter"]) >= STEPS, got.compressed


def test_lossless_weights_train_as_gloo_does(tmp_path: Path) -> None:
    """Switched on before the model is sharded, and with exact gradients."""
    want = trained("Trainer", tmp_path, "gloo", EXACT_STEPS, bf16=True)
    exact_gradients = COMPRESSED | {"ZCOMM_REDUCE_SCATTER": "exact"}
    got = trained("Trainer", tmp_path, steps=EXACT_STEPS, bf16=True, differences=True, **exact_gradients)
    assert got.losses == want.losses and len(got.losses) == EXACT_STEPS
