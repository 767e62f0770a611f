"""A rank of ``zcomm_bench prove`` with planted faults, which tests start in the network lab.

python prove_rank.py FOLDER FAULT..."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from support import proof
from zcomm_bench.prove.stages import networks, run
from zcomm_bench.prove.stages.ranks import Hooks

LINK = 125e6  # bytes per second, of 1gbit
SLOW_SECONDS = 0.08


class Faults(Hooks):
    """On the last rank alone, but for the slow baseline and the model."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._exact_calls = 0
        self._is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def before_exact(self) -> None:
        self._exact_calls += 1
        if "slow baseline" in self._names:
            time.sleep(SLOW_SECONDS)
        if "dead rank" in self._names and self._is_last and self._exact_calls == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    def change_result(self, collective: str, result: torch.Tensor) -> None:
        if "wrong bit" in self._names and self._is_last and collective == "all_reduce":
            result.view(torch.uint8)[0] ^= 1

    def change_predictions(self, predictions: dict[str, Any]) -> None:
        if "model" in self._names:
            for row in predictions["calls"]:
                row["compressed"]["seconds"] *= 1000


def main() -> None:
    folder, *faults = sys.argv[1:]
    if "networks" in faults:  # as if there were cards to choose from
        same = {"name": "the same", "variables": {"NCCL_IB_DISABLE": "1"}, "bytes_per_second": LINK}
        networks.variants = lambda cards: [same]
        networks.why_not = lambda ranks, found: ""
    passes = run.run(Path(folder), LINK, with_drill="drill" in faults, scale=proof.TINY, hooks=Faults(faults))
    print(f"passes: {passes}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
