"""Hooks: functions that see every call of the process groups, as those of torchcomms do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from zcomm.distributed.binding import _c10d

_log = logging.getLogger("zcomm")
_lock = threading.Lock()  # guards writes of the next one
_registered: tuple[Hook, ...] = ()


class Hook:
    """What :func:`register_hook` returns."""

    def __init__(self, group: str | None, functions: dict[str, Callable[..., object] | None]) -> None:
        self._group, self._functions = group, functions

    def remove(self) -> None:
        """Stop calling the functions. A second call does nothing."""
        _register(lambda hooks: tuple(hook for hook in hooks if hook is not self))

    def _call(self, phase: str, call: _c10d.HookedCall, detail: Any) -> None:
        function = self._functions[phase]
        if function is None or self._group not in (None, call.group):
            return
        if phase == "pre":
            function(call)
        elif phase == "post":
            function(call, detail)
        else:
            function(call.group, detail)


def register_hook(
    *,
    pre: Callable[[_c10d.HookedCall], object] | None = None,
    post: Callable[[_c10d.HookedCall, dist.Work | None], object] | None = None,
    abort: Callable[[str, str], object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Hook:
    """Call functions before and after each collective and message of this process, compressed or exact.

    Args:
        pre: called as ``pre(call)`` on the calling thread, before a byte moves. What it raises, the collective raises.
        post: called as ``post(call, work)`` on the calling thread, when the call has been launched. ``work`` is None
            for a synchronous call of NCCL. What it raises, the collective raises, although the call goes on.
        abort: called as ``abort(group, error)`` with a group's name, when its first compressed call fails or the group
            is aborted, on the thread that finds the error. What it raises is printed. An exact call that fails raises
            torch's own error, and does not call it.
        group: the process group whose calls are seen; by default those of all groups.

    ``call`` has these attributes. ``group``: the group's name. ``collective``: "_all_gather_base", "send" and the like.
    ``verdict``: "compressed", or why the call is exact. ``inputs``, ``outputs``: the caller's tensors. ``begun``: the
    ``time.perf_counter()`` at which it began. A compressed call also has ``description``, its shape and formats;
    ``site``, the name that the caller gave it; and ``intra_node_bytes`` and ``inter_node_bytes``, which this rank
    sends, None if they depend on the values. On a GPU, kernels that ``pre`` launches on the current stream run before
    the call.

    Hooks call no collectives: other ranks may not be in theirs. ``monitored_barrier()`` and calls that zcomm makes for
    its own decisions (``zcomm.stats().rehearsals``) are not seen.
    Without hooks a call costs nothing measurable; with one, Python's lock is taken twice per call.

    >>> def check_for_nan(call):
    ...     for tensor in call.inputs:
    ...         if tensor.is_floating_point() and tensor.isnan().any():
    ...             raise FloatingPointError(f"{call.collective} of {call.site or 'a tensor'} sends NaN")
    >>> hook = zcomm.register_hook(pre=check_for_nan)
    >>> hook.remove()
    """
    if pre is None and post is None and abort is None:
        raise ValueError("pre, post, abort: expected at least one function, got none")
    for name, function in (("pre", pre), ("post", post), ("abort", abort)):
        if function is not None and not callable(function):
            raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
    hook = Hook(None if group is None else group.group_name, {"pre": pre, "post": post, "abort": abort})
    _register(lambda hooks: (*hooks, hook))
    return hook


def _register(change: Callable[[tuple[Hook, ...]], tuple[Hook, ...]]) -> None:
    global _registered
    with _lock:
        _registered = change(_registered)
        _c10d.set_call_hook(_dispatch if _registered else None)


def _dispatch(phase: str, call: _c10d.HookedCall, detail: Any) -> None:
    for hook in _registered:
        hook._call(phase, call, detail)


def log_calls() -> None:
    """Log a line for each call: ``ZCOMM_LOG=debug``."""
    register_hook(post=_log_when_done, abort=lambda group, error: _log.debug("group '%s' failed: %s", group, error))


def _log_when_done(call: _c10d.HookedCall, work: dist.Work | None) -> None:
    """Log the call when it is done; on a GPU, and for a work that has no future, when it is launched."""
    begun, line = call.begun, _line_of(call)  # without the tensors, which would live longer

    def log(done: torch.futures.Future[object]) -> None:
        milliseconds = 1e3 * (perf_counter() - begun)
        try:
            done.value()
        except Exception as error:
            _log.debug("%s, failed after %.2f ms: %s", line, milliseconds, error)
        else:
            _log.debug("%s, %.2f ms", line, milliseconds)

    if work is None or any(not tensor.is_cpu for tensor in (*call.inputs, *call.outputs)):
        _log.debug("%s, launched in %.2f ms", line, 1e3 * (perf_counter() - begun))
        return
    try:
        work.get_future().add_done_callback(log)
    except RuntimeError:  # a receive from any source
        _log.debug("%s, launched", line)


def _line_of(call: _c10d.HookedCall) -> str:
    tensors = call.inputs or call.outputs
    what = call.description or f"{sum(tensor.numel() for tensor in tensors)} {tensors[0].dtype}" if tensors else ""
    sent = ""
    if call.inter_node_bytes is not None:
        sent = f", sends {call.intra_node_bytes} bytes in the node and {call.inter_node_bytes} to others"
    verdict = call.verdict if call.verdict == "compressed" else f"exact ({call.verdict})"
    site = f" for {call.site}" if call.site else ""
    return f"group '{call.group}' {call.collective}{site}: {verdict} {what}{sent}".rstrip()
