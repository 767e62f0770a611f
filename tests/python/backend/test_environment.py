"""Which ranks share a node, by what launchers set in the environment."""

from __future__ import annotations

import pytest

from zcomm.distributed import environment

VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def nodes_of(monkeypatch: pytest.MonkeyPatch, ranks: list[dict[str, int]]) -> list[int]:
    """The node of each rank, numbered as they come."""
    names = []
    for variables in ranks:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        names.append(environment.node_identity())
    return [list(dict.fromkeys(names)).index(name) for name in names]


@pytest.mark.parametrize("sizes", [[2, 2], [1, 2], [2, 1], [3], [1, 3, 2]])
def test_ranks_that_follow_one_another_share_a_node(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """As Ray sets the variables: nodes may have different sizes."""
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
