"""OuterStep: when each fragment is reduced, gathered and stepped, and whether sites agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zcomm._core as _core
from zcomm._checks import check_types
from zcomm.distributed._fsdp2 import find_groups
from zcomm.distributed.groups import backend_of
from zcomm.distributed.overrides import undisturbed
from zcomm.feedback import ErrorFeedback
from zcomm.outer.agreement import Comparison, compare, take_over
from zcomm.outer.arguments import check_numbers, check_parameters, parameters_of
from zcomm.outer.averaging import Averaging, set_connections
from zcomm.outer.fragments import Fragment, cut
from zcomm.outer.rate import RateLimit
from zcomm.outer.sites import Sites
from zcomm.outer.stats import OuterStats

_Result = TypeVar("_Result")


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
        sites: in place of ``group``, sites that come and go. The OuterStep joins them. A new one takes over the values
            of the others, and their number of inner steps. step() waits while they meet anew.

    Raises ValueError or TypeError if an argument is none of these or the group has another backend, and RuntimeError if
    something around the call keeps it exact. step() raises torch's DistBackendError if a site does not come in time:
    then call regroup(). With ``sites`` it goes on with those that are left.
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
        sites: Sites | None = None,
    ) -> None:
        check_types(locals(), optimizer=torch.optim.Optimizer, every=int, fragments=int, delay=int, keep=int | float)
        check_types(locals(), format=str, error_feedback=bool | ErrorFeedback)
        check_types(locals(), max_rate=str | None, connections=int | None, sites=Sites | None)
        parameters = parameters_of(optimizer)
        check_parameters(parameters, among_sites=sites is not None)
        check_numbers(every, fragments, delay, keep, len(parameters), connections)
        if ":stochastic" in format or "/" in format:
            raise ValueError(f"format: expected one format that rounds to nearest, got {format!r}")
        _core.BlockFormat(format)  # raises on an unknown one
        if sites is not None and group is not None:
            raise ValueError("sites: expected no group beside it, got both")
        self._rate = RateLimit(max_rate)
        find_groups()
        self._optimizer, self._group, self._sites = optimizer, group, sites
        self._every, self._delay, self._keep = every, delay, keep
        self._connections = connections
        self._inner_steps = 0
        self._compared = self._is_averaged = False  # the latter within averaged()
        self._has_failed = False  # a call, so that sites may have parted
        if error_feedback is True:
            error_feedback = ErrorFeedback()
        self._feedback = error_feedback if isinstance(error_feedback, ErrorFeedback) and format != "exact" else None
        self._name = self._feedback.claim(self, "outer step") if self._feedback is not None else ""
        self._fragments = [
            Fragment(part, (number + 1) * every // fragments) for number, part in enumerate(cut(parameters, fragments))
        ]
        self._num_parameters = len(parameters)
        self._in_flight: list[Fragment] = []  # in the order in which they began
        self._due: list[Fragment] = []  # to begin in this step
        self._averagings: list[Averaging] = []
        self._before = OuterStats(0, 0, 0, 0, 0, 0.0, 0.0)  # of the groups before this one
        # What must be the same in a run that goes on, and at all sites.
        self._settings: dict[str, Any] = {
            "every": every, "fragments": fragments, "delay": delay, "keep": keep, "format": format,
            "error_feedback": self._feedback is not None,
            "elements": [len(fragment.values) for fragment in self._fragments],  # on this rank and its likes
        }  # fmt: skip
        self._begin_training()

    def _begin_training(self) -> None:
        sites = self._sites
        if sites is None:
            self._settings["sites"] = backend_of(self._group).size()
            return self._make_averagings()
        self._check_regroup()
        kind = f"{type(self._optimizer).__name__} of {len(self._optimizer.param_groups)} groups"
        sites.join(f"{kind}, connections={self._connections}, {self._settings}")
        try:
            self._follow(sites)
        except BaseException:
            sites.close()  # the others do not wait for this one
            raise

    def step(self) -> None:
        """Count an inner step. Begin, continue and end what is due; waits only for what ``delay`` has not hidden."""
        self._check()
        self._inner_steps += 1
        due = [each for each in self._fragments if each.is_due(self._inner_steps, self._every)]
        self._due = [each for each in due if each not in self._in_flight]  # regroup() may have begun one late
        self._run(self._make_due)

    def regroup(self, group: dist.ProcessGroup | None = None) -> None:
        """Go on with other sites, after the calls of the group have failed or others came. All of them call this.

        ``group``: of the sites that are there now; None: the one before, which torch has reconfigured. The site that
        is furthest gives the others its values, its outer optimizer's arguments and state, and its number of inner
        steps. Sites that have these values already go on with their own parameters. What is under way begins anew,
        with the mean of the sites that have trained since their last outer step. Residuals start over.

        Raises ValueError if sites differ in arguments, RuntimeError for parameters that are sharded in the sites or on
        a GPU, and torch's DistBackendError if a site is lost meanwhile. Then, call it again."""
        if self._sites is not None:
            raise RuntimeError("regroup: expected no call with sites: step() does it")
        self._check_is_own()
        self._check_regroup()
        self._regroup(group if group is not None else self._group)

    def _check_regroup(self) -> None:
        parameters = parameters_of(self._optimizer)
        if any(isinstance(parameter, DTensor) or not parameter.is_cpu for parameter in parameters):
            raise RuntimeError("regroup: expected parameters on a CPU, whole in each site, got others")

    def _regroup(self, group: dist.ProcessGroup | None) -> None:
        self._has_failed = True
        self._in_flight, self._due = [], [*self._in_flight, *self._due]  # to begin anew, be it at a later attempt
        self._group = group
        self._rate.restart()
        if self._feedback is not None:
            self._feedback.forget(self._name, keeps_loaded=False)
        self._make_averagings()
        pending = [self._fragments.index(fragment) for fragment in self._due]
        furthest = take_over(self._fragments, self._optimizer, self._inner_steps, pending, group)
        self._inner_steps, size = furthest.inner_steps, backend_of(group).size()
        if "sites" in self._settings:
            self._settings["sites"] = size
        for fragment, trained in zip(self._fragments, furthest.trained, strict=True):
            fragment.mean, fragment.scale = None, (self._inner_steps, size / trained if trained else 1.0)
        self._due = [self._fragments[number] for number in furthest.pending]
        self._compare_sites()
        self._make_due()
        self._has_failed = False

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within ``with outer.averaged():`` the parameters are the mean of all sites', for an evaluation.

        They have the same bits at all sites. At the end each site gets its own back. So the training goes on bit for
        bit as without the evaluation, and what changes parameters within is lost. All sites call this after the same
        inner step. It sends as much as an outer step of all fragments, in the same format, without error feedback. It
        keeps 4 bytes per parameter meanwhile. Raises ValueError at all sites if they differ. Within it, all methods of
        the OuterStep but stats() raise RuntimeError. With ``sites`` the parameters are those after the last outer
        steps: nothing is sent, and sites need not call it alike."""
        self._compared = self._compared and self._sites is not None
        self._check()
        means = self._run(self._evaluate) if self._sites is None else [each.values for each in self._fragments]
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
        self._run(self._end)
        while self._sites is not None and not self._sites.have_all_ended(self._inner_steps):
            self._run(self._end)

    def _end(self) -> None:
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
        fragments under way, which are part of the state. Their outer steps still come when they are due. With ``sites``
        it waits for nothing: the state has neither means nor residuals, and what is under way begins anew."""
        waits = self._sites is None
        if (self._in_flight or self._due) and waits:
            self._check_usable()
        self._check_is_own()

        if waits:
            self._run(lambda: [each.wait_for_mean() for each in self._in_flight])
        return {
            "settings": dict(self._settings),
            "rank": dist.get_rank() if waits else None,  # sites may load that of another one
            "inner_steps": self._inner_steps,
            "values": [fragment.values.clone() for fragment in self._fragments],
            "stepped_at": [fragment.stepped_at for fragment in self._fragments],
            "in_flight": [
                (self._fragments.index(each), each.apply_at, each.mean.clone() if each.mean is not None else None)
                for each in self._in_flight
            ],
            "error_feedback": self._feedback.state_dict() if self._feedback is not None and waits else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the ``state_dict`` of the same rank. Raises ValueError if it is of another one, of other arguments or
        parameters, and RuntimeError while fragments are under way. With ``sites`` all meet anew, and have the state of
        the one that is furthest: load parameters and optimizers before."""
        self._check_usable()
        if self._in_flight and self._sites is None:
            raise RuntimeError(f"state: expected no fragments under way, got {len(self._in_flight)}")
        if (settings := state.get("settings")) != self._settings:
            raise ValueError(f"state: expected one of {self._settings}, got {settings}")
        mine = dist.get_rank() if self._sites is None else None
        if (rank := state.get("rank")) != mine:
            raise ValueError(f"state: expected that of rank {mine}, got that of rank {rank}")
        if state["error_feedback"] is not None and self._feedback is not None:
            self._feedback.load_state_dict(state["error_feedback"])
        for fragment, values, stepped_at in zip(self._fragments, state["values"], state["stepped_at"], strict=True):
            fragment.values.copy_(values)
            fragment.stepped_at, fragment.taken_at, fragment.scale = stepped_at, 0, (0, 1.0)
        self._in_flight, self._due = [], []
        for number, apply_at, mean in state["in_flight"]:
            fragment = self._fragments[number]
            fragment.apply_at = apply_at
            fragment.mean = mean.to(fragment.values.device, copy=True) if mean is not None else None
            self._in_flight.append(fragment)
        self._inner_steps = state["inner_steps"]
        self._compared = False
        if self._sites is not None:
            self._sites.report("a state was loaded")
            self._follow(self._sites)

    def stats(self) -> OuterStats:
        """Return the counters of this rank."""
        made, before = self._averagings, self._before
        return OuterStats(
            inner_steps=self._inner_steps,
            reductions=before.reductions + sum(each.count for each in made),
            sent_bytes=before.sent_bytes + sum(each.count * each.bytes for each in made),
            exact_bytes=before.exact_bytes + sum(each.count * each.exact_bytes for each in made),
            in_flight=len(self._in_flight),
            limit_seconds=self._rate.seconds,
            wait_seconds=before.wait_seconds + sum(each.wait_seconds for each in made),
        )

    def _make_averagings(self) -> None:
        """Plan the calls of the present group."""
        backend, averagings = backend_of(self._group), []
        set_connections(backend, self._connections)
        for number, fragment in enumerate(self._fragments):
            key = f"{self._name}: fragment {number} of {len(self._fragments)}/rank {backend.rank()}"
            fragment.plan(self._settings["format"], self._feedback, key, self._group)
            averagings += [fragment.averaging, fragment.evaluation]
        self._before, self._averagings = self.stats(), averagings

    def _run(self, act: Callable[[], _Result]) -> _Result:
        """Do what sends. Among Sites, go on with those that are left if one is lost, and with those that come."""
        while True:
            try:
                if self._sites is not None and self._sites.has_changed:
                    self._follow(self._sites)
                return act()
            except dist.DistBackendError as error:
                self._has_failed = True
                if self._sites is None:
                    raise
                self._sites.report(error)
                self._follow(self._sites)

    def _follow(self, sites: Sites) -> None:
        while True:
            try:
                with undisturbed():  # an exact() around step() is not for this
                    return self._regroup(sites.follow())
            except dist.DistBackendError as error:
                sites.report(error)

    def _make_due(self) -> None:
        self._advance()
        while self._due:
            self._begin(self._due[0], self._delay)
            del self._due[0]
        self._advance()

    def _advance(self) -> None:
        for fragment in list(self._in_flight):
            if fragment.apply_at <= self._inner_steps:
                self._apply(fragment)
            elif fragment.gather_at == self._inner_steps and fragment.mean is None:
                fragment.averaging.gather()

    def _begin(self, fragment: Fragment, delay: int) -> None:
        if self._sites is not None:
            fragment.comparison = Comparison(fragment.values, self._group)
        fragment.reduce(fragment.averaging, self._rate)
        fragment.began_at = self._inner_steps
        fragment.gather_at = self._inner_steps + (delay + 1) // 2
        fragment.apply_at = self._inner_steps + delay
        self._in_flight.append(fragment)

    def _evaluate(self) -> list[torch.Tensor]:
        for fragment in self._fragments:
            fragment.reduce(fragment.evaluation, self._rate)
        return [fragment.values - fragment.evaluation.finish() for fragment in self._fragments]

    def _write(self, values: list[torch.Tensor]) -> None:
        for fragment, flat in zip(self._fragments, values, strict=True):
            fragment.write(flat)

    def _apply(self, fragment: Fragment, keep: float | None = None) -> None:
        """Make the fragment's outer step."""
        keep = self._keep if keep is None else keep
        mean = fragment.wait_for_mean()
        fragment.step(self._optimizer, mean, keep)
        fragment.mean, fragment.stepped_at = None, self._inner_steps
        self._in_flight.remove(fragment)

    def _check(self) -> None:
        """Raise ValueError if the optimizer has other parameters now, or at the first call if sites differ."""
        self._check_usable()
        number = len(parameters_of(self._optimizer))
        if number != self._num_parameters:
            raise ValueError(
                f"optimizer: expected the {self._num_parameters} parameters that it had when the OuterStep was made, "
                f"got {number}"
            )
        if not self._compared:
            self._run(self._compare_sites)

    def _check_usable(self) -> None:
        """Raise RuntimeError within averaged(), and DistBackendError after a call that failed."""
        self._check_is_own()
        if self._has_failed:
            raise dist.DistBackendError("outer step: expected regroup() after a call that failed, got another one")

    def _check_is_own(self) -> None:
        if self._is_averaged:
            raise RuntimeError("outer step: expected this call after averaged(), got it within")

    def _compare_sites(self) -> None:
        """Raise ValueError at all sites unless they agree on steps, arguments, the outer optimizer and values."""
        self._compared = False
        settings = self._settings, backend_of(self._group).connections
        compare(self._fragments, self._optimizer, self._inner_steps, settings, self._group)
        self._compared = True
