"""What ``policy="auto"`` decides by where the user gives a calibration: the planner's model of the cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zcomm.planner import cluster as hardware
from zcomm.planner import collectives
from zcomm.planner.workload import DTYPE_BYTES


def read(path: str) -> dict[str, Any]:
    """What ``python -m zcomm measure`` wrote. Raises ValueError if the file is another one."""
    try:
        return hardware.load_calibration(Path(path))
    except ValueError as error:
        raise ValueError(f"calibration: {error}") from None


def cluster_of(calibration: Mapping[str, Any], nodes: Sequence[int]) -> hardware.Cluster:
    """The cluster that a group runs on; ``nodes``: the node of each of its ranks.

    Raises ValueError if its nodes have different numbers of ranks, or if the file lacks the codec or a link in use."""
    ranks = Counter(nodes)
    if len(set(ranks.values())) != 1:
        raise ValueError(
            f"calibration: expected nodes with equally many ranks in the group, got {sorted(ranks.values())}: it "
            "cannot predict these; policy='auto' without a calibration measures them"
        )
    ranks_per_node = next(iter(ranks.values()))
    used = {"intra": ranks_per_node > 1, "inter": len(ranks) > 1}
    for name, is_used in used.items():
        if is_used and name not in calibration:
            raise ValueError(
                f"calibration: expected {name!r} in it, as this group has {len(ranks)} nodes of {ranks_per_node} ranks"
            )
    if "codec_bytes_per_second" not in calibration:
        raise ValueError("calibration: expected 'codec_bytes_per_second' in it")
    # Placeholders: each of these rates is replaced by a measured one, or belongs to a link that the group does not use.
    link = hardware.inter_link("1GB/s")
    known = {name for name, is_used in used.items() if is_used}
    measured = {name: value for name, value in calibration.items() if name in known or name not in used}
    assumed = hardware.Cluster(len(ranks), ranks_per_node, link, link, hardware.processor("v100"))
    return hardware.calibrated(assumed, measured)


def predict(
    calibration: Mapping[str, Any],
    nodes: Sequence[int],
    collective: str,
    dtype: str,
    num_bytes: int,
    formats: str,
    again: bool,
) -> tuple[float, float, float]:
    """Seconds of an exact call, of one in ``formats``, "INTRA_NODE/INTER_NODE" or one for both, and of one in one hop;
    0 where that is not another way. ``num_bytes`` of the gathered, scattered or reduced tensor; ``again``: of two
    all-gathers, the second one from secondary shards. Raises as :func:`cluster_of`."""
    cluster = cluster_of(calibration, nodes)
    num_elements = num_bytes // DTYPE_BYTES[dtype]
    inside = formats.split("/")[0]
    ring = collectives.exact(num_elements, dtype, cluster)
    if collective == "all_gather":
        gathered = collectives.gather(num_elements, dtype, inside, cluster)
        if again:
            twice = gathered + collectives.secondary_gather(num_elements, dtype, inside, cluster)
            return 2 * ring.seconds, twice.seconds, 0.0
        if cluster.nodes == 1 or cluster.ranks_per_node == 1:
            return ring.seconds, gathered.seconds, 0.0
        flat = collectives.gather_in_one_hop(num_elements, dtype, inside, cluster)
        return ring.seconds, gathered.seconds, flat.seconds
    reduced = collectives.reduce(num_elements, dtype, formats, cluster)
    if collective == "reduce_scatter":
        exact = collectives.exact(num_elements, dtype, cluster, cluster.exact_reduce_factor)
        return exact.seconds, reduced.seconds, 0.0
    return 2 * ring.seconds, (reduced + collectives.gather(num_elements, dtype, inside, cluster)).seconds, 0.0
