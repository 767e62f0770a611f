"""Location of the NCCL library."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def wheel_path() -> str:
    """Return the library of an installed ``nvidia-nccl-cu12`` or ``nvidia-nccl-cu13``, or an empty string."""
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
    """Return the path and version of this process's NCCL, which the first call opens. Raises RuntimeError that lists
    what was tried, or says that this build has no CUDA."""
    import zcomm._core as _core

    path, version = _core.load_nccl(wheel_path())
    return path, f"{version // 10000}.{version // 100 % 100}.{version % 100}"
