"""What a process finds in its environment beside the options: see options.py for these (``ZCOMM_ISA`` and
``ZCOMM_NCCL_LIB`` are read by the core)."""

from __future__ import annotations

import os
from collections.abc import Mapping

# Variable -> what it is for.
OTHERS: Mapping[str, str] = {
    "ZCOMM_ISA": "instruction set of the CPU codec",
    "ZCOMM_NCCL_LIB": "the file of NCCL",
    "ZCOMM_LOG": "info: a line per group",
    "ZCOMM_FLIGHT_RECORDER": "where a rank whose call times out writes its last calls",
}


def _count(variable: str, least: int) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{variable}: expected an integer of at least {least}, got {text!r}")
    return int(text)


def log_level() -> str:
    """``ZCOMM_LOG``: ``info`` prints one line per group when it ends; empty otherwise."""
    level = os.environ.get("ZCOMM_LOG", "").lower()
    if level not in ("", "info"):
        raise ValueError(f"ZCOMM_LOG: expected 'info' or nothing, got {level!r}")
    return level


def restart_count() -> int:
    """How often an elastic agent has restarted its workers."""
    return _count("TORCHELASTIC_RESTART_COUNT", 0) if "TORCHELASTIC_RESTART_COUNT" in os.environ else 0


def node_identity() -> str:
    """Names the node of this process: the same text on all ranks that share a fast link.

    torchrun's ``GROUP_RANK`` (one agent per node) decides where it is set. Else, where a launcher counts the ranks of
    a node, its first rank, ``RANK - LOCAL_RANK``: nodes may have different sizes. Else the host: its boot id, so that
    containers on one machine are one node.
    """
    if "GROUP_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return f"group {os.environ['GROUP_RANK']}"
    if all(variable in os.environ for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return f"ranks from {_count('RANK', 0) - _count('LOCAL_RANK', 0)}"
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"boot {file.read().strip()}"
    except OSError:
        return f"host {os.uname().nodename}"
