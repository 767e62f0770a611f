"""``zcomm_bench prove`` on real ranks in the network lab: whole reports, bits, and what planted faults come to. Where
time decides a verdict, it does so in test_prove.py, on given samples."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("pyroute2")

from support import proof

from zcomm_bench.lab import network
from zcomm_bench.prove import report, verify
from zcomm_bench.prove.claims import FAIL, INVALID, PASS
from zcomm_bench.prove.stages import calls, children, networks, run
from zcomm_bench.spec import NO_LAB

TESTS = Path(__file__).parents[2]
NODES, RATE = "2x1", "1gbit"
SECONDS = 280  # some start many processes one after the other; alone they take half a minute
pytestmark = pytest.mark.timeout(SECONDS + 20)
FILES = {"report.json", "predictions.json", "report.md", "speed_up.png", "model.png"}


def prove(folder: Path, *faults: str) -> list[str]:
    """Run it with planted faults; returns what rank 0 has printed."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    lines: list[str] = []
    command = [sys.executable, str(TESTS / "support" / "prove_rank.py"), str(folder), *faults]
    env = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "CUDA_VISIBLE_DEVICES": ""}
    network.launch(command, nodes=NODES, rate=RATE, env=env, on_line=lines.append, timeout=SECONDS)
    return lines


@pytest.mark.job
def test_a_whole_report_is_written_and_holds(tmp_path: Path) -> None:
    lines = prove(tmp_path, "drill", "networks")
    assert {path.name for path in tmp_path.iterdir()} == FILES
    made = verify.read(tmp_path / "report.json")
    assert verify.check(made) == ["made by the sources that are here"]
    verdicts = proof.verdicts(made)
    assert (verdicts["bits"], verdicts["drill"]) == (PASS, PASS)
    assert len(verdicts) == 6
    assert f"passes: {report.passes(made)}" in lines[-1]
    assert made["rehearsal"] == "on CPUs" and "REHEARSAL" in lines[0]
    assert (tmp_path / "report.md").read_text().startswith("# REHEARSAL (on CPUs): 2x1 ranks on ")
    written = json.loads((tmp_path / "predictions.json").read_text())
    assert written == made["predictions"]
    (line,) = [line for line in lines if "predictions are written" in line]
    first_measured = next(line for line in lines if "noise:" in line)
    assert lines.index(line) < lines.index(first_measured)
    (other,) = made["networks"]["measured"]
    assert other["name"] == "the same" and len(other["sweep"]["cells"]) == 6
    assert [each["name"] for each in made["figures"]["networks"]] == ["as it is", "the same"]
    (trained,) = made["steps"]["runs"]
    assert all(count > 0 for count in trained["compressed_calls"].values())
    cells = made["sweep"]["cells"]
    assert len(cells) == 6 and len(made["beside"]["cells"]) == 2
    # The first size is below min_bytes: "auto" has nothing to decide, and "compressed" is compressed all the same.
    assert [cell["auto_compresses"] is None for cell in cells] == [True, False] * 3
    assert all(cell["compressed_calls"] > 0 for cell in cells)
    assert all(len(found) >= 12 for cell in cells for found in cell["samples"].values())
    assert "lost rank 1" in made["drill"]["ends"][0]["error"]
    assert not re.search(r"10\.\d+\.\d+|/\w+/", json.dumps(made["drill"]))


def test_networks_and_links_follow_from_the_cards() -> None:
    def card(name: str, gbit: int | None) -> dict[str, Any]:
        return {"name": name, "bits_per_second": None if gbit is None else gbit * 10**9}

    two, ethernet = [card("mlx5_0:1", 400), card("mlx5_1:1", 400)], [card("eth0", 10), card("eth1", 25)]
    found = networks.variants([*ethernet, *two])
    assert [(each["name"], each["variables"], each["bytes_per_second"]) for each in found] == [
        ("one InfiniBand card", {"NCCL_IB_HCA": "=mlx5_0:1"}, 50e9),
        ("sockets", {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=eth1"}, 3.125e9),
    ]
    assert [each["variables"] for each in networks.variants(ethernet)] == [{"NCCL_SOCKET_IFNAME": "=eth1"}]
    assert networks.variants(two[:1]) == networks.variants(ethernet[:1]) == []
    assert run.link_of(1.5, two, 2) == {"bytes_per_second": 1.5, "source": "given by --link"}
    assert run.link_of(None, [*ethernet, *two], 2)["bytes_per_second"] == 100e9
    assert run.link_of(None, ethernet, 2) == {"bytes_per_second": 3.125e9, "source": "cards eth1"}
    for cards, nodes in ((two, 1), ([card("eth0", None)], 2), ([], 2)):
        assert run.link_of(None, cards, nodes)["bytes_per_second"] is None


def test_a_network_that_ends_is_told_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    log = ['  File "/home/someone/job.py", line 3', "DistNetworkError: no answer from (node7.example, 29500) at all"]
    monkeypatch.setattr(networks, "variants", lambda cards: [{"name": "sockets", "variables": {}}])
    monkeypatch.setattr(networks, "why_not", lambda ranks, found: "")
    monkeypatch.setattr(networks.children, "run", lambda *args: [{"ended": "with status 1", "log": log}])
    said: list[str] = []
    found = networks.run(SimpleNamespace(scale=proof.TINY, say=said.append))  # type: ignore[arg-type]
    assert found["not_run"] == "sockets ended with status 1: DistNetworkError: no answer from ... at all"
    assert all(line in said[-1] for line in log)


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (
            "lost rank 1 ([/__w/gloo/pair.cc:553] Closed by [10.42.0.2]:25311. GLHF!)",
            "lost rank 1 ... Closed by ... GLHF!)",
        ),
        (
            "NCCL: remote error (recv from node7.example<4395> failed) (rank 3)",
            "NCCL: remote error (recv from ... failed) (rank 3)",
        ),
        ("rank 0 gave up in reduce_scatter float32[3 x 65536] int8:128/int4:128 times 1", None),
        ("no route to tcp://node7:29500 or [fe80::1]:80, zcomm 0.1.2", "no route to ... or ... zcomm 0.1.2"),
        (
            "SocketImpl(fd=9, remote=[node7.example]:29500), node7:29500 in 30000 ms",
            "SocketImpl(fd=9, ... ... in 30000 ms",
        ),
    ],
)
def test_errors_keep_ranks_and_no_names(error: str, kept: str | None) -> None:
    assert children.nameless(error) == (kept or error)


@pytest.mark.parametrize("name", ["eth0", "enp65s0f0np0"])
def test_a_link_counts_where_its_interface_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/net/dev pads names to six letters; longer ones start their line."""
    table = f"Inter-|   Receive\n face |bytes\n{name:>6}: 0 0 0 0 0 0 0 0 7 0 0 0 0 0 0 0\n"
    monkeypatch.setattr(calls, "Path", lambda file: SimpleNamespace(read_text=lambda: table))
    for interface, link in ((name, "100000000bit"), (name[1:], NO_LAB), (None, NO_LAB)):
        if interface is None:
            monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        else:
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        assert calls.limit_of(12.5e6) == link


@pytest.mark.job
def test_planted_faults_get_their_verdicts(tmp_path: Path) -> None:
    """A wrong bit, an exact baseline of a fraction of the link, and a model that nobody would believe."""
    lines = prove(tmp_path, "wrong bit", "slow baseline", "model")
    made = verify.read(tmp_path / "report.json")
    verdicts = proof.verdicts(made)
    assert verdicts["bits"] == FAIL
    assert proof.why(made, "bits").startswith("all_reduce of float32 in int8:128/int4:128, rank 1: 1 of 1030 elements")
    assert verdicts["step"] == INVALID and "the exact baseline is slow" in proof.why(made, "step")
    assert verdicts["the model's error"] != PASS
    assert "passes: False" in lines[-1]
    with pytest.raises(verify.NotTrue, match="not what the model says"):
        verify.check(made)


@pytest.mark.job
def test_a_dead_rank_is_named_and_leaves_no_report(tmp_path: Path) -> None:
    with pytest.raises(network.RankFailed, match="rank 1 was killed by SIGKILL"):
        prove(tmp_path, "dead rank")
    assert not (tmp_path / "report.json").exists()


@pytest.mark.job
def test_a_refusal_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zcomm_bench", "prove", "--rehearse", "-o", str(tmp_path)]
    env = {**os.environ, "ZCOMM_MIN_BYTES": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1
    assert "refused: ZCOMM_MIN_BYTES: expected it unset, got it on rank 0" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rehearsal_of_full_size(tmp_path: Path) -> None:
    """The command itself: its exit status says whether all claims pass, and its report holds."""
    folder = tmp_path / "report"
    command = [sys.executable, "-m", "zcomm_bench", "prove", "--rehearse", "--drill", "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert {path.name for path in folder.iterdir()} == FILES, done.stderr
    made = verify.read(folder / "report.json")
    verify.check(made)
    assert done.returncode == (0 if report.passes(made) else 1)
    verdicts = proof.verdicts(made)
    assert (verdicts["bits"], verdicts["drill"]) == (PASS, PASS)
    assert (made["environment"]["nodes"], made["environment"]["ranks_per_node"]) == (2, 2)
