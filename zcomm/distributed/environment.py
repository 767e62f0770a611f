"""Environment variables other than options, which options.py reads. The core reads ``ZCOMM_ISA`` and
``ZCOMM_NCCL_LIB``."""

from __future__ import annotations

import difflib
import functools
import os
import warnings
from collections.abc import Mapping

# Variable -> its purpose.
OTHERS: Mapping[str, str] = {
    "ZCOMM_ISA": "instruction set of the CPU codec",
    "ZCOMM_NCCL_LIB": "the file of NCCL",
    "ZCOMM_RULES": "the front of NCCL: a file that says what is compressed",
    "ZCOMM_STATS": "the front of NCCL: a file for what was compressed",
    "ZCOMM_LOG": "info: a line per group",
    "ZCOMM_SAMPLE_ERRORS_EVERY": "compressed calls of a site from one sample for report() to the next",
    "ZCOMM_NODE_MEMORY": "off: ranks of a node share no memory",
    "ZCOMM_FLIGHT_RECORDER": "where a rank whose call times out writes its last calls",
}
# Of torch's NCCL, by which users ask for what compressed calls do not do: the table in docs/options.md.
_UNREAD = ("TORCH_NCCL_NAN_CHECK", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DESYNC_DEBUG")


@functools.cache
def warn_of_unknown(variables_of_options: tuple[str, ...]) -> None:
    """Warn once of each unknown variable that begins with ZCOMM_: it may be misspelt."""
    known = [*variables_of_options, *OTHERS]
    for name in sorted(name for name in os.environ if name.startswith("ZCOMM_") and name not in known):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        hint = f": did you mean {close[0]}?" if close else ""
        warnings.warn(f"zcomm does not read the environment variable {name}{hint}", stacklevel=2)


def log_level() -> str:
    """Return ``ZCOMM_LOG``: ``info`` prints one line per group when it ends, ``debug`` one per call, too."""
    level = os.environ.get("ZCOMM_LOG", "").lower()
    if level not in ("", "info", "debug"):
        raise ValueError(f"ZCOMM_LOG: expected 'info', 'debug' or nothing, got {level!r}")
    return level


def sample_errors_every() -> int:
    """Return ``ZCOMM_SAMPLE_ERRORS_EVERY``; 0, no samples, if it is not set."""
    text = os.environ.get("ZCOMM_SAMPLE_ERRORS_EVERY", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"ZCOMM_SAMPLE_ERRORS_EVERY: expected a whole number of calls, got {text!r}")
    return int(text)


def unread_of_nccl() -> list[str]:
    """Return the variables of torch's NCCL that are switched on, but that only exact calls on GPUs obey."""
    return [name for name in _UNREAD if os.environ.get(name, "").lower() in ("1", "y", "yes", "t", "true")]


def asked_of_front() -> list[str]:
    """Return the variables that make the front of NCCL compress, in this environment."""
    names = ("ZCOMM_ALL_GATHER", "ZCOMM_REDUCE_SCATTER", "ZCOMM_ALL_REDUCE", "ZCOMM_EXCHANGES", "ZCOMM_RULES")
    return [name for name in names if os.environ.get(name, "exact") not in ("", "exact")]


def launched() -> tuple[int, int]:
    """Return the rank and the number of ranks that the launcher tells; 0 and 1 if it tells none."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdigit() else 0, int(size) if size.isdigit() else 1


def check_node_memory() -> None:
    """Raise ValueError for values of ``ZCOMM_NODE_MEMORY``, which the binding reads, other than ``off``."""
    value = os.environ.get("ZCOMM_NODE_MEMORY", "")
    if value not in ("", "off"):
        raise ValueError(f"ZCOMM_NODE_MEMORY: expected 'off' or nothing, got {value!r}")


def gloo_interfaces() -> list[str]:
    """Return the network interfaces that ``GLOO_SOCKET_IFNAME`` names; none: Gloo chooses one."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
