"""Detection of ranks that share a node, from the variables of launchers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
import torch
from support.calls import gather, mine
from support.cpp_example import CXX, needs_compiler
from support.worlds import options, run

import zcomm
from zcomm import _node

VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def nodes_of(monkeypatch: pytest.MonkeyPatch, ranks: list[dict[str, int]]) -> list[int]:
    """The node of each rank, numbered as they come."""
    names = []
    for variables in ranks:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        names.append(_node.node_identity())
    return [list(dict.fromkeys(names)).index(name) for name in names]


@pytest.mark.parametrize("sizes", [[2, 2], [1, 2], [2, 1], [3], [1, 3, 2]])
def test_ranks_that_follow_one_another_share_a_node(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Ray sets these variables, for nodes of any size."""
    places = [(node, local, size) for node, size in enumerate(sizes) for local in range(size)]
    ranks = [
        {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size} for rank, (_, local, size) in enumerate(places)
    ]
    assert nodes_of(monkeypatch, ranks) == [node for node, _, _ in places]


def test_an_agent_of_torchrun_is_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"RANK": r, "LOCAL_RANK": r % 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1 - r // 2} for r in range(4)]
    assert nodes_of(monkeypatch, ranks) == [0, 0, 1, 1]


def test_without_a_launcher_the_host_is_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_of(monkeypatch, [{"RANK": 0}, {"RANK": 1}]) == [0, 0]


COMPLETED = {"STATE": 3, "STATUS": 0, "UUID": 0xAB, "RESULT": 0}
CLIQUE = f"fabric {'ab' * 16} clique 5"


@pytest.fixture
def with_nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Compiles tests/support/nvml.cpp, and loads it as the driver's library on a machine that seems to have a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def replace(**defines: int) -> None:
        library = tmp_path / "libnvidia-ml.so.1"
        defined = [f"-D{name}={value}" for name, value in {**COMPLETED, **defines}.items()]
        source = Path(support.__path__[0], "nvml.cpp")
        subprocess.run([str(CXX), "-shared", "-fPIC", *defined, source, "-o", library], check=True)
        monkeypatch.setattr(_node, "LIBRARY", str(library))
        _node.clique.cache_clear()

    return replace


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    _node.clique.cache_clear()
    yield
    _node.clique.cache_clear()


@needs_compiler
def test_the_clique_of_a_fabric_is_a_node(monkeypatch: pytest.MonkeyPatch, with_nvml: Callable[..., None]) -> None:
    """The fabric overrides torchrun's agents: a rack has one agent per host."""
    with_nvml()
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _node.node_identity() == CLIQUE
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _node.clique.cache_clear()
    assert _node.node_identity() == "group 3"


@needs_compiler
@pytest.mark.parametrize(
    "defines",
    [{"UUID": 0}, {"STATE": 2}, {"STATE": 0}, {"STATUS": 999}, {"RESULT": 3}, {"WITHOUT_FABRIC": 1}],
    ids=["no cluster", "in progress", "not supported", "failed", "refused", "older driver"],
)
def test_without_a_fabric_the_launcher_decides(
    monkeypatch: pytest.MonkeyPatch, with_nvml: Callable[..., None], defines: dict[str, int]
) -> None:
    with_nvml(**defines)
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _node.node_identity() == "group 3"


def test_without_nvml_the_launcher_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_node, "LIBRARY", "libnvidia-ml-of-no-driver.so.1")
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _node.node_identity() == "group 3"


@needs_compiler
def test_ranks_of_a_clique_send_inside_of_their_node(with_nvml: Callable[..., None]) -> None:
    """Two agents of torchrun, one fabric. node_size counts more than both."""
    with_nvml()

    def body() -> tuple[bool, bool]:
        gather(mine())
        sent = zcomm.stats().all_gather
        return sent.intra_node_bytes > 0, sent.inter_node_bytes > 0

    assert run(body, nodes=[0, 1]) == [(True, False)] * 2
    assert run(body, nodes=[0, 0], options=options(node_size=1)) == [(False, True)] * 2
