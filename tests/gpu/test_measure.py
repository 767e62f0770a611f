"""What `python -m zcomm_bench measure --device cuda` finds: no time decides anything here."""

from __future__ import annotations

import pytest
import torch
from support.gpu_world import DEVICE, run

from zcomm_bench import measure

pytestmark = pytest.mark.cuda_only


def test_a_gpus_links_and_codecs_are_measured() -> None:
    def body() -> dict[str, object]:
        torch.manual_seed(0)
        return measure.run(torch.device(DEVICE.type, torch.cuda.current_device()))

    first, second = run(body, 2, backend="nccl")
    assert first["backend"] == "nccl" and (first["nodes"], first["ranks_per_node"]) == (1, 2)
    for name in ("codec_bytes_per_second", "lossless_bytes_per_second"):
        assert first[name] > 0, name
    assert first["exact_reduce_factor"] >= 1
    assert all(value > 0 for value in first["intra"].values())
    assert {(row["device"], row["ranks"]) for row in first["decisions"]} == {("cuda", "1x2")}
    assert set(second) == set(first)
