"""The programs in bench, as modules, and a clock for them where there is no GPU."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

BENCH = Path(__file__).parents[2] / "bench"


def load(name: str) -> ModuleType:
    if str(BENCH) not in sys.path:
        sys.path.append(str(BENCH))
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def host_clock(passes: Sequence[Callable[[], Any]], repeats: int, **_: Any) -> list[list[float]]:
    """Replace gpu_clock.seconds_of, for CPU tensors."""
    times: list[list[float]] = [[] for _ in passes]
    for _ in range(repeats):
        for one, own in zip(passes, times, strict=True):
            start = time.perf_counter()
            one()
            own.append(time.perf_counter() - start)
    return times
