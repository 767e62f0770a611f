"""torch's own "nccl" backend through the front of NCCL, in programs that do not name zcomm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import expected, gpu_world

pytestmark = pytest.mark.cuda_only

PROGRAM = """
import sys, torch, torch.distributed as dist
from zcomm_bench.lab import gpus
rank, (store, inputs, outputs) = int(sys.argv[1]), sys.argv[2:]
gpus.place(rank, 2)
dist.init_process_group("nccl", init_method="file://" + store, rank=rank, world_size=2)
values = torch.load(inputs).cuda()
gathered, total, largest = torch.empty(2 * values.numel(), device="cuda"), values.clone(), values.clone()
dist.all_gather_into_tensor(gathered, values)
dist.all_reduce(total)
dist.all_reduce(largest, dist.ReduceOp.MAX)
exchanged = torch.empty_like(values)
dist.all_to_all_single(exchanged, values)  # of messages, in most releases
torch.save([each.cpu() for each in (gathered, total, largest, exchanged)], outputs)
dist.destroy_process_group()
"""


def test_collectives_of_torchs_nccl_are_compressed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zcomm", "nccl-front"]
    front = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    variables = {
        "LD_PRELOAD": front,
        "ZCOMM_ALL_GATHER": "int8:256",
        "ZCOMM_ALL_REDUCE": "int8:128/int4:128",
        "ZCOMM_EXCHANGES": "int8:128",
        "ZCOMM_NODE_SIZE": "1",
        "ZCOMM_MIN_BYTES": "0",
        "ZCOMM_STATS": str(tmp_path / "stats"),
    }
    inputs = [gpu_world.values(100_000, rank=rank) for rank in range(2)]
    ranks = []
    for rank in range(2):
        files = [str(tmp_path / name) for name in ("store", f"in{rank}", f"out{rank}")]
        torch.save(inputs[rank], files[1])
        arguments = [sys.executable, "-c", PROGRAM, str(rank), *files]
        ranks.append(subprocess.Popen(arguments, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=gpu_world.WORLD_SECONDS)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors
    for rank in range(2):
        gathered, total, largest, exchanged = torch.load(tmp_path / f"out{rank}")
        expected.assert_same_bits(gathered, expected.all_gather(inputs, "int8:256"))
        expected.assert_same_bits(total, expected.all_reduce(inputs, "int8:128/int4:128", [0, 1]))
        expected.assert_same_bits(largest, torch.maximum(*inputs))
        parts = [each.chunk(2)[rank] for each in inputs]
        parts[1 - rank] = expected.roundtrip(parts[1 - rank], "int8:128")
        expected.assert_same_bits(exchanged, torch.cat(parts))
    stats = (tmp_path / "stats").read_text()
    assert stats.count('"all_gather": {"calls": {"compressed": 1}') == 2, stats
    assert stats.count('"all_reduce": {"calls": {"compressed": 1, "operation": 1}') == 2, stats
