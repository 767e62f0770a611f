"""The table of `python -m zcomm_bench measure`: what compress="auto" reads in it, and what becomes of other calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import NUM, gather, gather_in_place, logged, mine
from support.decisions import FAST_LINK, SLOW_LINK, row, rows_of_all_kinds, table
from support.fsdp_model import NODES
from support.worlds import WorldError, run

import zcomm
from zcomm.distributed.stats import Decision


def agreed(found: list[Any]) -> Any:
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "decisions: .*expected a file of 'python -m zcomm_bench measure'"),
        ('{"schema": "another"}', "decisions: .*expected the schema 'zcomm-measure/2', got 'another'"),
        (
            '{"schema": "zcomm-measure/2"}',
            "decisions: .*expected a machine and rows of a table of decisions, got others",
        ),
        ('{"schema": "zcomm-measure/2", "machine": {}, "decisions": [{}]}', "decisions: .*expected a machine and rows"),
        ('{"schema": "zcomm-measure/2", "machine": 3, "decisions": []}', "decisions: .*expected a machine and rows"),
    ],
)
def test_a_wrong_file_is_refused_when_the_group_is_made(content: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(content)
    with pytest.raises(WorldError, match=text):
        run(lambda: None, options=zcomm.Options(compress="auto", decisions=str(tmp_path / "cluster.json")))


LACKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "of these ranks": lambda row: row["ranks"] != "2x2",
    "of this dtype": lambda row: row["dtype"] != "float32",
    "of this format": lambda row: row["format"] != "int8:256",
    "of this collective": lambda row: row["collective"] != "all_gather",
    "of this device": lambda row: row.update(device="cuda") is None,
    "of calls as small": lambda row: row.update(least_bytes=1 << 30) is None,
}


@pytest.mark.parametrize("lack", LACKS)
def test_what_a_table_lacks_is_rehearsed_and_told_once(lack: str, tmp_path: Path) -> None:
    file = table(tmp_path, [each for each in rows_of_all_kinds(SLOW_LINK) if LACKS[lack](each)])

    def body() -> tuple[list[bool], list[str]]:
        lines = logged()
        gather(mine())
        gather(mine(2 * NUM))
        return [one.rounds > 0 for one in zcomm.stats().decisions], lines

    found = run(body, 4, options=zcomm.Options(compress="auto", decisions=file), nodes=NODES)
    assert [rehearsed for rehearsed, _ in found] == [[True, True]] * 4
    (line,) = found[0][1]
    assert (
        "for 524288 bytes of ranks 2x2, device cpu, collective all_gather, dtype float32, format int8:256, again"
        in line
    )
    assert [lines for _, lines in found[1:]] == [[]] * 3


def test_a_table_of_another_machine_decides_and_is_told_once(tmp_path: Path) -> None:
    def body() -> tuple[list[int], list[str]]:
        lines = logged()
        gather(mine())
        gather(mine(2 * NUM))
        return [one.rounds for one in zcomm.stats().decisions], lines

    for of_machine, told in (({}, []), ({"network_cards": [400e9]}, ["with network_cards [400000000000.0] (here"])):
        file = table(tmp_path, SLOW_LINK, **of_machine)
        (rounds, lines), (_, of_other) = run(body, options=zcomm.Options(compress="auto", decisions=file))
        assert rounds == [0, 0] and of_other == []
        assert len(lines) == len(told) and all(words in line for words, line in zip(told, lines, strict=True))


def test_ranks_rehearse_alike_where_one_has_no_decision(tmp_path: Path) -> None:
    files = [table(tmp_path, rows, f"{number}.json") for number, rows in enumerate(([], SLOW_LINK))]

    def body() -> list[Decision]:
        (tmp_path / f"of rank {dist.get_rank()}").mkdir()
        os.chdir(tmp_path / f"of rank {dist.get_rank()}")
        Path("cluster.json").symlink_to(files[dist.get_rank()])
        group = dist.new_group(pg_options=zcomm.Options(compress="auto", decisions="cluster.json"))
        gather_in_place(torch.zeros(2 * NUM), group)
        return zcomm.stats(group).decisions

    assert all(one.rounds > 0 for one in agreed(run(body)))


def test_nodes_of_unequal_size_are_ranks_of_their_own(tmp_path: Path) -> None:
    file = table(tmp_path, [row(SLOW_LINK, "all_gather", "int8:256", ranks="2+1")])

    def body() -> list[Decision]:
        gather(mine())
        return zcomm.stats().decisions

    (one,) = agreed(run(body, 3, options=zcomm.Options(compress="auto", decisions=file), nodes=[0, 0, 1]))
    assert one.compressed and one.rounds == 0


def test_the_size_of_a_call_is_rounded_down_and_the_largest_stands_for_larger_ones(tmp_path: Path) -> None:
    """And counts as often as it fits in."""
    rows = [row(seconds, "all_gather", "int8:256", "1x2", "float32", least) for seconds, least in (
        (FAST_LINK, 1 << 18), (SLOW_LINK, 1 << 19))]  # fmt: skip

    def body() -> list[Decision]:
        for num in (NUM, 2 * NUM - 4, 2 * NUM, 8 * NUM):
            gather(mine(num))
        return zcomm.stats().decisions

    found = agreed(run(body, options=zcomm.Options(compress="auto", decisions=table(tmp_path, rows))))
    assert [(one.least_bytes, one.compressed, one.exact_seconds) for one in found] == [
        (1 << 18, False, 0.5),
        (1 << 19, True, 1.0),
        (1 << 21, True, 4.0),
    ]
