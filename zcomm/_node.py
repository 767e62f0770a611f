"""Identity of the host and the node that a process runs on. A node may span hosts: a rack of GB200 NVL72 is one NVLink
domain."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health_mask", ctypes.c_uint),
    )


@functools.cache
def clique() -> str | None:
    """Return a name of the NVLink clique of the host's first GPU: GPUs of one clique reach each other over NVLink. None
    if there is no clique, if NVML does not report one, or if torch has no GPU."""
    import torch  # `zcomm info` works without it

    device, info = ctypes.c_void_p(), _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
    try:
        nvml = ctypes.CDLL(LIBRARY)
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
            or nvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
        )
    except (OSError, AttributeError):  # no library, or a driver without what NCCL needs as well
        return None
    if failed or info.state != _COMPLETED or info.status or not any(info.cluster_uuid):
        return None
    # Checked last, because it may initialize CUDA, after which a process should not fork.
    return f"fabric {bytes(info.cluster_uuid).hex()} clique {info.clique_id}" if torch.cuda.is_available() else None


def host_identity() -> str:
    """Return the same text in all processes of a machine, containers included: the boot id, else the host's name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"boot {file.read().strip()}"
    except OSError:
        return f"host {os.uname().nodename}"


def _count(variable: str) -> int:
    text = os.environ[variable]
    if not text.isdecimal():
        raise ValueError(f"{variable}: expected an integer of at least 0, got {text!r}")
    return int(text)


def node_identity() -> tuple[str, str, str]:
    """Return where this process is: a host, the job of a launcher, and a place that the launcher numbers in the job.
    :func:`number_nodes` tells which ranks share a node.

    An NVLink clique counts as a host: GPUs of several hosts may share NVLink. Else it is the host's boot id: containers
    on one machine are one node. The place is torchrun's ``GROUP_RANK``, one agent per node. Or it is the node's first
    rank, ``RANK - LOCAL_RANK``, of a launcher that counts a node's ranks: nodes may have different sizes. Raises
    ValueError if these are no numbers.
    """
    if (domain := clique()) is not None:
        return domain, "", ""
    job = ":".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    if "GROUP_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return host_identity(), job, f"group {os.environ['GROUP_RANK']}"
    if all(variable in os.environ for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return host_identity(), job, f"ranks from {_count('RANK') - _count('LOCAL_RANK')}"
    return host_identity(), "", ""


def number_nodes(
    identities: Sequence[tuple[str, str, str]], world_ranks: Sequence[int], node_size: int | None
) -> list[int]:
    """Return the node of each rank, numbered by its first rank: ``node_size`` ranks in order per node, else by host.

    A job that has several places on one host has as many nodes there. Jobs number places by themselves. So the first
    places of all jobs on a host are one node, as are their second ones.
    """
    if node_size is not None:
        return [world_rank // node_size for world_rank in world_ranks]
    places: dict[tuple[str, str], list[str]] = {}
    first_of: dict[tuple[str, int], int] = {}
    nodes = []
    for rank, (host, job, place) in enumerate(identities):
        of_job = places.setdefault((host, job), [])
        if place not in of_job:
            of_job.append(place)
        nodes.append(first_of.setdefault((host, of_job.index(place)), rank))
    return nodes
