"""The trainers of torch under zcomm against the same training under gloo."""

from __future__ import annotations

import functools

import pytest
import torch
from support.trainers import JOBS, under_gloo
from support.training import (
    EXACT_STEPS,
    STEPS,
    Job,
    Result,
    assert_same_tensors,
    assert_within_one_percent,
    bound_of_mean,
    first_gradients,
    part,
    trained,
)
from support.worlds import options

TWINS = [name for name, job in JOBS.items() if job.twin]
OTHERS = [name for name, job in JOBS.items() if not job.twin]
SLOW = (
    "FSDP2 on two nodes", "FSDP2, float16", "FSDP2, weights kept by 2", "FSDP2, tensor parallel", "FSDP1, bfloat16",
    "FSDP1, hybrid",
)  # fmt: skip


@functools.cache
def compressed(name: str) -> list[Result]:
    return trained(JOBS[name], EXACT_STEPS, options=options(**JOBS[name].options))


def assert_compressed(job: Job, result: Result, steps: int) -> None:
    for collective, calls in result.compressed.items():
        assert (calls >= steps) if collective in job.compressed else calls == 0, (collective, result.compressed)


@pytest.mark.parametrize("name", JOBS)
def test_exact_training_is_bit_identical_to_gloo(name: str) -> None:
    """zcomm with exact formats, and all-reduces exact by default, equals gloo: every loss, gradient and parameter."""
    job = JOBS[name]
    want = under_gloo(name, EXACT_STEPS)
    for ours, theirs in zip(trained(job, EXACT_STEPS, options=options(**job.exact)), want, strict=True):
        assert ours.losses == theirs.losses
        assert sum(ours.compressed.values()) == 0
        assert_same_tensors(ours.gradients, theirs.gradients, "gradients")
        assert_same_tensors(ours.parameters, theirs.parameters, "parameters")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in OTHERS]
)
def test_compressed_training_stays_within_one_percent_of_gloo(name: str) -> None:
    """Every loss of 50 steps; the calls that should be are compressed, and replicas stay identical to the last bit."""
    job = JOBS[name]
    got, want = trained(job, options=options(**job.options)), under_gloo(name)
    for result in got:
        assert_compressed(job, result, STEPS)
        assert_same_tensors(result.last_parameters, got[0].last_parameters, "replicas")
    assert_within_one_percent(got, want)


@pytest.mark.parametrize("name", TWINS)
def test_compressed_training_is_that_of_the_twin(name: str) -> None:
    """The location of weights, and recomputation, change no bit of a compressed run."""
    job = JOBS[name]
    assert job.twin is not None
    for ours, theirs in zip(compressed(name), compressed(job.twin), strict=True):
        assert_compressed(job, ours, EXACT_STEPS)
        assert ours.losses == theirs.losses
        assert_same_tensors(ours.gradients, theirs.gradients, "gradients")
        assert_same_tensors(ours.parameters, theirs.parameters, "parameters")


@pytest.mark.parametrize("name", OTHERS)
def test_first_gradients_are_within_half_a_step_per_hop(name: str) -> None:
    """Gradients with exact weights are off by at most half a step of each rank's contribution, by the largest gradient
    that the rank has in the same part of the model."""
    job = JOBS[name]
    want = under_gloo(name, EXACT_STEPS)[0].gradients
    for got, maxima in job.run(lambda: first_gradients(job), options=options(**job.options)):
        assert got.keys() == want.keys()
        worst = 0.0
        for key in want:
            whole_model = "all_reduce" in job.compressed  # a bucket of DDP has more than a part
            sent = [max(of.values()) if whole_model else of[part(key)] for of in maxima]
            limit = bound_of_mean(sent, job.nodes)
            limit *= 2 if whole_model else 1  # the mean is quantized once more, to be gathered
            limit += sum(sent) * torch.finfo(job.reduce_dtype).eps  # sums are rounded, here and by gloo
            error = float((got[key] - want[key]).abs().max())
            assert error <= limit, (key, error, limit)
            worst = max(worst, error / limit)
        assert worst > 0.05, "not compressed at all?"
