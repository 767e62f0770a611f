"""The kernels of lossless differences by their low-level binding: the cases that tests/gpu runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from gpu import all_kernels
from support import device_lossless as differences
from support.benchmarks import host_clock, load

from zcomm import _core

NO_JOB = ((0, 0, "float16"), (0, 0, "float16"), 1, 0, 0, 0)


@pytest.mark.parametrize("case", differences.CASES, ids=lambda case: case.__name__)
def test_the_cpu_codecs_bytes_values_and_errors(case) -> None:
    case("cpu")


def test_wrong_jobs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hash: expected"):
        _core.encode_lossless_on_device([NO_JOB])
    with pytest.raises(RuntimeError, match="device"):
        _core.encode_lossless_on_device([], device=1000)


def test_the_sanitizers_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part of differences, which a GPU alone runs otherwise."""
    monkeypatch.setattr(all_kernels, "DEVICE", "cpu")
    all_kernels.run_lossless()


def test_the_benchmark() -> None:
    """It checks what it decodes."""

    def clock(passes: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
        def then_wait(one: Callable[[], Any]) -> Callable[[], Any]:
            # The memory of this GPU is written by the host as well, which no stream orders.
            return lambda: (one(), _core.synchronize(0))

        return host_clock([then_wait(one) for one in passes], repeats)

    report = load("lossless_cuda").run(
        [1e-3, 1e-5, 0.0], [5000, 50_000], 20, None, device="cpu", clock=clock, facts=lambda: {"gpu": "a host"}
    )
    encodes = [row for row in report["results"] if row["operation"] == "encode"]
    assert [row["values_bytes"] for row in encodes] == [5000] * 3 + [50_000] * 3
    for row, bits in zip(encodes[3:], (4.85, 0.68, 0.01), strict=True):
        assert row["bits_per_weight"] == pytest.approx(bits, rel=0.05), row
