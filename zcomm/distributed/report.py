"""What compression loses, call site by call site, and what to do about it."""

from __future__ import annotations

import json as _json
import math
import os
import statistics
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from zcomm._version import __version__
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.stats import stats_of

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
# The rule that report() advises by.
DECIBELS_BELOW_MEDIAN = 6.0
MOST_ZEROED = 0.5


class WeightSender(Protocol):
    """Knows how weights are sent, which no sample tells where nothing is lost."""

    def explain(self, group: str) -> list[str]:
        """In the group of this name: in words, and why."""


#: Those of this process.
WEIGHT_SENDERS: weakref.WeakSet[WeightSender] = weakref.WeakSet()


@dataclass
class SiteReport:
    """One call site in one format on this rank, as far as it was sampled.

    ``hop`` is "intra_node" or "inter_node", and "all" for an all-gather, which has one format. Errors are those
    of one quantization, decode(encode(x)) - x; blocks with a NaN or an infinity are left out of all but their share.

    * ``snr_db``: 10 log10(sum of x^2 / sum of squared errors); None if nothing was lost, or nothing finite was sampled.
    * ``largest_block_error``, ``mean_block_error``: over blocks, the largest error over the largest |x|.
    * ``zeroed``: the share of nonzero values that are decoded as 0.
    * ``nonfinite_blocks``: the share of blocks that hold a NaN or an infinity.
    * ``reasons``: why this site should be exempt from compression; empty if it need not.
    """

    site: str
    hop: str
    format: str
    calls: int
    samples: int
    elements: int
    snr_db: float | None
    largest_block_error: float
    mean_block_error: float
    zeroed: float
    nonfinite_blocks: float
    reasons: list[str] = field(default_factory=list)


@dataclass
class Report:
    """By collective, as in :class:`zcomm.Stats`; ``advice`` says what to write to exempt sites with ``reasons``.

    ``weights``: how modules with secondary shards send their weights to other nodes, and what that takes.
    ``decisions``: what ``policy="auto"`` has decided, and by which times."""

    rank: int
    every: int
    all_gather: list[SiteReport]
    reduce_scatter: list[SiteReport]
    all_reduce: list[SiteReport]
    advice: list[str]
    weights: list[str] = field(default_factory=list)
    decisions: list[str] = field(default_factory=list)


def report(group: dist.ProcessGroup | None = None, json: str | os.PathLike[str] | None = None) -> Report:
    """Print what compression has lost in ``group`` (default: the world) so far, and return it.

    It is about what this rank has sent, and no collective: one rank may call it alone. ``json``: a file to write the
    same to; docs/telemetry.md has its fields. Waits for the GPU.

    Raises ValueError if the group takes no samples (``zcomm.Options(telemetry_every=N)``) or has no zcomm backend, and
    ImportError if ``rich`` is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("zcomm.report() prints with rich: pip install rich") from error
    made = report_of(backend_of(group))
    asked = group or dist.group.WORLD
    assert asked is not None  # it has a backend
    made.weights = [line for sender in list(WEIGHT_SENDERS) for line in sender.explain(asked.group_name)]
    if json is not None:
        with open(json, "w", encoding="utf-8") as file:
            _json.dump({"zcomm": __version__, **asdict(made)}, file, indent=1, allow_nan=False)
            file.write("\n")
    console = Console(highlight=False)
    console.print(_table(made))
    for line in made.decisions + made.weights + made.advice:
        console.print(line, markup=False, soft_wrap=True)
    return made


def report_of(backend: _c10d.ProcessGroup) -> Report:
    """The report of one backend object; see :func:`report`."""
    every = backend.options.telemetry_every
    if every == 0:
        raise ValueError(
            "group: it takes no samples; make it with zcomm.Options(telemetry_every=100), or set "
            "ZCOMM_TELEMETRY_EVERY=100"
        )
    sites: dict[str, list[SiteReport]] = {name: [] for name in COLLECTIVES}
    for loss in backend.losses():
        sites[loss["collective"]].append(_site_of(loss))
    advice = [line for name in COLLECTIVES for line in _advise(name, sites[name])]
    decisions = [str(decision) for decision in stats_of(backend).decisions]
    return Report(
        backend.rank(), every, sites["all_gather"], sites["reduce_scatter"], sites["all_reduce"], advice=advice,
        decisions=decisions,
    )  # fmt: skip


def _site_of(loss: _c10d.Loss) -> SiteReport:
    def share(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    lost_some = loss["noise"] > 0 and loss["signal"] > 0
    return SiteReport(
        site=loss["site"],
        hop=loss["hop"],
        format=loss["format"],
        calls=loss["calls"],
        samples=loss["samples"],
        elements=int(loss["elements"]),
        snr_db=10 * math.log10(loss["signal"] / loss["noise"]) if lost_some else None,
        largest_block_error=loss["largest_block_error"],
        mean_block_error=share(loss["block_errors"], loss["finite_blocks"]),
        zeroed=share(loss["zeroed"], loss["nonzero"]),
        nonfinite_blocks=share(loss["blocks"] - loss["finite_blocks"], loss["blocks"]),
    )


def _advise(collective: str, sites: list[SiteReport]) -> list[str]:
    """Fills in the reasons; returns what to write about each site that has any."""
    peers: dict[tuple[str, str], list[float]] = {}
    for site in sites:
        if site.snr_db is not None:
            peers.setdefault((site.hop, site.format), []).append(site.snr_db)
    for site in sites:
        median = statistics.median(peers.get((site.hop, site.format), [0.0]))
        if site.nonfinite_blocks > 0:
            site.reasons.append(f"{site.nonfinite_blocks:.2%} of the blocks hold a NaN or an infinity")
        if site.zeroed > MOST_ZEROED:
            site.reasons.append(f"{site.zeroed:.1%} of the values become 0")
        if site.snr_db is not None and site.snr_db < median - DECIBELS_BELOW_MEDIAN:
            site.reasons.append(f"its SNR is {median - site.snr_db:.1f} dB below the median of {site.format}")
    named = dict.fromkeys(site.site for site in sites if site.reasons)
    return [
        f"{name}: to exempt its {collective}, name it in the exempt= of zcomm.fsdp.compress (FSDP2), call it in "
        f"`with zcomm.override({collective}='exact'):` on all ranks, or in a group made with "
        f"pg_options=zcomm.Options({collective}='exact')"
        for name in named
    ]


def _table(made: Report) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"What compression loses: rank {made.rank}, every {made.every} calls of a site")
    for name in ("site", "hop", "format"):
        table.add_column(name)
    for name in ("calls", "samples", "SNR dB", "block error: largest", "mean", "zeroed", "non-finite"):
        table.add_column(name, justify="right")
    table.add_column("exempt, because")
    for collective in COLLECTIVES:
        for site in getattr(made, collective):
            # A name is the user's, and may look like markup.
            name = site.site if site.site.startswith(collective) else f"{collective}: {site.site}"
            table.add_row(
                Text(name), site.hop, site.format, f"{site.calls}", f"{site.samples}",
                "-" if site.snr_db is None else f"{site.snr_db:.1f}", f"{site.largest_block_error:.2%}",
                f"{site.mean_block_error:.2%}", f"{site.zeroed:.1%}", f"{site.nonfinite_blocks:.2%}",
                "; ".join(site.reasons),
            )  # fmt: skip
        table.add_section()
    return table
