"""Formats for each module and parameter of FSDP2."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from zcomm._renamed import NODE_BYTES, renamed
from zcomm.distributed.binding import _c10d
from zcomm.feedback import ErrorFeedback
from zcomm.fsdp import _fsdp2
from zcomm.fsdp.collectives import Collectives, Rule, collectives_of

#: Which parameters: a pattern for their names (``"*.norm.*"``, as in fnmatch), a type of module that holds them, or a
#: function of a name and a parameter, whose shape is that of the whole parameter.
Selector: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Parameter], bool]"


_OLD_SUFFIX = ":difference"  # of all_gather, in place of difference=True; until the next release


def one_dimensional(name: str, parameter: nn.Parameter) -> bool:
    """Norms and biases: few elements, to which a model is sensitive."""
    is_vector: bool = parameter.ndim < 2
    return is_vector


def smaller_than(num_elements: int) -> Callable[[str, nn.Parameter], bool]:
    """Parameters of less than so many elements."""
    return lambda name, parameter: parameter.numel() < num_elements


@renamed({f"{call}_{old}": f"{call}_{new}" for call in ("gathered", "reduced") for old, new in NODE_BYTES.items()})
@dataclass
class ModuleTraffic:
    """The formats of one module of FSDP, and what this rank has sent for it."""

    all_gather: str  #: the format; "" is the process group's
    reduce_scatter: str
    difference: bool  #: the weights are sent as the change since the last gather
    elements: int  #: of all its parameters
    exempt_elements: int  #: of them, those that are sent exactly
    gathers: int = 0
    gathered_intra_node_bytes: int = 0  #: sent to ranks of the same node
    gathered_inter_node_bytes: int = 0  #: sent to other nodes
    reduces: int = 0
    reduced_intra_node_bytes: int = 0
    reduced_inter_node_bytes: int = 0
    resident_bytes: int = 0  #: kept for ``difference``


def compress(
    model: nn.Module,
    *,
    all_gather: str | None = None,
    reduce_scatter: str | None = None,
    difference: bool = False,
    exempt: Sequence[Selector] = (one_dimensional,),
    error_feedback: ErrorFeedback | None = None,
) -> Compression:
    """Set the formats of every module in ``model`` that ``fully_shard`` was applied to.

    Each parameter of a module becomes a part of the module's messages with blocks of its own. Exempt ones are sent
    exactly in the same messages: norms and biases are few elements, and a model is sensitive to them. A later call
    replaces the formats of the modules that it reaches: call it for the model, then for the parts that are to differ.

    Calls that the options leave exact for another reason (``min_bytes``, other dtypes) stay exact, and
    ``zcomm.exact()`` and ``zcomm.override()`` have the last word. All ranks must make the same calls.

    Args:
        all_gather: format of the weights, such as ``"int8:256"``; default: that of the process group.
        reduce_scatter: formats of the gradients, intra-node, then inter-node, such as ``"int8:128/int4:128"``;
            default: those of the process group.
        difference: the weights are sent as the change since the last gather, in the format of ``all_gather``, and each
            rank keeps the gathered weights whole: for modules that do not reshard after the forward pass. The first
            gather is exact.
        exempt: parameters that are sent exactly; default: those of less than two dimensions. ``()`` exempts none. Of
            a parameter that several modules share any of its names counts.
        error_feedback: what a reduction drops is added to the next one of the same parameters.

    Raises:
        ValueError: a format is unknown; no module of ``model`` is sharded by FSDP2; a pattern or type selects nothing;
            ``difference`` for a module with a secondary shard, or with an integer for ``reshard_after_forward``.
        ValueError: at the first forward pass, if a module's process group was not made with the backend "zcomm".
    """
    if all_gather is not None and all_gather.endswith(_OLD_SUFFIX):
        warnings.warn(
            f"all_gather={all_gather!r}: '{_OLD_SUFFIX}' is deprecated, pass difference=True", DeprecationWarning, 2
        )
        all_gather, difference = all_gather.removesuffix(_OLD_SUFFIX), True
    fields = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}
    _c10d.PolicyOverride(**{name: value for name, value in fields.items() if value is not None})  # checks them
    if isinstance(exempt, str) or not isinstance(exempt, Sequence):
        raise ValueError(f"exempt: expected a sequence of patterns, types of modules, or functions, got {exempt!r}")
    selected = _select(model, exempt)
    groups = list(collectives_of(model))
    if not groups:
        raise ValueError("model: fully_shard was applied to no module of it that has parameters")
    rules = {}
    for group in groups:
        flags = [not selected.isdisjoint(_fsdp2.places_of(param)) for param in group.params]
        rules[group] = Rule(all_gather, reduce_scatter, difference, flags, error_feedback)
        if difference:
            group.check_difference()
    for group, rule in rules.items():
        group.set_rule(rule)
    return Compression(rules)


class Compression:
    """What :func:`compress` returns: it takes the formats back, and counts."""

    def __init__(self, rules: dict[Collectives, Rule]) -> None:
        self._rules = rules

    def disable(self) -> None:
        """Formats as those of the process group, where no later call has set others."""
        for group, rule in self._rules.items():
            group.drop_rule(rule)
        self._rules = {}

    def stats(self) -> dict[str, ModuleTraffic]:
        """By the name of the module, since it has its formats. Bytes are counted when a call is done."""
        return {group.name: _traffic(group, rule) for group, rule in self._rules.items()}

    def __str__(self) -> str:
        rows = [
            f"{name}: all_gather {one.all_gather or 'as the group'}{', difference' * one.difference}, reduce_scatter "
            f"{one.reduce_scatter or 'as the group'}, {one.exempt_elements} of {one.elements} elements as they are"
            for name, one in self.stats().items()
        ]
        return "\n".join(rows) or "disabled"


def _traffic(group: Collectives, rule: Rule) -> ModuleTraffic:
    numels = [_fsdp2.num_elements(param) for param in group.params]
    return ModuleTraffic(
        all_gather=rule.all_gather or "",
        reduce_scatter=rule.reduce_scatter or "",
        difference=rule.difference,
        elements=sum(numels),
        exempt_elements=sum(numel for numel, exempt in zip(numels, rule.exempt, strict=True) if exempt),
        gathers=group.gathered.calls,
        gathered_intra_node_bytes=group.gathered.intra_node_bytes,
        gathered_inter_node_bytes=group.gathered.inter_node_bytes,
        reduces=group.reduced.calls,
        reduced_intra_node_bytes=group.reduced.intra_node_bytes,
        reduced_inter_node_bytes=group.reduced.inter_node_bytes,
        resident_bytes=group.resident_bytes(),
    )


def _select(model: nn.Module, selectors: Sequence[Selector]) -> set[tuple[int, str]]:
    """The parameters, each as the identity of its module and its name there: FSDP2 exchanges the objects."""
    selected = set()
    modules = dict(model.named_modules())
    for selector in selectors:
        found = False
        for module_name, module in modules.items():
            for name, parameter in module.named_parameters(recurse=False):
                full_name = f"{module_name}.{name}" if module_name else name
                if _selects(selector, full_name, parameter, modules):
                    found = True
                    selected.add((id(module), name))
        if not found and not _is_function(selector):
            raise ValueError(f"exempt: {selector!r} selects no parameter of the model")
    return selected


def _is_function(selector: Any) -> bool:
    return callable(selector) and not isinstance(selector, type)


def _selects(selector: Selector, name: str, parameter: nn.Parameter, modules: dict[str, nn.Module]) -> bool:
    if isinstance(selector, str):
        return fnmatch.fnmatchcase(name, selector)
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        parts = name.split(".")[:-1]
        return any(isinstance(modules[".".join(parts[:depth])], selector) for depth in range(len(parts) + 1))
    if _is_function(selector):
        return bool(selector(name, parameter))  # type: ignore[call-arg,unused-ignore]
    raise ValueError(f"exempt: expected a pattern, a type of module, or a function, got {selector!r}")
