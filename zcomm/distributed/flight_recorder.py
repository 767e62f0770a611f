"""Flight recorder: the last collectives of this process, for torch's analyzer of hangs."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from zcomm.distributed.binding import _c10d


def dump_flight_recorder(prefix: str | os.PathLike[str]) -> Path:
    """Write the last collectives of all zcomm groups of this process to a file and return its path: ``prefix`` plus the
    rank, such as ``dumps/rank_3``. ``torchfrtrace dumps`` reads the files of all ranks.

    Thread-safe, also during a collective. Raises ValueError before ``init_process_group``, and OSError.
    """
    path = Path(f"{os.fspath(prefix)}{dist.get_rank()}")
    path.write_bytes(_c10d.flight_recorder_dump())
    return path
