"""What all sites have in common: how they compare it, and what a site takes over that is behind."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import exact
from zcomm.outer.arguments import parameters_of
from zcomm.outer.errors import lost_ranks_named
from zcomm.outer.fragments import Fragment

_PIECE = 4 << 20  # bytes
_COMPARED = (  # between sites
    "number of inner steps",
    "arguments",
    "arguments of the outer optimizer",
    "state of the outer optimizer",
    "values after the last outer step",
)


def gather_numbers(numbers: list[int], group: Any) -> list[torch.Tensor]:
    """Return the numbers of all sites, as int64."""
    mine = torch.tensor(numbers)
    everybody = [torch.empty_like(mine) for _ in range(backend_of(group).size())]
    with lost_ranks_named("compared their outer steps"):
        dist.all_gather(everybody, mine, group=group)
    return everybody


def mark_of(value: Any) -> int:
    """Return a hash that is the same in all processes if ``value`` has the same bits."""
    return zlib.crc32(repr(_comparable(value)).encode())


def _comparable(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        data = value.detach().cpu().contiguous().flatten()
        if data.itemsize == 1:
            data = torch.nn.functional.pad(data.view(torch.uint8), (0, data.nbytes % 2))  # hashes are of whole halves
        return value.dtype, value.shape, _c10d.hash_of(data.view(torch.uint16)) if len(data) else 0
    if isinstance(value, dict):
        return sorted((repr(key), _comparable(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return [_comparable(each) for each in value]
    # Reprs of other objects may tell their addresses.
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def compare(
    fragments: list[Fragment], optimizer: torch.optim.Optimizer, inner_steps: int, settings: Any, group: Any
) -> None:
    """Raise ValueError at all sites unless they agree on steps, arguments, the outer optimizer and values."""
    state = [optimizer.state.get(parameter, {}) for parameter in parameters_of(optimizer)]
    values = [fragment.values for fragment in fragments]
    marks = [mark_of(each) for each in (settings, _arguments(optimizer), state, values)]
    everybody = gather_numbers([inner_steps, *marks], group)
    for site, other in enumerate(everybody):
        for what, same in zip(_COMPARED, other == everybody[0], strict=True):
            if not same:
                raise ValueError(f"outer step: expected all sites to have the same {what}, got others at site {site}")


@dataclass(frozen=True)
class Furthest:
    """The site that is furthest: the most outer steps, then the most inner steps, then the lowest rank.

    ``pending``: its fragments under way, in order. ``trained``: by fragment, the number of sites that have trained
    since its last outer step, and since they took over its values.
    """

    inner_steps: int
    pending: list[int]
    trained: list[int]


def take_over(
    fragments: list[Fragment], optimizer: torch.optim.Optimizer, inner_steps: int, pending: list[int], group: Any
) -> Furthest:
    """Give all sites of ``group`` the values, and the arguments and state of the outer optimizer, of the furthest one.

    What differs anywhere goes to all, exactly: fragment by fragment. Raises torch's DistBackendError if a site is lost
    meanwhile."""
    rank, number = backend_of(group).rank(), len(fragments)
    steps = [fragment.stepped_at for fragment in fragments]
    idle = [max(fragment.stepped_at, fragment.taken_at) for fragment in fragments]
    places = [pending.index(each) + 1 if each in pending else 0 for each in range(number)]
    marks = [mark_of(_arguments(optimizer)), *(mark_of(_held(fragment, optimizer)) for fragment in fragments)]
    everybody = torch.stack(gather_numbers([sum(steps), inner_steps, *steps, *places, *idle, *marks], group))
    source = max(range(len(everybody)), key=lambda site: (*everybody[site][:2].tolist(), -site))
    _, inner_steps, *of_source = everybody[source][: 2 + 2 * number].tolist()
    same = everybody[:, -number - 1 :] == everybody[source][-number - 1 :]
    trained = same[:, 1:] & (everybody[:, 1:2] > everybody[:, 2 + 2 * number : 2 + 3 * number])
    arguments = None if same[:, 0].all() else _give(_arguments(optimizer), source, bool(same[rank, 0]), group)
    given: list[Any] = [
        None if has_it.all() else _give(_held(fragment, optimizer), source, bool(has_it[rank]), group)
        for fragment, has_it in zip(fragments, same[:, 1:].T, strict=True)
    ]
    # Only now: if the source is lost before, nobody has a part of what it has.
    if arguments is not None and not same[rank, 0]:
        for chosen, theirs in zip(optimizer.param_groups, arguments, strict=True):
            for name in [name for name in chosen if name != "params"]:
                del chosen[name]
            chosen.update(theirs)
    for each, fragment in enumerate(fragments):
        if given[each] is not None and not same[rank, 1 + each]:
            _take(fragment, optimizer, *given[each])
        fragment.stepped_at = of_source[each]
        if not trained[rank, each]:
            fragment.taken_at = inner_steps
    order = sorted((place, each) for each, place in enumerate(of_source[number:]) if place)
    return Furthest(inner_steps, [each for _, each in order], trained.sum(0).tolist())


class Comparison:
    """Of the values of a fragment, among all sites, while its mean is under way."""

    def __init__(self, values: torch.Tensor, group: Any) -> None:
        # As long as what compare() sends: Gloo ends a process whose peer makes an exact call of another size.
        mine = torch.tensor([mark_of(values)] * len(_COMPARED))
        self._all = [torch.empty_like(mine) for _ in range(backend_of(group).size())]
        with lost_ranks_named("compared values"):
            self._work = dist.all_gather(self._all, mine, group=group, async_op=True)

    def check(self) -> None:
        """Raise torch's DistBackendError if sites differ."""
        with lost_ranks_named("compared values"):
            self._work.wait()
        for site, mark in enumerate(self._all):
            if not mark.equal(self._all[0]):
                raise dist.DistBackendError(f"sites have parted: site {site} has other values than site 0")


def _arguments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _held(fragment: Fragment, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, list[Any]]:
    return fragment.values, [optimizer.state.get(parameter, {}) for parameter in fragment.parameters]


def _take(fragment: Fragment, optimizer: torch.optim.Optimizer, values: torch.Tensor, states: list[Any]) -> None:
    fragment.values = values
    fragment.write(values)
    for parameter, state in zip(fragment.parameters, states, strict=True):
        optimizer.state[parameter] = state


def _give(held: Any, source: int, has_it: bool, group: Any) -> Any:
    """Return what ``source`` holds: ``held`` where it is the same. Sends pieces, each of which has the timeout."""
    buffer = io.BytesIO()
    if backend_of(group).rank() == source:
        torch.save(held, buffer)
    size = torch.tensor([buffer.tell()])
    with exact(), lost_ranks_named("took over values"):
        dist.broadcast(size, group_src=source, group=group)
        data = torch.empty(int(size), dtype=torch.uint8)
        if buffer.tell():
            data.copy_(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
        for piece in torch.split(data, _PIECE):
            dist.broadcast(piece, group_src=source, group=group)
    return held if has_it else torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=True)
