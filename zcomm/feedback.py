"""Error feedback: the error of a lossy reduction is added to the next reduction of the same tensor."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zcomm._core as _core

_log = logging.getLogger("zcomm")


@dataclass
class _Residual:
    data: Any  # an array of uint8
    layout: str  # layout of its reduction
    calls: int = 0  # since it was last empty
    in_graph: bool = False  # replays use it, so it stays where it is
    is_loaded: bool = False  # and was not used since

    def check(self, key: str, layout: str, num_bytes: int) -> None:
        """Raise ValueError if this loaded residual is not of such a reduction."""
        if self.layout != layout or self.data.nbytes != num_bytes:
            raise ValueError(
                f"error feedback: the state that was loaded for {key!r} is of {self.layout}, {self.data.nbytes} bytes, "
                f"this reduction is {layout}, {num_bytes} bytes: reset() starts over"
            )


class ErrorFeedback:
    """Residuals of one model on this rank, for :func:`zcomm.fsdp.compress` and :class:`zcomm.ddp.CompressState`.

    A residual covers the values that this rank encodes for other nodes. With L ranks per node these are its sums over
    the node, an L-th of the gradients; otherwise its own gradients. In a single node it covers all values that the rank
    sends. Exact parts have no residual. (Karimireddy et al., https://arxiv.org/abs/1901.09847; with compressed
    residuals LoCo, https://arxiv.org/abs/2407.04480.)

    Each set of parameters that is reduced together has a residual of its own, which waits while others train.

    A residual fits gradients of one scale. Call ``reset()`` after a change of a gradient scaler's factor or of the
    learning rate's order of magnitude. A block that was not finite starts over.

    A CUDA graph may capture a reduction that was called before. Its replays see a ``reset()`` and a loaded state.

    Args:
        format: format of the residuals: ``"int8:B"``, another lossy one, or ``"bf16"``.
        decay: factor of the residual in each call, 0 to 1.
    """

    def __init__(self, format: str = "int8:128", *, decay: float = 1.0) -> None:
        if not isinstance(format, str) or format == "exact" or ":stochastic" in format:
            raise ValueError(f"format: expected a lossy one that rounds to nearest, got {format!r}")
        self.block_format = _core.BlockFormat(format)  # raises on an unknown one
        if not (isinstance(decay, int | float) and 0 <= decay <= 1):
            raise ValueError(f"decay: expected 0 to 1, got {decay!r}")
        self.format = format
        self.decay = decay
        self._residuals: dict[str, _Residual] = {}
        self._loaded: dict[str, _Residual] = {}
        self._has_told = False  # of a reduction that is not among those loaded
        self._owners: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def memory_bytes(self) -> int:
        """Return the bytes of all residuals on this rank."""
        return sum(self.residual_bytes().values())

    def residual_bytes(self) -> dict[str, int]:
        """Return the bytes of each module's or bucket's residual."""
        return {key: residual.data.nbytes for key, residual in self._residuals.items()}

    def reset(self) -> None:
        """Forget all residuals, on all ranks, and free those that no CUDA graph uses."""
        self._loaded.clear()
        self._start_over(lambda key: True)

    def _start_over(self, selected: Callable[[str], bool]) -> None:
        for key in filter(selected, list(self._residuals)):
            residual = self._residuals[key]
            if residual.in_graph:
                residual.data[:] = 0  # the wire of zeros, in every format
                residual.calls = 0
            else:
                del self._residuals[key]

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, for a file per rank. With them a run of FSDP2 resumes bit for bit on the same
        ranks and nodes."""
        residuals = {**self._loaded, **self._residuals}
        return {
            "format": self.format,
            "count": len(residuals),
            "residuals": {
                key: {"data": _copy(one.data), "layout": one.layout, "calls": one.calls}
                for key, one in residuals.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the ``state_dict`` of the same rank.

        Raises TypeError if this is no dict. Raises ValueError if it is not of this class, if the format differs, or if
        residuals are missing: torch.distributed.checkpoint loads only what an object has already. Then the residuals
        stay as they were. The next reduction raises ValueError if the state is another rank's, or
        if its layout differs: other nodes, another model, other formats. For a reduction in a CUDA graph this call
        does. A warning names a reduction that is not in the state, such as that of a renamed module.
        """
        if not isinstance(state, dict):
            raise TypeError(f"state: expected dict, got {type(state).__name__}")
        residuals = state.get("residuals")
        if not isinstance(residuals, dict):
            raise ValueError(
                f"state: expected one of ErrorFeedback, got a dict of {', '.join(map(repr, state)) or '{}'}"
            )
        if (format := state.get("format")) != self.format:
            raise ValueError(f"state: expected residuals in {self.format!r}, got {format!r}")
        found = len(residuals)
        if (count := state.get("count", found)) != found:
            raise ValueError(
                f"state: expected its {count} residuals, got {found}, as torch.distributed.checkpoint loads only "
                "what is there already: save a file per rank by torch.save"
            )
        loaded = {key: _read(key, one) for key, one in residuals.items()}
        for key, residual in self._residuals.items():
            if residual.in_graph and key in loaded:
                loaded[key].check(key, residual.layout, residual.data.nbytes)
        self.reset()
        self._has_told = False
        self._loaded = loaded
        for key, residual in self._residuals.items():  # in graphs
            if (one := loaded.pop(key, None)) is not None:
                residual.data[:], residual.calls, residual.is_loaded = one.data, one.calls, True

    def claim(self, owner: object, name: str) -> str:
        """Return a unique key for the residuals of ``owner``: its name, numbered if another owner has the same. An
        owner keeps its key.

        The residuals of an owner of this key that is gone are forgotten."""
        for key, holder in self._owners.items():
            if holder is owner:
                return key
        key, number = name, 2
        while key in self._owners:
            key, number = f"{name}#{number}", number + 1
        self._owners[key] = owner
        self.forget(key)
        return key

    def forget(self, key: str, keeps_loaded: bool = True) -> None:
        """Forget the residuals of an owner; those that were loaded and not used since only if it keeps none."""
        owned = (f"{key}/", f"{key}:", f"{key},")
        self._start_over(lambda used: used.startswith(owned) and not (keeps_loaded and self._residuals[used].is_loaded))
        if not keeps_loaded:
            self._loaded = {used: one for used, one in self._loaded.items() if not used.startswith(owned)}

    def has(self, key: str) -> bool:
        """Tell whether there is a residual, in use or loaded."""
        return key in self._residuals or key in self._loaded

    def use(
        self, key: str, layout: str, num_bytes: int, allocate: Callable[[int], Any], is_captured: bool = False
    ) -> tuple[Any, bool]:
        """Return the residual for one reduction, and whether it is empty. ``allocate(num_bytes)`` makes a new one.

        ``is_captured``: a CUDA graph captures the reduction. Raises RuntimeError if its replays would never use what
        they keep."""
        if (loaded := self._loaded.get(key)) is not None:
            loaded.check(key, layout, num_bytes)
            fresh = allocate(num_bytes)
            fresh[:] = loaded.data  # moves it to the gradients' device
            self._residuals[key] = _Residual(fresh, layout, loaded.calls)
            del self._loaded[key]
        elif key not in self._residuals and (other := self._loaded_of_another_rank(key)) is not None:
            raise ValueError(
                f"error feedback: the state that was loaded is of {other!r}, this reduction is of {key!r}: each rank "
                "loads its own; reset() starts over"
            )
        elif key not in self._residuals and self._loaded and not self._has_told:
            self._has_told = True
            _log.warning("error feedback: nothing was loaded for %r; not used yet: %s", key, ", ".join(self._loaded))
        residual = self._residuals.get(key)
        if residual is None or residual.layout != layout or residual.data.nbytes != num_bytes:
            residual = self._residuals[key] = _Residual(allocate(num_bytes), layout)
        empty = residual.calls == 0
        if is_captured:
            if empty:
                raise RuntimeError(
                    f"error feedback: expected a call of {key!r} before a CUDA graph captures it, got none"
                )
            residual.in_graph = True
        residual.calls += 1
        residual.is_loaded = False
        return residual.data, empty

    def _loaded_of_another_rank(self, key: str) -> str | None:
        """Return the key of another rank's residual of the same reduction, if any was loaded."""
        of_any_rank = re.sub(r"/rank \d+", "/rank N", key)
        return next((other for other in self._loaded if re.sub(r"/rank \d+", "/rank N", other) == of_any_rank), None)


def _read(key: str, one: Any) -> _Residual:
    """Return a copy of a residual of a state. Raises ValueError if it is none."""
    data, layout, calls = (one.get(name) if isinstance(one, dict) else None for name in ("data", "layout", "calls"))
    is_bytes = str(getattr(data, "dtype", "")).endswith("uint8") and getattr(data, "ndim", 0) == 1
    if not (is_bytes and isinstance(layout, str) and isinstance(calls, int) and calls >= 0):
        raise ValueError(f"state: expected bytes, a layout and a number of calls for {key!r}, got something else")
    return _Residual(_copy(data), layout, calls)


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()
