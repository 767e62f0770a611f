"""The measurement of a cluster: what it writes is what the planner and a group read. No time decides anything here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("pyroute2")

import torch
import torch.distributed as dist
from support import decisions
from support.worlds import run
from typer.testing import CliRunner

from zcomm.distributed.decisions import Table, load
from zcomm_bench import measure
from zcomm_bench.cli import app
from zcomm_bench.lab import network

RATE = 1e9 / 8
LEAST_BYTES = 1 << 20  # of calls that are rehearsed
# The command itself, with messages that the ranks of a small machine pass on in a moment.
SMALL = """
from zcomm_bench import measure
from zcomm_bench.cli import app
measure.MAX_BYTES["cpu"] = 2 << 20
measure.CODEC_ELEMENTS["cpu"] = 1 << 18
app()
"""
BURST = 1.25  # a limited link lets a little more through at first


@pytest.mark.job
def test_a_limited_link_is_measured_and_planned_with(tmp_path: Path) -> None:
    file, config = tmp_path / "made" / "cluster.json", tmp_path / "config.json"
    command = [sys.executable, "-c", SMALL, "measure", "--output", str(file)]
    lines: list[str] = []
    env = {"PYTHONWARNINGS": "error::FutureWarning", "ZCOMM_MIN_BYTES": str(LEAST_BYTES)}
    launched = network.launch(command, nodes="2x2", rate="1gbit", timeout=110, env=env, on_line=lines.append)
    calibration = load(file)
    assert lines[0] == "2 nodes of 2 ranks"
    assert lines[1].startswith("between nodes, of a node: ") and lines[2].startswith("inside a node, of a rank: ")
    assert lines[3].endswith(" kinds of calls are faster compressed, at some sizes at least")
    assert lines[4] == f"written to {file}"
    assert (calibration["nodes"], calibration["ranks_per_node"], calibration["backend"]) == (2, 2, "gloo")
    for name in ("intra", "inter"):
        assert all(value > 0 for value in calibration[name].values())
    assert calibration["exact_reduce_factor"] >= 1
    assert calibration["codec_bytes_per_second"] > 0
    assert calibration["lossless_bytes_per_second"] > 0
    check_decisions(file)
    if launched.isolated:
        link = calibration["inter"]
        sent = 2 * link["message_bytes"]  # of a node
        assert sent / (sent / link["bytes_per_second"] + link["exchange_seconds"]) <= BURST * RATE
    config.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "vocab_size": 99, "n_positions": 8})
    )
    result = CliRunner().invoke(app, ["plan", "--model", str(config), "--calibration", str(file), "--json"])
    assert result.exit_code == 0, result.output
    planned = json.loads(result.output)["cluster"]
    assert (planned["nodes"], planned["ranks_per_node"]) == (2, 2)
    assert planned["inter"]["bandwidth"] == {"value": calibration["inter"]["bytes_per_second"], "source": "measured"}


def check_decisions(file: Path) -> None:
    """Those about FSDP2's collectives, among all ranks, the ranks of a node, and those of equal local rank."""
    table = Table(str(file))
    for ranks in ("2x2", "1x2", "2x1"):
        for collective, dtype, formats in (
            ("all_gather", "bfloat16", "int8:256"),
            ("reduce_scatter", "float32", "int8:128/int4:128"),
            ("all_reduce", "float32", "int8:128/int4:128"),
        ):
            once, twice = (
                table.seconds_of((ranks, "cpu", collective, dtype, formats, again), LEAST_BYTES)
                for again in (False, True)
            )
            assert once is not None and (twice is not None) == (collective == "all_gather" and ranks != "1x2")
            assert min(once[:2]) > 0 and (once[2] > 0) == (collective == "all_gather" and ranks == "2x2")


def test_kinds_of_calls_are_counted_by_the_verdicts_of_the_group() -> None:
    """Not sizes, and not gains of less than the group wants."""
    gather = {**decisions.row((1.0, 0.99, 0.0), "all_gather", "int8:256"), "compressed": False}
    rows = [
        gather,
        {**gather, "least_bytes": 2, "compressed": True},
        {**gather, "least_bytes": 4, "compressed": True},
        {**gather, "again": True},
    ]
    lines = measure.summary({"nodes": 2, "ranks_per_node": 2, "decisions": rows}).splitlines()
    assert lines == ["2 nodes of 2 ranks", "1 of 2 kinds of calls are faster compressed, at some sizes at least"]


@pytest.mark.parametrize(
    ("size", "fields", "shape"),
    [
        (2, {}, (1, 2)),  # as with srun, which sets no LOCAL_WORLD_SIZE: the host is the node
        (2, {"env": {"ZCOMM_NODE_SIZE": "1"}}, (2, 1)),
        (4, {"nodes": [0, 1, 0, 1]}, (2, 2)),
    ],
    ids=str,
)
def test_nodes_are_those_of_a_zcomm_group(size: int, fields: dict[str, Any], shape: tuple[int, int]) -> None:
    def body() -> tuple[tuple[int, int], list[list[int]]]:
        found = measure.world(torch.device("cpu"))
        groups = [dist.get_process_group_ranks(group) for group in (found.intra, found.inter) if group is not None]
        return (found.nodes, found.ranks_per_node), groups

    outcomes = run(body, size, **fields)
    assert [found for found, _ in outcomes] == [shape] * size
    if size == 4:
        assert outcomes[0][1] == [[0, 2], [0, 1]] and outcomes[3][1] == [[1, 3], [2, 3]]


def test_the_smallest_calls_are_measured_where_none_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.MAX_BYTES, "cpu", 2)

    def body() -> set[int]:
        rows = measure._rehearsals(dist.group.WORLD, 1, 2, torch.device("cpu"))
        return {row["least_bytes"] for row in rows}

    first, second = run(body, 2, backend="gloo", env={"ZCOMM_MIN_BYTES": "0"})
    assert first == second and len(first) > 0


def test_nodes_of_unequal_size_are_refused() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"nodes: expected as many ranks in each, got 2, 1"):
            measure.world(torch.device("cpu"))

    run(body, 3, nodes=[0, 0, 1])


def test_it_needs_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["measure", "--output", str(tmp_path / "cluster.json")])
    assert result.exit_code == 2
    assert "torchrun" in result.output
