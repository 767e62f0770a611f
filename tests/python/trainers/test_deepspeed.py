"""DeepSpeed's ZeRO-1, 2 and 3 over zcomm, on its CPU accelerator, against the same engine over gloo."""

from __future__ import annotations

import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.expected import HALF_STEP
from support.tiny_llama import COMPRESSED, EXACT, STEPS, Result
from support.worlds import run

import zcomm

pytestmark = pytest.mark.slow

SIZE = 2
# Weights that are gathered in place are copies. ZeRO-1 and 2 reduce gradients by an all-reduce; ZeRO-3 gathers out of
# place the parameters that it fetches one by one.
IN_PLACE = {"ZCOMM_FORMS": "in_place"}
WANTED = {1: IN_PLACE | {"ZCOMM_ALL_REDUCE": "int8:128/int4:128"}, 3: {"ZCOMM_FORMS": "in_place,out_of_place"}}
WANTED[2] = WANTED[1]


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


def train(job: Job, backend: str, steps: int, gradients: bool) -> Result:
    from deepspeed.utils import safe_get_full_grad

    engine, result = make_engine(job, backend), Result()
    for number in range(steps):
        loss = step(engine, number)
        if number == 0 and gradients:
            with zcomm.exact():
                whole = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
            result.gradients = {name: gradient.clone() for name, gradient in whole.items()}
        engine.step()
        result.losses.append(tiny_llama.mean_over_ranks(loss))
    result.count()
    if job.stage < 3:
        everybody: list[Any] = [None] * SIZE
        weights = torch.cat([p.detach().float().flatten() for p in engine.module.parameters()])
        dist.all_gather_object(everybody, weights)
        assert all(torch.equal(other, weights) for other in everybody), "replicas differ"
    return result


def trained(
    job: Job,
    backend: str = "zcomm",
    steps: int = STEPS,
    env: dict[str, str] | None = None,
    gradients: bool = False,  # makes extra collectives
) -> Result:
    return run(lambda: train(job, backend, steps, gradients), SIZE, backend=None, launched=True, env=env or {})[0]


@pytest.fixture(scope="module")
def under_gloo() -> Callable[[Job], Result]:
    """Return results of the same job under gloo, each run once."""
    results: dict[Job, Result] = {}

    def get(job: Job) -> Result:
        if job not in results:
            results[job] = trained(job, "gloo", gradients=True)
        return results[job]

    return get


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_exact_training_is_bit_identical_to_gloo(job: Job, under_gloo: Callable[[Job], Result]) -> None:
    tiny_llama.assert_same(trained(job, steps=5, env=COMPRESSED | EXACT, gradients=True), under_gloo(job))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_compressed_training_stays_close_to_gloo(job: Job, under_gloo: Callable[[Job], Result]) -> None:
    """All weights and gradients are compressed: no call that carries them stays exact."""
    got = trained(job, env=COMPRESSED | WANTED[job.stage])
    tiny_llama.assert_close(got, under_gloo(job))
    gradients = "all_reduce" if job.stage < 3 else "reduce_scatter"
    assert got.compressed["all_gather"] >= STEPS and got.compressed[gradients] >= STEPS, got.compressed
    assert not any(got.exact.values()), got.exact


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_exact_by_default(stage: int) -> None:
    got = trained(Job(stage, "bf16"), steps=3, env=COMPRESSED)
    assert got.compressed["all_gather"] == got.compressed["all_reduce"] == 0
    if stage < 3:
        assert got.exact == {"all_gather": {"in_place"}, "reduce_scatter": set(), "all_reduce": {"format_exact"}}
    else:
        assert got.compressed["reduce_scatter"] >= 3
        assert got.exact == {"all_gather": {"in_place", "out_of_place"}, "reduce_scatter": set(), "all_reduce": set()}


@pytest.mark.parametrize("stage", [2, 3])
def test_first_gradients_are_within_half_a_step(stage: int, under_gloo: Callable[[Job], Result]) -> None:
    """Half a step of what the other rank sends, by its largest gradient; ZeRO-2 gathers the sum in 8 bits, too."""
    job = Job(stage, "fp32")
    env = COMPRESSED | {"ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "int8:128", "ZCOMM_ALL_REDUCE": "int8:128"}
    got, want = trained(job, steps=1, env=env, gradients=True).gradients, under_gloo(job).gradients
    maxima = run(lambda: tiny_llama.largest_gradients(SIZE), 1, backend=None)[0]
    limit = (max(maxima) / SIZE + (sum(maxima) / SIZE if stage == 2 else 0)) / 127 * HALF_STEP + 1e-6
    error = max(float((got[name] - want[name]).abs().max()) for name in want)
    assert limit / 50 < error <= limit, "not compressed at all?"


def test_checkpoints_of_zero_3(tmp_path: Path) -> None:
    """A checkpoint has the shards themselves: exact. A 16-bit model is gathered, and exact in zcomm.exact() only."""

    def body() -> None:
        engine = make_engine(Job(3, "bf16"), "zcomm")
        step(engine, 0)
        engine.step()
        with zcomm.exact():
            exact = engine._zero3_consolidated_16bit_state_dict()  # the content of save_16bit_model
        compressed = engine._zero3_consolidated_16bit_state_dict()
        for name, master in check_checkpoint(engine, tmp_path).items():
            assert dist.get_rank() > 0 or torch.equal(exact[name], master.bfloat16()), name
        assert dist.get_rank() > 0 or any(not torch.equal(compressed[name], exact[name]) for name in exact)

    run(body, SIZE, backend=None, launched=True, env=COMPRESSED | WANTED[3])


def test_checkpoints_of_zero_2(tmp_path: Path) -> None:
    """The float32 weights are exact. The 16-bit ones are what the all-gather brought, in memory and so in a file."""

    def body() -> None:
        engine = make_engine(Job(2, "bf16"), "zcomm")
        step(engine, 0)
        engine.step()
        masters = check_checkpoint(engine, tmp_path)
        rounded = [torch.equal(p, masters[name].bfloat16()) for name, p in engine.module.named_parameters()]
        assert not all(rounded)

    run(body, SIZE, backend=None, launched=True, env=COMPRESSED | WANTED[2])


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


def test_the_program_of_the_page_under_its_launcher(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port)]
    tiny_llama.run_program("deepspeed.md", launch, tmp_path, ZCOMM_FORMS="in_place,out_of_place")
