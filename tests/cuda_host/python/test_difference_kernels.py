"""The kernels of lossless differences by their low-level binding: the cases that tests/gpu runs on a GPU."""

from __future__ import annotations

import pytest
from support import device_differences as differences

from zcomm import _core

NO_JOB = ((0, 0, "float16"), (0, 0, "float16"), 1, 0, 0, 0)


@pytest.mark.parametrize("case", differences.CASES, ids=lambda case: case.__name__)
def test_the_cpu_codecs_bytes_values_and_errors(case) -> None:
    case("cpu")


def test_wrong_jobs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="hash: expected"):
        _core.encode_differences_on_device([NO_JOB])
    with pytest.raises(RuntimeError, match="device"):
        _core.encode_differences_on_device([], device=1000)
