"""Tensors as ``zcomm_bench.reference`` takes values, and back."""

from __future__ import annotations

import numpy as np
import torch

from zcomm_bench.reference import Values


def values_of(tensor: torch.Tensor) -> Values:
    """The elements of a tensor; bfloat16 as bit patterns."""
    flat = tensor.detach().reshape(-1).cpu()
    found: Values = flat.view(torch.int16).numpy().view(np.uint16) if flat.dtype == torch.bfloat16 else flat.numpy()
    return found


def tensor_of(values: Values, dtype: torch.dtype) -> torch.Tensor:
    values = np.ascontiguousarray(values)
    if dtype == torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
