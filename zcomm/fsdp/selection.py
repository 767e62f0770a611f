"""Which parameters a setting is about."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.fsdp import FSDPModule

from zcomm.distributed import _fsdp2

#: Which parameters: a pattern for their names (``"*.norm.*"``, as in fnmatch), a type of module that holds them, or a
#: function of a name and a parameter, whose shape is that of the whole parameter.
Selector: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Parameter], bool]"


def one_dimensional(name: str, parameter: nn.Parameter) -> bool:
    """Norms and biases: few elements, to which a model is sensitive.

    Example: ``compress(model, exempt=[one_dimensional])``.
    """
    is_vector: bool = parameter.ndim < 2
    return is_vector


def smaller_than(num_elements: int) -> Callable[[str, nn.Parameter], bool]:
    """Parameters of less than so many elements.

    Example: ``compress(model, exempt=[smaller_than(100_000)])``.
    """
    return lambda name, parameter: parameter.numel() < num_elements


def select(model: nn.Module, selectors: Sequence[Selector]) -> set[tuple[int, str]]:
    """The parameters, each as the identity of its module and its name there: FSDP2 exchanges the objects.

    Raises ValueError for something else than selectors, for a pattern or type that selects nothing, and for a module
    without shards."""
    if isinstance(selectors, str) or not isinstance(selectors, Sequence):
        raise ValueError(f"exempt: expected a sequence of patterns, types of modules, or functions, got {selectors!r}")
    selected = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    _check_sharded(modules)
    for selector in selectors:
        found = False
        for module_name, module in modules.items():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                full_name = f"{module_name}.{name}" if module_name else name
                if _selects(selector, full_name, parameter, modules):
                    found = True
                    selected.add((id(module), name))
        if not found and not _is_function(selector):
            raise ValueError(f"exempt: {selector!r} selects no parameter of the model")
    return selected


def _is_function(selector: Any) -> bool:
    return callable(selector) and not isinstance(selector, type | nn.Module)


def _selects(selector: Selector, name: str, parameter: nn.Parameter, modules: dict[str, nn.Module]) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        parts = name.split(".")[:-1]
        return any(isinstance(modules[".".join(parts[:depth])], selector) for depth in range(len(parts) + 1))
    if _is_function(selector):
        return bool(selector(name, parameter))  # type: ignore[call-arg]
    raise ValueError(f"exempt: expected a pattern, a type of module, or a function, got {selector!r}")


def _check_sharded(modules: dict[str, nn.Module]) -> None:
    for name, module in modules.items():
        groups = _fsdp2.groups_of(module) if isinstance(module, FSDPModule) else []
        if any(_fsdp2.process_groups_of(group)[0] is None for group in groups):
            raise ValueError(
                f"model: expected modules of fully_shard, got {name or 'one'} of replicate(), which gathers no weights "
                "and all-reduces its gradients: all_reduce= of zcomm.Options compresses these"
            )
