"""Loader of the torch binding. A build has one per minor version of torch, because torch's C++ ABI differs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import zcomm._core as _core
import zcomm.distributed.errors  # noqa: F401  # whose class C++ raises: no import should happen then

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_NAME = "zcomm._c10d"  # the same for every torch, and so for the names of its types


def bindings() -> dict[str, Path]:
    """Return the binding files of this build by minor version of torch, oldest first."""
    files = {}
    for path in Path(str(_core.__file__)).parent.glob("_c10d_*.so"):
        _, major, minor = path.name.split(".")[0].rsplit("_", 2)
        files[f"{major}.{minor}"] = path
    return dict(sorted(files.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def _load() -> Any:
    minor = ".".join(torch.__version__.split(".")[:2])
    remedy = "In the folder of zcomm's source, 'pip install --force-reinstall --no-deps .' builds it for this torch."
    files = bindings()
    if TORCH < (2, 11):
        raise ImportError(f"expected torch 2.11 or later, got torch {torch.__version__}")
    if minor not in files:
        raise ImportError(
            f"expected torch {' or '.join(files)}, for which this zcomm was built, got torch {torch.__version__}. "
            + remedy
        )
    try:
        spec = importlib.util.spec_from_file_location(_NAME, files[minor])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(
            f"zcomm's binding for torch {minor} does not load in torch {torch.__version__}. {remedy} "
            f"The loader said: {error}"
        ) from error
    sys.modules[_NAME] = module
    return module


if TYPE_CHECKING:
    import zcomm._c10d as _c10d
else:
    _c10d = _load()

__all__ = ["TORCH", "_c10d", "bindings"]
