"""Location of the NCCL library."""

from __future__ import annotations

import ctypes
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


def front_path() -> str:
    """Return the front of NCCL, a library for ``LD_PRELOAD``. Raises RuntimeError if this build has none."""
    import zcomm._core as _core

    path = Path(_core.__file__).parent / "libzcomm_nccl.so"
    if not path.exists():
        raise RuntimeError(
            "this build of zcomm has no front of NCCL: it was built without nvcc, or with ZCOMM_CUDA=OFF"
        )
    return str(path)


def library_behind_front() -> str | None:
    """Return the file to which the front forwards in this process: empty if it found none, None without the front."""
    try:
        library = ctypes.CDLL(None).zcomm_front_library
    except AttributeError:
        return None
    library.restype = ctypes.c_char_p
    return str(library().decode())
