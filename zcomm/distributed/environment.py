"""The ``ZCOMM_*`` environment variables, read here and nowhere else (``ZCOMM_ISA`` and ``ZCOMM_NCCL_LIB`` are the
core's own)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise ValueError(f"got {text!r}, need 1, 0, true or false")
    return values[text.lower()]


# Variable -> (option, how its text is read).
VARIABLES: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "ZCOMM_ALL_GATHER": ("all_gather", str),
    "ZCOMM_REDUCE_SCATTER": ("reduce_scatter", str),
    "ZCOMM_ALL_REDUCE": ("all_reduce", str),
    "ZCOMM_MIN_BYTES": ("min_bytes", int),
    "ZCOMM_OUT_OF_PLACE": ("out_of_place", _flag),
    "ZCOMM_LISTS": ("lists", _flag),
    "ZCOMM_COALESCED": ("coalesced", _flag),
    "ZCOMM_STRICT": ("strict", _flag),
    "ZCOMM_NODE_SIZE": ("node_size", int),
    "ZCOMM_CHUNK_BYTES": ("chunk_bytes", int),
    "ZCOMM_SEED": ("seed", int),
    "ZCOMM_HIGH_PRIORITY_STREAM": ("high_priority_stream", _flag),
    "ZCOMM_BLOCKING_WAIT": ("blocking_wait", _flag),
    "ZCOMM_TELEMETRY_EVERY": ("telemetry_every", int),
}

# Variable -> what it is for.
OTHERS: Mapping[str, str] = {
    "ZCOMM_ISA": "instruction set of the CPU codec",
    "ZCOMM_NCCL_LIB": "the file of NCCL",
    "ZCOMM_LOG": "info: a line per group",
}


def option_fields() -> dict[str, Any]:
    """The options that the environment sets. Raises ValueError that names the variable."""
    fields = {}
    for variable, (option, read) in VARIABLES.items():
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            fields[option] = read(text)
        except ValueError as error:
            raise ValueError(f"{variable}: {error}") from None
    return fields


def _count(variable: str, least: int) -> int:
    text = os.environ[variable]
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{variable}: got {text!r}, need an integer of at least {least}")
    return int(text)


def log_level() -> str:
    """``ZCOMM_LOG``: ``info`` prints one line per group when it ends; empty otherwise."""
    level = os.environ.get("ZCOMM_LOG", "").lower()
    if level not in ("", "info"):
        raise ValueError(f"ZCOMM_LOG: got {level!r}, need 'info' or nothing")
    return level


def node_identity() -> str:
    """Names the node of this process: the same text on all ranks that share a fast link.

    torchrun's ``GROUP_RANK`` (one agent per node) decides where it is set; else ``RANK // LOCAL_WORLD_SIZE``; else the
    host: its boot id, so that containers on one machine are one node.
    """
    if "GROUP_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return f"group {os.environ['GROUP_RANK']}"
    if "RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return f"group {_count('RANK', 0) // _count('LOCAL_WORLD_SIZE', 1)}"
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"boot {file.read().strip()}"
    except OSError:
        return f"host {os.uname().nodename}"
