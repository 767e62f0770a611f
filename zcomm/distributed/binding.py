"""The torch binding, zcomm._c10d: one build of it serves one minor version of torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch


def _load() -> Any:
    running = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    try:
        _c10d: Any = importlib.import_module("zcomm._c10d")
    except ImportError as error:
        raise ImportError(
            f"zcomm's torch binding does not load in torch {running}: a build serves one minor version of torch. "
            "Reinstall zcomm against this torch with 'pip install --no-build-isolation --force-reinstall --no-deps'. "
            f"The loader said: {error}"
        ) from error
    built = ".".join(_c10d.torch_version.split(".")[:2])
    if built != running:
        raise ImportError(
            f"zcomm was built for torch {built}, and this is torch {running}: reinstall zcomm against this torch with "
            "'pip install --no-build-isolation --force-reinstall --no-deps'"
        )
    return _c10d


if TYPE_CHECKING:
    from zcomm import _c10d
else:
    _c10d = _load()

__all__ = ["_c10d"]
