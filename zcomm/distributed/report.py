"""Report of compression errors by call site, with advice."""

from __future__ import annotations

import json as _json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from zcomm._tables import aligned
from zcomm._version import __version__
from zcomm.distributed.binding import _c10d
from zcomm.distributed.groups import backend_of
from zcomm.distributed.stats import stats_of

# Thresholds of report()'s advice.
DECIBELS_BELOW_MEDIAN = 6.0
MOST_ZEROED = 0.5


@dataclass
class SiteReport:
    """Samples of one call site in one format on this rank.

    ``hop`` is "intra_node" or "inter_node", and "all" for an all-gather, which has one format. Errors are those
    of one quantization, decode(encode(x)) - x; blocks with a NaN or an infinity count only in ``nonfinite_blocks``.

    * ``snr_db``: 10 log10(sum of x^2 / sum of squared errors); None if nothing was lost, or nothing finite was sampled.
    * ``largest_block_error``, ``mean_block_error``: over blocks, the largest error over the largest |x|.
    * ``zeroed``: the share of nonzero values that are decoded as 0.
    * ``nonfinite_blocks``: the share of blocks that hold or decode to NaN or infinity.
    * ``reasons``: reasons to exempt this site from compression; empty if there are none.
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
    """By collective, as in :func:`zcomm.stats`; ``advice`` says what to write to exempt sites with ``reasons``.

    ``every``: of how many calls one is sampled; 0: none.
    ``decisions``: what ``compress="auto"`` has decided, by which times, and from which size on."""

    rank: int
    every: int
    all_gather: list[SiteReport]
    reduce_scatter: list[SiteReport]
    all_reduce: list[SiteReport]
    all_to_all: list[SiteReport]
    gather: list[SiteReport]
    scatter: list[SiteReport]
    broadcast: list[SiteReport]
    advice: list[str]
    decisions: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([*(_table(self) if self.every else []), *self.decisions, *self.advice])


def report(group: dist.ProcessGroup | None = None, json: str | os.PathLike[str] | None = None) -> Report:
    """What compression has lost in ``group`` (default: the world) so far, to be looked at and printed.

    It is about what this rank has sent, and no collective: one rank may call it alone. ``json``: a file to write the
    same to; docs/telemetry.md has its fields. Waits for the GPU.

    Without samples (the variable ``ZCOMM_SAMPLE_ERRORS_EVERY``) it tells what ``compress="auto"`` has decided. Raises
    ValueError if there is nothing to tell or the group has no zcomm backend.

    Example::

        print(zcomm.report(json="report.json"))
    """
    made = report_of(backend_of(group))
    if not made.every and not made.decisions:
        raise ValueError(
            "group: expected one that takes samples or has compress='auto', got neither: set "
            "ZCOMM_SAMPLE_ERRORS_EVERY=100 before the group is made"
        )
    if json is not None:
        with open(json, "w", encoding="utf-8") as file:
            _json.dump({"zcomm": __version__, **asdict(made)}, file, indent=1, allow_nan=False)
            file.write("\n")
    return made


def report_of(backend: _c10d.ProcessGroup) -> Report:
    """Return the report of one backend object; see :func:`report`."""
    sites: dict[str, Any] = {name: [] for name in _c10d.COLLECTIVES}
    for loss in backend.quantization_errors():
        sites[loss["collective"]].append(_site_of(loss))
    advice = [line for name in _c10d.COLLECTIVES for line in _advise(name, sites[name])]
    decisions = stats_of(backend).explain_auto()
    return Report(backend.rank(), backend.options.sample_errors_every, **sites, advice=advice, decisions=decisions)


def _site_of(loss: dict[str, Any]) -> SiteReport:
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
    """Set the reasons of all sites; return advice about each site that has any."""
    peers: dict[tuple[str, str], list[float]] = {}
    for site in sites:
        if site.snr_db is not None:
            peers.setdefault((site.hop, site.format), []).append(site.snr_db)
    for site in sites:
        median = statistics.median(peers.get((site.hop, site.format), [0.0]))
        if site.nonfinite_blocks > 0:
            site.reasons.append(f"{site.nonfinite_blocks:.2%} of the blocks hold or decode to a NaN or an infinity")
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


_HEADS = (
    "site", "hop", "format", "calls", "samples", "SNR dB", "largest error", "mean", "zeroed", "non-finite", "exempt",
)  # fmt: skip


def _table(made: Report) -> list[str]:
    """Its lines."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for collective in _c10d.COLLECTIVES:
        for site in getattr(made, collective):
            rows.append((
                site.site if site.site.startswith(collective) else f"{collective}: {site.site}",
                site.hop, site.format, f"{site.calls}", f"{site.samples}",
                "-" if site.snr_db is None else f"{site.snr_db:.1f}", f"{site.largest_block_error:.2%}",
                f"{site.mean_block_error:.2%}", f"{site.zeroed:.1%}", f"{site.nonfinite_blocks:.2%}",
                "because " + "; ".join(site.reasons) if site.reasons else "",
            ))  # fmt: skip
    title = f"What compression loses: rank {made.rank}, every {made.every} calls of a site. Errors are those of blocks."
    return [title, *aligned(rows, 3)]
