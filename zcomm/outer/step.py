"""OuterStep: when each fragment is reduced, gathered and stepped, and whether sites agree."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zcomm._core as _core
from zcomm._checks import check_types
from zcomm._units import parse_rate
from zcomm.distributed._fsdp2 import find_groups
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.feedback import ErrorFeedback
from zcomm.outer.averaging import Averaging, set_connections
from zcomm.outer.errors import lost_ranks_named
from zcomm.outer.fragments import Fragment, cut, like

_COMPARED = (  # between sites
    "number of inner steps",
    "arguments",
    "arguments of the outer optimizer",
    "state of the outer optimizer",
    "values after the last outer step",
)


@dataclass
class OuterStats:
    """What an OuterStep has done on this rank: ``inner_steps`` of the training, the rest since it was made.

    ``reductions`` of fragments, evaluations included, have sent ``sent_bytes`` from this rank; all-reduces in float32
    would have sent ``exact_bytes``. ``in_flight``: fragments under way. It has waited ``limit_seconds`` for
    ``max_rate``, and ``wait_seconds`` for transfers. On a GPU the host does not wait for these.
    """

    inner_steps: int
    reductions: int
    sent_bytes: int
    exact_bytes: int
    in_flight: int
    limit_seconds: float
    wait_seconds: float


class OuterStep:
    """Averages pseudo-gradients over sites, and steps ``optimizer`` with their mean: call step() after each inner step.

    All sites begin with the same parameters, and call everything here after the same inner steps. The values after an
    outer step have the same bits at all sites. A site is one rank; or several, with parameters that FSDP2 shards in
    the site: then ``group`` is this rank's group along the mesh dimension of the sites.

    The first step() and each averaged() and synchronize() raise ValueError at all sites if their arguments, outer
    optimizers or values differ. If the model is sharded in the sites, only the ranks of a part that differs raise it.
    Buffers are not compared. Sites that part in between learn it at the next averaged() or synchronize(). A
    ``zcomm.exact()`` around step() does not stop the compression.

    Args:
        optimizer: the outer optimizer, over the parameters to synchronize: float32, on one device, with the values to
            begin with. It steps them in place, at once with the inner one's changes. It may get no others later.
            Checkpoint it like the inner one.
        every: inner steps from one outer step of a parameter to its next.
        fragments: parts of about equal size, in the order of the parameters. They take turns: one begins every
            ``every / fragments`` inner steps.
        delay: inner steps from the beginning of a fragment's reduction to its outer step, less than ``every``. Sums
            travel during the first half of them, means during the second (https://arxiv.org/abs/2501.18512).
        keep: share of the site's own parameters that is mixed into the values after an outer step, 0 to 1. What a
            site learned during ``delay`` is lost with 0.
        format: of the pseudo-gradients and of their mean, one that rounds to nearest, or ``"exact"``.
        error_feedback: adds what a reduction has lost to the next one of the fragment. True: in int8.
        connections: TCP connections each way between two sites, 1 to 64, for CPU tensors. They are made at the group's
            first compressed call. None: those that the group has by then, else 8.
        max_rate: ``"40mbit"``, bytes per second that this rank sends on average. step() waits before it begins a
            fragment as long as those before it would take at this rate. A transfer itself is as fast as the link.
        group: the ranks that hold the same part of the parameters, one of each site, with the backend "zcomm"; by
            default the world. Its timeout must exceed the time that sites are apart.

    Raises ValueError or TypeError if an argument is none of these or the group has another backend, and RuntimeError if
    something around the call keeps it exact. step() raises torch's DistBackendError if a site does not come in time;
    then the group has failed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 100,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
        format: str = "int4:64",
        error_feedback: bool | ErrorFeedback = True,
        connections: int | None = None,
        max_rate: str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_types(locals(), optimizer=torch.optim.Optimizer, every=int, fragments=int, delay=int, keep=int | float)
        check_types(locals(), format=str, error_feedback=bool | ErrorFeedback)
        check_types(locals(), max_rate=str | None, connections=int | None)
        parameters = _parameters_of(optimizer)
        _check_parameters(parameters)
        _check_numbers(every, fragments, delay, keep, len(parameters), connections)
        if ":stochastic" in format or "/" in format:
            raise ValueError(f"format: expected one format that rounds to nearest, got {format!r}")
        _core.BlockFormat(format)  # raises on an unknown one
        self._rate = _rate_of(max_rate) if max_rate is not None else None
        find_groups()
        self._optimizer, self._group = optimizer, group
        self._every, self._delay, self._keep = every, delay, keep
        self._inner_steps = 0
        self._limit_seconds = 0.0
        self._free_at = 0.0  # when the fragments that began so far have had their time at the rate
        self._compared = self._is_averaged = False  # the latter within averaged()
        backend = backend_of(group)
        set_connections(backend, connections)
        if error_feedback is True:
            error_feedback = ErrorFeedback()
        self._feedback = error_feedback if isinstance(error_feedback, ErrorFeedback) and format != "exact" else None
        name = self._feedback.claim(self, "outer step") if self._feedback is not None else ""
        self._fragments = []
        for number, part in enumerate(cut(parameters, fragments)):
            fragment = Fragment(part, (number + 1) * every // fragments)
            key = f"{name}: fragment {number} of {fragments}/rank {backend.rank()}"
            shape = len(fragment.values), fragment.values.device, format
            fragment.averaging = Averaging(*shape, self._feedback, key, group)
            fragment.evaluation = Averaging(*shape, None, key, group)
            self._fragments.append(fragment)
        self._num_parameters = len(parameters)
        self._in_flight: list[Fragment] = []  # in the order in which they began
        # What must be the same in a run that goes on, and at all sites.
        self._settings: dict[str, Any] = {
            "every": every, "fragments": fragments, "delay": delay, "keep": keep, "format": format,
            "error_feedback": self._feedback is not None, "sites": dist.get_world_size(group),
            "elements": [len(fragment.values) for fragment in self._fragments],  # on this rank and its likes
        }  # fmt: skip

    def step(self) -> None:
        """Count an inner step. Begin, continue and end what is due; waits only for what ``delay`` has not hidden."""
        self._check()
        self._inner_steps += 1
        self._advance()
        for fragment in self._fragments:
            steps = self._inner_steps - fragment.offset
            if steps >= 0 and steps % self._every == 0:
                self._begin(fragment, self._delay)
        self._advance()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within ``with outer.averaged():`` the parameters are the mean of all sites', for an evaluation.

        They have the same bits at all sites. At the end each site gets its own back. So the training goes on bit for
        bit as without the evaluation, and what changes parameters within is lost. All sites call this after the same
        inner step. It sends as much as an outer step of all fragments, in the same format, without error feedback. It
        keeps 4 bytes per parameter meanwhile. Raises ValueError at all sites if they differ. Within it, all methods of
        the OuterStep but stats() raise RuntimeError."""
        self._compared = False
        self._check()
        for fragment in self._fragments:
            self._reduce(fragment, fragment.evaluation)
        means = [fragment.values - fragment.evaluation.finish() for fragment in self._fragments]
        own = [fragment.read() for fragment in self._fragments]
        self._is_averaged = True
        try:
            self._write(means)
            del means
            yield
        finally:
            self._is_averaged = False
            self._write(own)

    def synchronize(self) -> None:
        """End the training with the same parameters at all sites, to the bit.

        Ends what is under way. Then all fragments that have had inner steps since their outer step make another. Both
        are without ``keep``. A second call changes nothing. averaged() is for evaluations during the training. Raises
        ValueError at all sites if they differ."""
        self._check()
        for fragment in list(self._in_flight):
            self._apply(fragment, keep=0.0)
        rest = [fragment for fragment in self._fragments if fragment.stepped_at < self._inner_steps]
        for fragment in rest:
            self._begin(fragment, 0)
        for fragment in rest:
            self._apply(fragment, keep=0.0)
        self._write([fragment.values for fragment in self._fragments])  # without what an outer step kept
        self._compare_sites()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a file per rank. With it, the parameters and both optimizers' states, a
        training goes on bit for bit. All sites call this after the same inner step: it waits for the means of
        fragments under way, which are part of the state. Their outer steps still come when they are due."""
        self._check_is_own()
        in_flight = []
        for fragment in self._in_flight:
            mean = self._wait_for_mean(fragment)
            in_flight.append((self._fragments.index(fragment), fragment.apply_at, mean.clone()))
        return {
            "settings": dict(self._settings),
            "rank": dist.get_rank(),
            "inner_steps": self._inner_steps,
            "values": [fragment.values.clone() for fragment in self._fragments],
            "stepped_at": [fragment.stepped_at for fragment in self._fragments],
            "in_flight": in_flight,
            "error_feedback": self._feedback.state_dict() if self._feedback is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the ``state_dict`` of the same rank. Raises ValueError if it is of another one, of other arguments or
        parameters, and RuntimeError while fragments are under way."""
        self._check_is_own()
        if self._in_flight:
            raise RuntimeError(f"state: expected no fragments under way, got {len(self._in_flight)}")
        if (settings := state.get("settings")) != self._settings:
            raise ValueError(f"state: expected one of {self._settings}, got {settings}")
        if (rank := state.get("rank")) != dist.get_rank():
            raise ValueError(f"state: expected that of rank {dist.get_rank()}, got that of rank {rank}")
        if self._feedback is not None:
            self._feedback.load_state_dict(state["error_feedback"])
        for fragment, values, stepped_at in zip(self._fragments, state["values"], state["stepped_at"], strict=True):
            fragment.values.copy_(values)
            fragment.stepped_at = stepped_at
        for number, apply_at, mean in state["in_flight"]:
            fragment = self._fragments[number]
            fragment.mean, fragment.apply_at = mean.to(fragment.values.device, copy=True), apply_at
            self._in_flight.append(fragment)
        self._inner_steps = state["inner_steps"]
        self._compared = False

    def stats(self) -> OuterStats:
        """Return the counters of this rank."""
        averagings = [each for fragment in self._fragments for each in (fragment.averaging, fragment.evaluation)]
        return OuterStats(
            inner_steps=self._inner_steps,
            reductions=sum(each.count for each in averagings),
            sent_bytes=sum(each.count * each.bytes for each in averagings),
            exact_bytes=sum(each.count * each.exact_bytes for each in averagings),
            in_flight=len(self._in_flight),
            limit_seconds=self._limit_seconds,
            wait_seconds=sum(each.wait_seconds for each in averagings),
        )

    def _advance(self) -> None:
        for fragment in list(self._in_flight):
            if fragment.apply_at <= self._inner_steps:
                self._apply(fragment)
            elif fragment.gather_at == self._inner_steps and fragment.mean is None:
                fragment.averaging.gather()

    def _begin(self, fragment: Fragment, delay: int) -> None:
        self._reduce(fragment, fragment.averaging)
        fragment.gather_at = self._inner_steps + (delay + 1) // 2
        fragment.apply_at = self._inner_steps + delay
        self._in_flight.append(fragment)

    def _reduce(self, fragment: Fragment, averaging: Averaging) -> None:
        """Begin to average the pseudo-gradients."""
        buffer = averaging.new_buffer()
        torch.sub(fragment.values, fragment.read(), out=buffer[: len(fragment.values)])
        self._keep_rate(averaging.bytes)
        averaging.reduce(buffer)

    def _write(self, values: list[torch.Tensor]) -> None:
        for fragment, flat in zip(self._fragments, values, strict=True):
            fragment.write(flat)

    def _keep_rate(self, num_bytes: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        if now < self._free_at:
            time.sleep(self._free_at - now)
            self._limit_seconds += self._free_at - now
        self._free_at = max(now, self._free_at) + num_bytes / self._rate

    def _wait_for_mean(self, fragment: Fragment) -> torch.Tensor:
        if fragment.mean is None:
            fragment.mean = fragment.averaging.finish()
        return fragment.mean

    def _apply(self, fragment: Fragment, keep: float | None = None) -> None:
        """Make the fragment's outer step."""
        keep = self._keep if keep is None else keep
        mean = self._wait_for_mean(fragment)
        own = fragment.read()
        gradients = [(parameter, parameter.grad) for parameter in _parameters_of(self._optimizer)]
        for parameter, _ in gradients:
            parameter.grad = None  # so that the optimizer leaves the other fragments alone
        fragment.write(fragment.values)
        try:
            for parameter, part in zip(fragment.parameters, fragment.split(mean), strict=True):
                parameter.grad = like(part, parameter)
            self._optimizer.step()
            fragment.values = fragment.read()
            if keep:
                fragment.write(torch.lerp(fragment.values, own, keep))
        except BaseException:
            fragment.write(own)
            raise
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
        fragment.mean, fragment.stepped_at = None, self._inner_steps
        self._in_flight.remove(fragment)

    def _check(self) -> None:
        """Raise ValueError if the optimizer has other parameters now, or at the first call if sites differ."""
        self._check_is_own()
        number = len(_parameters_of(self._optimizer))
        if number != self._num_parameters:
            raise ValueError(
                f"optimizer: expected the {self._num_parameters} parameters that it had when the OuterStep was made, "
                f"got {number}"
            )
        if not self._compared:
            self._compare_sites()

    def _check_is_own(self) -> None:
        """Raise RuntimeError within averaged()."""
        if self._is_averaged:
            raise RuntimeError("outer step: expected this call after averaged(), got it within")

    def _compare_sites(self) -> None:
        """Raise ValueError at all sites unless they agree on steps, arguments, the outer optimizer and values."""
        self._compared = False
        groups = self._optimizer.param_groups
        arguments = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        state = [self._optimizer.state.get(parameter, {}) for group in groups for parameter in group["params"]]
        values = [fragment.values for fragment in self._fragments]
        settings = self._settings, backend_of(self._group).connections
        numbers = [zlib.crc32(repr(_comparable(each)).encode()) for each in (settings, arguments, state, values)]
        mine = torch.tensor([self._inner_steps, *numbers])
        everybody = [torch.empty_like(mine) for _ in range(self._settings["sites"])]
        with lost_ranks_named("compared their outer steps"):
            dist.all_gather(everybody, mine, group=self._group)
        for site, other in enumerate(everybody):
            for what, same in zip(_COMPARED, other == everybody[0], strict=True):
                if not same:
                    raise ValueError(
                        f"outer step: expected all sites to have the same {what}, got others at site {site}"
                    )
        self._compared = True


def _comparable(value: Any) -> Any:
    """Return what has the same repr in all processes if ``value`` has the same bits."""
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


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for chosen in optimizer.param_groups for parameter in chosen["params"]]


def _check_parameters(parameters: list[torch.Tensor]) -> None:
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
    if len(kinds) != 1 or next(iter(kinds))[0] != torch.float32:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds)) or "none"
        raise ValueError(f"optimizer: expected parameters of float32 on one device, got {found}")


def _check_numbers(every: int, fragments: int, delay: int, keep: float, most: int, connections: int | None) -> None:
    if every < 1:
        raise ValueError(f"every: expected at least 1, got {every}")
    if not 1 <= fragments <= (most := min(every, most)):
        raise ValueError(
            f"fragments: expected 1 to {most}, the lesser of every and the number of parameters, got {fragments}"
        )
    if not 0 <= delay < every:
        raise ValueError(f"delay: expected 0 to every - 1 = {every - 1}, got {delay}")
    if not 0 <= keep <= 1:
        raise ValueError(f"keep: expected 0 to 1, got {keep}")
    if connections is not None and not 1 <= connections <= 64:
        raise ValueError(f"connections: expected 1 to 64, got {connections}")


def _rate_of(max_rate: str) -> float:
    try:
        return parse_rate(max_rate)
    except ValueError as error:
        raise ValueError(f"max_rate: {error}") from None
