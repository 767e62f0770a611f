"""Where the ranks of one machine go on its GPUs, for tests and benchmarks: more ranks than GPUs share them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any


class NoGpu(RuntimeError):
    """This machine, or this torch, has no GPU."""


def nccl_environment(rank: int, interface: str = "lo") -> dict[str, str]:
    """What lets NCCL run several ranks on one GPU.

    It refuses two ranks of one host on one GPU, so every rank says that it is a host of its own. Then NCCL takes the
    network for all that they exchange: sockets, over an interface that it leaves out unless it is named.
    """
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_IB_DISABLE": "1",
    }


def place(rank: int, size: int, interface: str = "lo", environment: Any = os.environ) -> int:
    """The GPU of a rank, made the current one; sets NCCL's environment where ranks share GPUs or talk over another
    interface than loopback. Call it before anything uses NCCL."""
    import torch

    count: int = torch.cuda.device_count()
    if count == 0:
        raise NoGpu("found no GPU: torch.cuda.device_count() is 0")
    if size > count or interface != "lo":
        environment.update(nccl_environment(rank, interface))
    torch.cuda.set_device(rank % count)
    return rank % count


def facts() -> dict[str, Any]:
    """The GPUs of this machine, for reports. Raises NoGpu if there are none."""
    import torch

    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda} sees none"
        raise NoGpu(f"found no GPU: torch {torch.__version__} {why}")
    properties: Any = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "num_gpus": torch.cuda.device_count(),
        "gpu_memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "nccl": _nccl_version(),
    }


def _nccl_version() -> str | None:
    from zcomm import _nccl

    try:
        return _nccl.load()[1]
    except (RuntimeError, AttributeError):  # a build of zcomm without CUDA
        return None


def chip(name: str) -> str:
    """A GPU's name as file names have it: "NVIDIA H200" -> "h200"."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return words.removeprefix("nvidia-") or "gpu"


def sharing(num_ranks: int, gpus: Mapping[str, Any], link: str) -> str:
    """What a reader of a measurement must know about it, in a sentence or two; empty if every rank has a GPU."""
    if num_ranks <= gpus["num_gpus"]:
        return ""
    have = f"one {gpus['gpu']}" if gpus["num_gpus"] == 1 else f"{gpus['num_gpus']} {gpus['gpu']}"
    network = "sockets over loopback" if link == "none" else f"sockets over {link} links"
    return (
        f"{num_ranks} ranks share {have}, one time slice after the other, and {network} stand for the network: times "
        "compare backends with each other, and are not those of a cluster"
    )
