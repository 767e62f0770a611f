"""Exchanges of arrays, which zcomm.Communicator and zcomm.testing.LocalRank have in common."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Sequence
from typing import Any

import zcomm._core as _core
from zcomm._arrays import HOST, VALUE_DTYPES, Call, View, slots_of
from zcomm._core import CallStats


class Exchanges:
    """Calls that move values from rank to rank without sums.

    ``formats`` is one format, or those inside a node and between nodes. It is ``"exact"`` by default, because
    activations tolerate less than gradients. A value is encoded once; this rank's own ones are copied. Arrays that are
    read and written may not overlap. Both sides of a transfer need the same sizes, dtypes and formats.
    """

    def __init__(self, core: _core.Communicator, timeout: datetime.timedelta) -> None:
        self._core, self._timeout = core, timeout
        self.rank, self.size = core.rank, core.size

    def _call(self, stream: Any, *arrays: Any) -> Call:
        return Call(stream, *arrays, device=HOST)

    def all_to_all(
        self,
        array: Any,
        out: Any,
        *,
        splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        formats: str = "exact",
        stream: Any = None,
    ) -> CallStats:
        """Send a part of ``array`` to each rank, and fill ``out`` with the parts from all, both in rank order.
        ``splits`` are the elements for each rank, ``out_splits`` those from each, 0 included; None: equal parts."""
        call = self._call(stream, out, array)
        inputs = _parts_of(call.values(array, "array"), splits, self.size, "array", "splits")
        outputs = _parts_of(call.values(out, "out", writable=True), out_splits, self.size, "out", "out_splits")
        return self._run(self._core.make_all_to_all(inputs, outputs, formats), inputs, outputs, call)

    def gather(self, array: Any, out: Any, root: int, *, formats: str = "exact", stream: Any = None) -> CallStats:
        """Fill ``out`` on ``root``, size times the elements of ``array``, with every rank's array. Other ranks pass
        None as ``out``."""
        call = self._call(stream, *([out] if self.rank == root else []), array)
        part = call.values(array, "array")
        operation = self._core.make_gather(root, part.raw, formats)
        is_root = self.rank == root
        outputs = self._slots(call, out, "out", part, "array", writable=True) if is_root else self._none(part)
        return self._run(operation, self._at(root, part), outputs, call)

    def scatter(self, array: Any, out: Any, root: int, *, formats: str = "exact", stream: Any = None) -> CallStats:
        """Fill ``out`` with this rank's slot of the array of ``root``, which has size times the elements of ``out``.
        Other ranks pass None as ``array``."""
        call = self._call(stream, out, array if self.rank == root else out)
        part = call.values(out, "out", writable=True)
        operation = self._core.make_scatter(root, part.raw, formats)
        inputs = self._slots(call, array, "array", part, "out") if self.rank == root else self._none(part)
        return self._run(operation, inputs, self._at(root, part), call)

    def broadcast(self, array: Any, root: int, *, format: str = "exact", stream: Any = None) -> CallStats:
        """Replace ``array`` by that of ``root``: the same bits on every rank. A lossy format rounds the root's own
        array, too."""
        call = self._call(stream, array)
        values = call.values(array, "array", writable=True)
        operation = self._core.make_broadcast(root, values.raw, format)
        return self._run(operation, [], [values.raw], call)

    def send(self, array: Any, peer: int, *, formats: str = "exact", stream: Any = None) -> CallStats:
        """Send ``array`` to ``peer``, which calls recv() with as many elements. Messages between two ranks match in
        order."""
        self._check_peer(peer)
        call = self._call(stream, array)
        values = call.values(array, "array")
        operation = self._core.make_message(self.rank, peer, values.raw, formats)
        return self._run(operation, self._at(peer, values), self._none(values), call)

    def recv(self, out: Any, peer: int, *, formats: str = "exact", stream: Any = None) -> CallStats:
        """Fill ``out`` with the array that ``peer`` sends."""
        self._check_peer(peer)
        call = self._call(stream, out)
        values = call.values(out, "out", writable=True)
        operation = self._core.make_message(peer, self.rank, values.raw, formats)
        return self._run(operation, self._none(values), self._at(peer, values), call)

    def _run(self, operation: Any, inputs: list[Any], outputs: list[Any], call: Call, **options: Any) -> CallStats:
        return self._core.run(operation, inputs, outputs, self._timeout, call.stream, **options)

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"peer: expected 0 to {self.size - 1}, got {rank}")

    def _slots(
        self, call: Call, array: Any, name: str, part: View, part_name: str, writable: bool = False
    ) -> list[Any]:
        """Return the slots of an array for all ranks, each like ``part``."""
        whole = call.values(array, name, writable=writable)
        if whole.dtype != part.dtype:
            raise TypeError(f"{name}: expected dtype {part.dtype} as in {part_name}, got {whole.dtype}")
        if whole.num_elements != self.size * part.num_elements:
            raise ValueError(
                f"{name}: expected {self.size} times the {part.num_elements} elements of {part_name}, got "
                f"{whole.num_elements}"
            )
        return slots_of(whole, self.size, name)

    def _none(self, like: View) -> list[Any]:
        return [(0, 0, like.dtype)] * self.size

    def _at(self, rank: int, values: View) -> list[Any]:
        """The parts of all ranks, of which only that of ``rank`` is not empty."""
        parts = self._none(values)
        parts[rank] = values.raw
        return parts


def _parts_of(view: View, splits: Sequence[int] | None, size: int, name: str, splits_name: str) -> list[Any]:
    if splits is None:
        return slots_of(view, size, name)
    try:
        counts = [operator.index(count) for count in splits]  # of arrays, whose += would change them
    except TypeError:
        raise TypeError(f"{splits_name}: expected integers, got {list(splits)}") from None
    if len(counts) != size or min(counts) < 0 or sum(counts) != view.num_elements:
        raise ValueError(
            f"{splits_name}: expected {size} numbers of 0 or more with a sum of the {view.num_elements} elements of "
            f"{name}, got {counts}"
        )
    parts, address = [], view.address
    for count in counts:
        parts.append((address, count, view.dtype))
        address += count * VALUE_DTYPES[view.dtype]
    return parts
