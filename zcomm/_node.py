"""Identity of the host and the node that a process runs on. A node may span hosts: a rack of GB200 NVL72 is one NVLink
domain."""

from __future__ import annotations

import ctypes
import functools
import os

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


def node_identity() -> str:
    """Return a name of this process's node: the same text on all ranks that share a fast link.

    The first of these that exists decides. The NVLink clique: GPUs of several hosts may share NVLink. torchrun's
    ``GROUP_RANK``: one agent per node. The node's first rank, ``RANK - LOCAL_RANK``, from a launcher that counts a
    node's ranks: nodes may have different sizes. The host's boot id: containers on one machine are one node.
    """
    if (domain := clique()) is not None:
        return domain
    if "GROUP_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return f"group {os.environ['GROUP_RANK']}"
    if all(variable in os.environ for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return f"ranks from {_count('RANK') - _count('LOCAL_RANK')}"
    return host_identity()
