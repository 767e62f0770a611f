"""The messages of a module under FSDP2, read from a module that need not be sharded or have memory."""

from __future__ import annotations

import importlib
import os
import sys

import torch


def units_of(module: torch.nn.Module) -> list[tuple[str, int]]:
    """Name and number of elements of each unit, as torchtitan and the examples wrap a module: each element of its
    largest torch.nn.ModuleList, and the root with the rest. Parameters that are tied count once."""
    lists = [each for each in module.modules() if isinstance(each, torch.nn.ModuleList)]
    blocks = max(lists, key=_num_elements, default=torch.nn.ModuleList())
    units = [(f"block {index}", _num_elements(block)) for index, block in enumerate(blocks)]
    return [*units, ("root", _num_elements(module) - sum(size for _, size in units))]


def product_elements(module: torch.nn.Module) -> int:
    """Elements of the weight matrices that tokens are multiplied with: all of two dimensions or more but embeddings.
    A head that is tied to an embedding counts."""
    embeddings = [each.weight for each in module.modules() if isinstance(each, torch.nn.Embedding)]
    names: dict[int, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    lookups = {id(weight) for weight in embeddings if names[id(weight)] == 1}
    return sum(each.numel() for each in module.parameters() if each.dim() > 1 and id(each) not in lookups)


def of_function(name: str) -> tuple[list[tuple[str, int]], int]:
    """`units_of` and `product_elements` of the module that "MODULE:FUNCTION" returns, built on the meta device. The
    module is also looked for in the current folder.

    Raises ValueError where there is no such function, and for one that raises or returns something else."""
    module_name, colon, function = name.partition(":")
    if not colon or not function:
        raise ValueError(f'model: expected a config.json or "MODULE:FUNCTION", got {name!r}')
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module_name), function)
    except Exception as error:  # the user's module may raise any
        raise ValueError(f"model: expected a function {name!r}: {error}") from None
    finally:
        sys.path.pop(0)
    try:
        with torch.device("meta"):
            module = build()
    except Exception as error:  # and so may its function
        raise ValueError(f"model: expected {name} to return a module, got {type(error).__name__}: {error}") from None
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"model: expected {name} to return a torch.nn.Module, got {type(module).__name__}")
    if _num_elements(module) == 0:
        raise ValueError(f"model: expected {name} to return a module with parameters, got none")
    return units_of(module), product_elements(module)


def _num_elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
