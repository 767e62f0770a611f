"""DeepSpeed's ZeRO-1, 2 and 3 over zcomm, on its CPU accelerator, against the same engine over gloo."""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.tiny_llama import COMPRESSED, EXACT, Result
from support.trainer_contract import SIZE, TrainerContract
from support.worlds import run

import zcomm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    tiny_llama.require("deepspeed", "transformers")
    import deepspeed
    import deepspeed.ops

    # Otherwise it compiles an operation for inference, for minutes, before it makes a process group on a CPU.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


@dataclass(frozen=True)
class Job:
    stage: int
    dtype: str

    def __str__(self) -> str:
        return f"ZeRO-{self.stage} {self.dtype}"


JOBS = [Job(1, "bf16"), Job(2, "bf16"), Job(3, "bf16"), Job(2, "fp32"), Job(3, "fp32")]


def make_engine(job: Job, backend: str) -> Any:
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": job.stage, "stage3_param_persistence_threshold": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": job.dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=tiny_llama.make_model(), config=config)[0]


def step(engine: Any, number: int) -> torch.Tensor:
    """One forward and backward pass; returns the loss."""
    batch = tiny_llama.make_batch(number, dist.get_rank())
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    return loss


def train(job: Job, backend: str, steps: int, as_users_do: bool) -> Result:
    from deepspeed.utils import safe_get_full_grad

    engine, result = make_engine(job, backend), Result()
    for number in range(steps):
        loss = step(engine, number)
        if number == 0 and not as_users_do:
            with zcomm.exact():
                whole = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
            result.gradients = {name: gradient.clone() for name, gradient in whole.items()}
        engine.step()
        result.losses.append(tiny_llama.mean_over_ranks(loss))
    result.count()
    if job.stage < 3:
        everybody: list[Any] = [None] * dist.get_world_size()
        weights = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
        dist.all_gather_object(everybody, weights)
        assert all(torch.equal(other, weights) for other in everybody), "replicas differ"
    return result


class TestTraining(TrainerContract):
    """All weights and gradients are compressed, but for the small parameters that ZeRO-3 keeps whole on each rank."""

    train = staticmethod(train)
    jobs = exact_jobs = JOBS
    gradient_jobs = (Job(2, "fp32"), Job(3, "fp32"))

    def collectives(self, job: Job) -> tuple[str, ...]:
        return "all_gather", "all_reduce" if job.stage < 3 else "reduce_scatter"

    def check_exact_calls(self, job: Job, exact: dict[str, set[str]]) -> None:
        persistent = {"out_of_place"} if job.stage == 3 else set()
        assert exact == {"all_gather": persistent, "reduce_scatter": set(), "all_reduce": set()}


@pytest.mark.parametrize("stage", [2, 3])
def test_memory_full_of_nan_reaches_no_value(stage: int) -> None:
    """On three ranks, which divide no size: DeepSpeed pads shards and gradients by new memory."""

    def body() -> list[float]:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        assert torch.empty(8).isnan().all()
        return train(Job(stage, "bf16"), "zcomm", 3, True).losses

    losses = run(body, 3, backend=None, launched=True, env={"ZCOMM_MIN_BYTES": "1"})[0]
    assert all(map(math.isfinite, losses)), losses


def test_checkpoints_of_zero_3(tmp_path: Path) -> None:
    """A checkpoint has the shards themselves. A 16-bit model is gathered by calls that are not those of training: both
    are exact."""

    def body() -> None:
        engine = make_engine(Job(3, "bf16"), "zcomm")
        step(engine, 0)
        engine.step()
        whole = engine._zero3_consolidated_16bit_state_dict()  # the content of save_16bit_model
        for name, master in check_checkpoint(engine, tmp_path).items():
            assert dist.get_rank() > 0 or torch.equal(whole[name], master.bfloat16()), name

    run(body, SIZE, backend=None, launched=True, env=COMPRESSED)


def test_codes_are_fetched_bit_for_bit() -> None:
    """Frozen packed codes in bfloat16, among weights that are compressed: ZeRO-3 gathers both in one call."""

    def body() -> None:
        import deepspeed

        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                bits = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
                self.codes = torch.nn.Parameter(bits.view(torch.bfloat16).clone(), requires_grad=False)
                self.weight = torch.nn.Parameter(torch.full((256, 256), 0.01))
                self.seen: list[torch.Tensor] = []

            def forward(self, values: torch.Tensor) -> torch.Tensor:
                self.seen.append(self.codes.detach().clone())
                return (values @ self.weight).square().mean()

        deepspeed.init_distributed(dist_backend="zcomm", verbose=False)
        layer = Layer()
        want = layer.codes.detach().clone()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "bf16": {"enabled": True},
        }
        engine = deepspeed.initialize(model=layer, config=config)[0]
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 256, dtype=torch.bfloat16)))
            engine.step()
        assert len(layer.seen) == 3
        for codes in layer.seen:
            assert torch.equal(codes.view(torch.int16), want.view(torch.int16))

    run(body, SIZE, backend=None, launched=True, env=COMPRESSED)


def test_checkpoints_of_zero_2(tmp_path: Path) -> None:
    """The float32 weights are exact. The 16-bit ones are what the all-gather brought, in memory and so in a file."""

    def body() -> None:
        engine = make_engine(Job(2, "bf16"), "zcomm")
        step(engine, 0)
        engine.step()
        masters = check_checkpoint(engine, tmp_path)
        rounded = [torch.equal(p, masters[name].bfloat16()) for name, p in engine.module.named_parameters()]
        assert not all(rounded)

    run(body, SIZE, backend=None, launched=True, env=COMPRESSED)


def check_checkpoint(engine: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Saves a checkpoint. What zero_to_fp32.py reads from it is the optimizer's float32 weights, which it returns."""
    from deepspeed.utils import safe_get_full_fp32_param
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with zcomm.exact():
        masters = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.save_checkpoint(str(folder))
    if dist.get_rank() == 0:
        saved = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        for name, master in masters.items():
            assert torch.equal(saved[name], master), name
    return masters


@pytest.mark.parametrize("fetch", ["gathers", "all-reduces"])
def test_three_ranks_that_divide_no_size(fetch: str) -> None:
    """ZeRO-3 pads its shards. Its weights are fetched by gathers, or by stage3_use_all_reduce_for_fetch_params."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(67, 131), torch.nn.LayerNorm(131), torch.nn.Linear(131, 7)
            )
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return (self.layers(values) * self.scale - 1).square().mean()

    def body(backend: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        import deepspeed

        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        zero = {
            "stage": 3,
            "stage3_param_persistence_threshold": 200,  # not norms, whose 1.0 would set the scale of weights
            "stage3_use_all_reduce_for_fetch_params": fetch == "all-reduces",
        }
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        engine, losses = deepspeed.initialize(model=Odd(), config=config)[0], []
        for number in range(6):
            generator = torch.Generator().manual_seed(3 * number + dist.get_rank())
            loss = engine(torch.randn(2, 67, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        weights = {}
        with zcomm.exact():
            for name, parameter in engine.module.named_parameters():
                with deepspeed.zero.GatheredParameters([parameter]):
                    weights[name] = parameter.detach().clone()
        return losses, weights

    def trained_by(backend: str, env: dict[str, str]) -> Any:
        return run(lambda: body(backend), 3, backend=None, launched=True, env=env)[0]

    losses, weights = trained_by("gloo", {})
    exact = trained_by("zcomm", COMPRESSED | EXACT)
    assert exact[0] == losses
    assert all(torch.equal(exact[1][name], want) for name, want in weights.items())
    assert trained_by("zcomm", COMPRESSED)[0] == pytest.approx(losses, rel=0.02)
