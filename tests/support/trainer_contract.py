"""What each trainer has to show with the model of `tiny_llama`: training over zcomm against the same over gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from support import tiny_llama
from support.expected import HALF_STEP
from support.tiny_llama import COMPRESSED, EXACT, STEPS, Result
from support.worlds import run

SIZE = 2
EXACT_STEPS = 5
EIGHT_BITS = {"ZCOMM_ALL_GATHER": "exact", "ZCOMM_REDUCE_SCATTER": "int8:128", "ZCOMM_ALL_REDUCE": "int8:128"}
Train = Callable[[Any, str, int, bool], Result]


class TrainerContract:
    """Tests of one trainer. A class of tests derives from it and says what a job is.

    ``train(job, backend, steps, as_users_do)`` trains on one rank. ``as_users_do``: with the hook that DDP's users
    register, and without calls beside those of training, so without the gradients of the first step.
    """

    train: ClassVar[Train]
    jobs: ClassVar[Sequence[Any]]
    exact_jobs: ClassVar[Sequence[Any]]
    gradient_jobs: ClassVar[Sequence[Any]]

    def collectives(self, job: Any) -> tuple[str, ...]:
        """The collectives that the job compresses."""
        return ("all_reduce",) if "DDP" in str(job) else ("all_gather", "reduce_scatter")

    def check_exact_calls(self, job: Any, exact: dict[str, set[str]]) -> None:
        """Checks why calls of a compressed training stayed exact, where the trainer's are known."""

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        for name in ("job", "exact_job", "gradient_job"):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, getattr(cls, f"{name}s"), ids=str)

    @classmethod
    def trained(
        cls, job: Any, backend: str = "zcomm", steps: int = STEPS, as_users_do: bool = False, **env: str
    ) -> Result:
        """The result of a training, on rank 0."""
        train = cls.train
        return run(lambda: train(job, backend, steps, as_users_do), SIZE, backend=None, launched=True, env=env)[0]

    @classmethod
    @functools.cache
    def under_gloo(cls, job: Any) -> Result:
        """The result of the same training under gloo, which runs once."""
        return cls.trained(job, "gloo")

    def test_exact_training_is_bit_identical_to_gloo(self, exact_job: Any) -> None:
        got = self.trained(exact_job, steps=EXACT_STEPS, **COMPRESSED | EXACT)
        tiny_llama.assert_same(got, self.under_gloo(exact_job))

    def test_compressed_training_stays_close_to_gloo(self, job: Any) -> None:
        got = self.trained(job, as_users_do=True, **COMPRESSED)
        tiny_llama.assert_close(got, self.under_gloo(job))
        assert all(got.compressed[collective] >= STEPS for collective in self.collectives(job)), got.compressed
        self.check_exact_calls(job, got.exact)

    def test_first_gradients_are_within_half_a_step(self, gradient_job: Any) -> None:
        """Half a step of what the other rank sends, by its largest gradient; an all-reduce gathers the sum in 8 bits,
        too."""
        got = self.trained(gradient_job, steps=1, **COMPRESSED | EIGHT_BITS).gradients
        want = self.under_gloo(gradient_job).gradients
        maxima = run(lambda: tiny_llama.largest_gradients(SIZE), 1, backend=None)[0]
        gathered = sum(maxima) / SIZE if "all_reduce" in self.collectives(gradient_job) else 0
        limit = (max(maxima) / SIZE + gathered) / 127 * HALF_STEP + 1e-6
        error = max(float((got[name] - want[name]).abs().max()) for name in want)
        assert limit / 50 < error <= limit, "not compressed at all?"
