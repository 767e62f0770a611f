"""A rank is killed in the middle of compressed calls: how do the others end?

``python -m zcomm_bench.prove.stages.drill`` is a rank of the world in which that happens."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

import zcomm
from zcomm.distributed.single import reduce_scatter_single
from zcomm_bench.prove.stages import children
from zcomm_bench.prove.stages.ranks import Ranks, own_device

LAST_CALL = 20  # of the victim
ELEMENTS = 1 << 16  # of a shard
START_SECONDS = 90.0


def run(ranks: Ranks) -> dict[str, Any]:
    """`seconds` are from a rank's last complete call to its error."""
    limit, victim = ranks.scale.drill_seconds, ranks.size - 1
    ranks.say(f"drill: rank {victim} is killed, the others have {limit:.0f} s")
    spec = {"victim": victim, "limit": limit}
    ends = children.run(ranks, __name__, spec, {}, START_SECONDS + 2 * limit)
    rows = [
        {
            "error": children.nameless(end["error"]) if "error" in end else None,
            "seconds": end.get("seconds", 0.0),
            "ended": end.get("ended"),
        }
        for end in ends
    ]
    return {"victim": victim, "limit_seconds": limit, "ends": rows}


def main() -> None:
    spec, path = children.arguments()
    device = own_device()
    limit = datetime.timedelta(seconds=spec["limit"])
    dist.init_process_group("zcomm", timeout=limit, pg_options=zcomm.Options(forms="single"))
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, shard = torch.ones(size * ELEMENTS, device=device), torch.empty(ELEMENTS, device=device)
    last = time.monotonic()
    try:
        for number in itertools.count():
            if rank == spec["victim"] and number == LAST_CALL:
                os.kill(os.getpid(), signal.SIGKILL)
            reduce_scatter_single(shard, whole)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            last = time.monotonic()
    except Exception as error:
        children.write(path, {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - last})
    os._exit(0)


if __name__ == "__main__":
    main()
