"""Identity of the host that a process runs on."""

from __future__ import annotations

import os


def host_identity() -> str:
    """Return the same text in all processes of a machine, containers included: the boot id, else the host's name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"boot {file.read().strip()}"
    except OSError:
        return f"host {os.uname().nodename}"
