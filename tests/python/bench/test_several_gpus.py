"""The stages of `make gpu` for several GPUs without their ranks: what NCCL prints, layouts, and what is kept of ranks
that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

import torch

from bench.several_gpus import channels, world

SIZE = "host:1:1 [0] NCCL INFO comm 0x5 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0\n"
LOG = """\
host:1:1 [0] NCCL INFO Channel 00/16 : 0 1 2 3
host:1:1 [0] NCCL INFO 16 coll channels, 0 collnet channels, 0 nvls channels, 16 p2p channels, 4 p2p channels per peer
host:1:1 [0] NCCL INFO NCCL_MAX_CTAS set by environment to 8.
host:1:2 [0] NCCL INFO 24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer
"""
SAID = [
    {"coll": 16, "collnet": 0, "nvls": 0, "p2p": 16, "p2p_per_peer": 4},
    {"coll": 24, "nvls": 16, "p2p": 32, "p2p_per_peer": 32},
]


def test_channels_are_read_from_lines_of_old_and_new_releases() -> None:
    assert [found for line in LOG.splitlines() if (found := channels.counts(line))] == SAID
    assert channels.counts(LOG.splitlines()[1].replace("NCCL INFO", "")) == {}


def test_what_all_ranks_say_counts_once(tmp_path: Path) -> None:
    assert channels.said(tmp_path) == []
    for rank in range(4):
        (tmp_path / f"host.{rank}").write_text(SIZE + LOG)
    assert channels.said(tmp_path) == [SAID[1], {"ranks": 8, "nodes": 2, **SAID[0]}]


@pytest.mark.parametrize(
    ("count", "expected"), [(2, {"1x2": 2, "2x1": 1}), (5, {"1x4": 4, "2x2": 2}), (16, {"1x8": 8, "2x4": 4})]
)
def test_layouts_have_an_even_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: dict[str, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert world.layouts() == expected


def test_rows_of_ranks_that_fail_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def launch(argv: list[str], *, on_line: Callable[[str], object], **fields: Any) -> None:
        assert fields["timeout"] == 7.0 and "bench.several_gpus.steps" in argv
        on_line('{"step_ms": 3}')
        on_line("a warning")
        raise TimeoutError("ranks [1] still ran at the timeout")

    monkeypatch.setattr(world.network, "launch", launch)
    found = []
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        for row in world.rows("steps", seconds=7.0):
            found.append(row)
    assert found == [{"step_ms": 3}]
    assert "a warning" in capsys.readouterr().out
