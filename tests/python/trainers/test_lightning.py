"""Lightning over zcomm: Fabric and Trainer with DDP and FSDP2, against the same training over gloo."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.tiny_llama import Result
from support.trainer_contract import SIZE, TrainerContract
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zcomm

pytestmark = pytest.mark.slow

JOBS = ["Fabric DDP", "Fabric FSDP2", "Trainer DDP", "Trainer FSDP2"]


@pytest.fixture(scope="module", autouse=True)
def lightning() -> None:
    tiny_llama.require("lightning", "lightning.fabric", "lightning.pytorch", "transformers")
    logging.getLogger("lightning").setLevel(logging.ERROR)


def shard(model: Any, mesh: Any) -> Any:
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


def keep_gradients(result: Result, model: Any) -> None:
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        name = name.removeprefix("_forward_module.").removeprefix("module.").removeprefix("llama.")
        result.gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()


def train_by_fabric(kind: str, backend: str, steps: int, hook: bool) -> Result:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    strategy: Any = DDPStrategy(process_group_backend=backend)
    if kind == "FSDP2":
        strategy = ModelParallelStrategy(
            shard, data_parallel_size=SIZE, tensor_parallel_size=1, process_group_backend=backend
        )
    fabric, result = Fabric(accelerator="cpu", devices=SIZE, strategy=strategy), Result()
    fabric.launch()
    assert dist.get_backend() == backend
    model = fabric.setup(tiny_llama.make_model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    if hook:
        model._forward_module.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)
    for step in range(steps):
        batch = tiny_llama.make_batch(step, fabric.global_rank)
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        if step == 0:
            keep_gradients(result, model)
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(tiny_llama.mean_over_ranks(loss))
    return result.count()


def train_by_trainer(kind: str, backend: str, steps: int, hook: bool) -> Result:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    result = Result()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama = tiny_llama.make_model()

        def configure_model(self) -> None:
            if kind == "FSDP2":
                shard(self.llama, self.device_mesh)

        def training_step(self, batch: torch.Tensor, step: int) -> torch.Tensor:
            loss = self.llama(input_ids=batch, labels=batch).loss
            result.losses.append(tiny_llama.mean_over_ranks(loss))
            return loss

        def on_train_start(self) -> None:
            if hook:
                self.trainer.strategy.model.register_comm_hook(zcomm.ddp.CompressState(), zcomm.ddp.compress_hook)

        def on_after_backward(self) -> None:
            if len(result.losses) == 1:
                keep_gradients(result, self.llama)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_end(self) -> None:
            assert dist.get_backend() == backend
            result.count()

    strategy: Any = DDPStrategy(process_group_backend=backend)
    if kind == "FSDP2":
        strategy = ModelParallelStrategy(data_parallel_size=SIZE, tensor_parallel_size=1, process_group_backend=backend)
    trainer = Trainer(
        accelerator="cpu", devices=SIZE, strategy=strategy, max_steps=steps, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = [tiny_llama.make_batch(step, trainer.global_rank) for step in range(steps)]
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    return result


class TestTraining(TrainerContract):
    jobs = exact_jobs = JOBS
    gradient_jobs = ("Fabric FSDP2", "Trainer DDP")

    @staticmethod
    def train(job: str, backend: str, steps: int, as_users_do: bool) -> Result:
        interface, kind = job.split()
        train = train_by_fabric if interface == "Fabric" else train_by_trainer
        return train(kind, backend, steps, as_users_do and kind == "DDP")


def test_fsdp_strategy_is_refused_on_a_cpu() -> None:
    """Lightning refuses it, so FSDPStrategy, which is FSDP1, is not tested here."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy

    with pytest.raises(ValueError, match="FSDP is only available on GPU"):
        Fabric(accelerator="cpu", devices=SIZE, strategy=FSDPStrategy(process_group_backend="zcomm"))
