"""How the modules of FSDP2 send their weights and gradients: one call for a model, further ones for parts of it."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

from zcomm._checks import check_types
from zcomm._formats import Format
from zcomm.distributed import _fsdp2
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.feedback import ErrorFeedback
from zcomm.fsdp.collectives import Collectives
from zcomm.fsdp.gather_call import GatherCall
from zcomm.fsdp.rule import ModuleStats, Rule
from zcomm.fsdp.secondary_shard import (
    DEFAULT_PERCENT,
    LosslessSecondaryShard,
    MemoryBudget,
    SecondaryShard,
    WeightsVersion,
)
from zcomm.fsdp.selection import Selector, one_dimensional, select

_log = logging.getLogger("zcomm")
_numbers = itertools.count()


def compress(
    model: nn.Module,
    *,
    weights: Literal["lossless"] | Format | None = None,
    gradients: Format | None = None,
    keep_in_node: bool = True,
    exempt: Sequence[Selector] = (one_dimensional,),
    max_bytes: int | None = None,
    error_feedback: ErrorFeedback | None = None,
    check: bool = True,
    fused: bool = True,
) -> Compression:
    """Set how every module in ``model`` that ``fully_shard`` was applied to, or will be, sends weights and gradients.

        zcomm.fsdp.compress(model, weights="lossless")
        zcomm.fsdp.compress(model.lm_head, weights="int8:256", gradients="exact")

    A later call replaces all settings of the modules that it reaches, and custom collectives: call it for the model,
    then for the parts that are to differ. All ranks make the same calls. What the options leave exact for other reasons
    than its format stays exact, and ``zcomm.exact()`` and ``zcomm.override()`` have the last word.

    Args:
        weights: a format such as ``"int8:256"``; None: that of the process group. ``"exact"``: as torch sends them.
            ``"lossless"``: exact, bit for bit, as lossless differences to what the nodes still have, of bfloat16 or
            float16. On a GPU the host waits for the GPU once per optimizer step, and CUDA graphs cannot capture that.
            Bytes, which tensor subclasses make of weights in 8 or 4 bits, are exact with every format. ``"lossless"``
            sends their differences; on a GPU the host waits once for each such module.
        gradients: formats intra-node, then inter-node, such as ``"int8:128/int4:128"``, or one for both; None: those of
            the process group.
        keep_in_node: keep secondary shards, so that weights cross nodes once per optimizer step: :class:`Compression`.
            ``"lossless"`` needs them. ``"exact"`` has none, nor have gathers of a ``reshard_after_forward`` mesh.
        exempt: parameters that are sent exactly, in the same messages. Default: those of less than two dimensions,
            norms and biases. ``()`` exempts none. Of a parameter that modules share any of its names counts.
        max_bytes: limit of a rank's secondary shards, the same on all ranks: :class:`Compression`. None: 5 % of a GPU's
            memory; no limit on CPUs and with ``"lossless"``.
        error_feedback: what a reduction drops is added to the next one of the same parameters.
        check: notice changes of weights that PyTorch does not count, or some ranks make: :class:`Compression`.
        fused: spare FSDP2's two largest buffers, and its copies into and out of them, with the same bits. Compressed
            reductions read the gradients themselves. Compressed gathers, and on CPUs lossless ones, are decoded into
            the parameters. :meth:`Compression.stats` counts both.

    Raises:
        TypeError: an argument has another type than those here.
        ValueError: a format is unknown; a pattern or type of ``exempt`` selects nothing; ``max_bytes`` is negative;
            ``"lossless"`` without ``keep_in_node``; modules of ``replicate()``, which gather no weights; at a gather,
            weights of float32 or float64 with ``"lossless"``; at the first forward pass, a process group without the
            backend "zcomm".
        RuntimeError: ``fully_shard`` was applied to no module by the first step of the model's optimizer; weights of a
            module have changed on some ranks only; a CUDA graph captures a gather with ``"lossless"``.
    """
    check_types(locals(), model=nn.Module, keep_in_node=bool, max_bytes=int | None, check=bool, fused=bool)
    check_types(locals(), error_feedback=ErrorFeedback | None)
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes: expected 0 or more, or None, got {max_bytes}")
    if weights == "lossless" and not keep_in_node:
        raise ValueError("keep_in_node: expected True with weights='lossless', which are differences to what is kept")
    check_formats(weights, gradients)
    select(model, exempt)
    rule = Rule(next(_numbers), weights, gradients, error_feedback, fused)
    return Compression(model, rule, keep_in_node, exempt, MemoryBudget(max_bytes, weights != "lossless"), check)


def _collectives_of(model: nn.Module) -> Iterator[Collectives]:
    """Replace the collectives of every parameter group in ``model``; yield them in the order of modules."""
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for param_group in _fsdp2.groups_of(module):
            owner = _fsdp2.owner_of(param_group) or Collectives(name, module, param_group)
            if len(name) >= len(owner.path):  # longer in a larger model
                owner.rename(name, module)
            yield owner


def check_formats(weights: str | None, gradients: str | None) -> None:
    """Raise ValueError or TypeError that names the argument if a format is unknown."""
    formats = {"all_gather": None if weights == "lossless" else weights, "reduce_scatter": gradients}
    try:
        _c10d.PolicyOverride(**{name: format for name, format in formats.items() if format is not None})
    except (TypeError, ValueError) as error:
        text = str(error).replace("all_gather: ", "weights: ", 1).replace("reduce_scatter: ", "gradients: ", 1)
        text = text.replace("weights: format: expected exact", "weights: format: expected lossless, exact", 1)
        raise type(error)(text) from None


class Compression:
    """Handle that :func:`compress` returns. It has the statistics, and disables compression.

    *Secondary shards.* The ranks of a node keep the weights that they have gathered among them: L ranks an L-th of the
    model each, as compressed bytes, or with ``weights="lossless"`` as values of 2 bytes. A gather of weights that have
    not changed since the last one moves no byte between nodes: in the backward pass, in further micro-batches, in
    generation and evaluation. In a group of one node there are none, but of ``"lossless"``: nothing crosses nodes.
    What is gathered as bytes is kept as it is, in groups of several nodes. It must repeat
    while the weights do, so a cast that rounds at random needs ``keep_in_node=False``.

    Modules whose shards would exceed ``max_bytes`` go without: they are gathered from all ranks again. After the first
    step a line in the log has the bytes, and how many modules go without. Warnings name them if ``max_bytes`` was set.
    Ranks with GPUs of different sizes must set it.

    *Changes of weights.* PyTorch counts steps of its optimizers, in-place operations and exchanged parameters. A hash
    of this rank's own shard finds all other writes: through ``param.data``, foreach operations, collectives, NumPy.
    Each gather reads the shard for it.

    On CPUs the ranks then agree: if the weights of one rank have changed, all gather across nodes. A write may reach
    the rows of some ranks only, as of a parameter with one element. The agreement is one small message to each node.
    After an optimizer's step there is none, as all ranks know of the step.

    With ``check=False`` there is neither. Then call ``invalidate()`` on all ranks after a write that PyTorch does not
    count, and after one that reaches the rows of some ranks only.

    On GPUs the host does not wait for the hash, and ranks do not agree. After a change that PyTorch does not count,
    gathers of the module give NaN on the node, and the next gather or step of a rank that has changed it raises. So
    call ``invalidate()`` on all ranks after such a change, and after one that reaches some ranks only. Replays of a
    CUDA graph that has an optimizer's step are such a change.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        keep_in_node: bool,
        exempt: Sequence[Selector],
        budget: MemoryBudget,
        check: bool,
    ) -> None:
        self._model = model
        self._rule = rule  # of every group, but for what is exempt
        self._keep_in_node, self._exempt, self._budget, self._checks = keep_in_node, exempt, budget, check
        self._rules: dict[Collectives, Rule] = {}  # each keeps this object
        self._warned_of_copy = self._has_told_bytes = False
        self._hook = model.register_forward_pre_hook(_ForwardHook(self))  # keeps this object until the rules do
        _WATCHING[rule.number] = self
        _watch()
        self._install()
        for group in list(_fsdp2.used_groups):
            self._tell_of_missed(_fsdp2.owner_of(group))

    def stats(self) -> dict[str, ModuleStats]:
        """By the name of the module, of those that no later call has other settings for, since they have these."""
        return {group.name: group.stats() for group in self._in_force()}

    def invalidate(self) -> None:
        """Gather across nodes next time: on all ranks, after a change that PyTorch does not count, and on GPUs after
        replays of a CUDA graph with an optimizer's step."""
        for group in self._rules:  # those with other settings by now, too
            if group.secondary is not None:
                group.secondary.outdate(forget_mark=True)

    def disable(self) -> None:
        """Sends as the process group has it, where no later call has other settings, and frees the secondary shards."""
        self._hook.remove()
        _WATCHING.pop(self._rule.number, None)
        for group, rule in self._rules.items():
            group.drop_rule(rule)
        self._rules = {}

    def __str__(self) -> str:
        rows = [
            f"{name}: weights {one.weights or 'as the group'}, gradients {one.gradients or 'as the group'}, "
            f"{one.exempt_elements} of {one.elements} elements as they are"
            for name, one in self.stats().items()
        ]
        return "\n".join(rows) or "no modules"

    def _tell_of_missed(self, group: Collectives | None) -> None:
        """Warn of parameters that are gathered with those of another module, so that these settings miss them."""
        if group is None or group in self._rules:
            return
        inside = set(map(id, self._model.modules()))
        missed = sum(any(module in inside for module, _ in _fsdp2.places_of(param)) for param in group.params)
        if missed:
            _log.warning(
                "zcomm.fsdp.compress: %d parameters of the %s have the settings of %s, with which they are gathered: "
                "expected a module to which fully_shard is applied", missed, type(self._model).__name__, group.name,
            )  # fmt: skip

    def _install(self) -> None:
        """Settings for the modules that ``fully_shard`` was applied to by now."""
        new = [group for group in _collectives_of(self._model) if group not in self._rules]
        if not new:
            return
        exempt = select(self._model, self._exempt)
        for group in new:
            flags = [not exempt.isdisjoint(_fsdp2.places_of(param)) for param in group.params]
            rule = self._rules[group] = replace(self._rule, exempt=flags, owner=self)
            group.set_rule(rule)
            if group.rule is rule:  # and not a later one
                group.secondary = self._secondary_of(group)
        sharded = {_fsdp2.parameter_id(param) for group in self._rules for param in group.params}
        if sharded.issuperset(map(id, self._model.parameters())):  # else modules are sharded later
            self._hook.remove()

    def _before_forward(self, module: nn.Module) -> None:
        if module is self._model:
            self._install()
            if self._rules:
                self._hook.remove()
        elif not self._warned_of_copy and any(group.rule is None for group in _collectives_of(module)):
            self._warned_of_copy = True
            _log.warning(
                "a copy of the %s that zcomm.fsdp.compress was called with has none of its settings: call it with the "
                "copy, too", type(module).__name__,
            )  # fmt: skip

    def _secondary_of(self, group: Collectives) -> SecondaryShard | None:
        given = group.params, group.notices, group.gathered, group.counted, self._budget, self._checks
        if self._rule.is_lossless:
            return LosslessSecondaryShard(*given, prepare=self._prepare)
        is_kept = self._keep_in_node and self._rule.weights != "exact"
        return SecondaryShard(*given) if is_kept else None

    def _in_force(self) -> list[Collectives]:
        """Those whose rules no later call has replaced."""
        return [group for group, rule in self._rules.items() if group.rule is rule]

    def _tell_bytes(self) -> None:
        """Log what this rank keeps, after the first step."""
        self._has_told_bytes = True
        kept = [s.memory for group in self._in_force() if (s := group.secondary) is not None and s.memory is not None]
        num_without = sum(one.gathers_beyond_limit > 0 for one in self.stats().values())
        if not kept and not num_without:
            return
        text = f"zcomm.fsdp.compress: this rank keeps {sum(each.numel() for each in kept)} bytes of {len(kept)} modules"
        if num_without:
            text += f"; {num_without} modules go without, and cross nodes in each gather: max_bytes= sets the limit"
            _log.warning("%s, by default %d %% of a GPU's memory", text, DEFAULT_PERCENT)
        else:
            _log.info("%s, for gathers inside the node", text)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Fused and foreach steps change sharded parameters without counting a version. Those without a gradient stay as
        # they are.
        params = [param for param_group in optimizer.param_groups for param in param_group["params"]]
        if not self._rules and not {id(param) for param in params}.isdisjoint(map(id, self._model.parameters())):
            raise RuntimeError(
                "zcomm.fsdp.compress: expected a model to whose modules fully_shard is applied before the first step "
                f"of its optimizer, got a {type(self._model).__name__} without any"
            )
        changed = {id(param) for param in params if param.requires_grad or param.grad is not None}
        for group in self._in_force():
            if group.secondary is not None:
                group.secondary.check_mark()
                if any(_fsdp2.parameter_id(param) in changed for param in group.params):
                    group.secondary.outdate()
        ours = (_fsdp2.parameter_id(param) for group in self._rules for param in group.params)
        if not self._has_told_bytes and not changed.isdisjoint(ours):
            self._tell_bytes()

    def _prepare(self, first: LosslessSecondaryShard, call: GatherCall, version: WeightsVersion) -> None:
        """Before ``first`` gathers by differences on a GPU: encodes those of all modules whose weights have changed, so
        that the host waits for the GPU once after a step, and not once for each module."""
        gathers = [first.to_prepare(call.shard, version)]
        for shard in (group.secondary for group in self._in_force()):
            if isinstance(shard, LosslessSecondaryShard) and shard is not first:
                gathers += shard.to_prepare_in(call.group.group_name)
        backend_of(call.group).prepare(gathers, async_op=call.async_op).wait()


# Weak, as what torch keeps must not keep the models.
_WATCHING: weakref.WeakValueDictionary[int, Compression] = weakref.WeakValueDictionary()


@functools.cache
def _watch() -> None:
    """Tell those of new groups and of steps."""

    def install(group: Any) -> None:
        for compression in list(_WATCHING.values()):
            if _fsdp2.owner_of(group) not in compression._rules:
                compression._install()
                compression._tell_of_missed(_fsdp2.owner_of(group))

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for compression in list(_WATCHING.values()):
            compression._after_step(optimizer)

    _fsdp2.before_first_use(install)
    register_optimizer_step_post_hook(after_step)


class _ForwardHook:
    """Keeps what it is made for. Its copy, in a copy of the model, does not: the original would live as long. A pickled
    one does nothing."""

    _compression: Callable[[], Compression | None] = staticmethod(lambda: None)

    def __init__(self, compression: Compression) -> None:
        self._kept = compression
        self._compression = weakref.ref(compression)

    def __call__(self, module: nn.Module, _: Any) -> None:
        if (compression := self._compression()) is not None:
            compression._before_forward(module)

    def __deepcopy__(self, memo: Any) -> _ForwardHook:
        copied = object.__new__(_ForwardHook)
        copied._compression = self._compression
        return copied

    def __getstate__(self) -> None:
        return None
