"""Where NCCL is."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def wheel_path() -> str:
    """The library of an installed ``nvidia-nccl-cu12`` or ``nvidia-nccl-cu13``; empty if there is none."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    for folder in package.submodule_search_locations or () if package else ():
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return ""


def load() -> tuple[str, str]:
    """The path and version of the NCCL of this process, opened at the first call. Raises RuntimeError that says what
    was tried, or that this build has no CUDA."""
    from zcomm import _core

    path, version = _core.load_nccl(wheel_path())
    return path, f"{version // 10000}.{version // 100 % 100}.{version % 100}"
