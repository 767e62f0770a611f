"""Detection of ranks that share a node, from the variables of launchers."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import support
import torch
import torch.distributed as dist
from support.calls import gather, logged, mine
from support.cpp_example import CXX, needs_compiler
from support.worlds import options, run

import zcomm
from zcomm import _node
from zcomm.distributed import backend

VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")


def nodes_of(monkeypatch: pytest.MonkeyPatch, ranks: list[dict[str, int]], hosts: str | None = None) -> list[int]:
    """The node of each rank, numbered as they come. ``hosts`` has a letter per rank."""
    places = []
    for variables, host in zip(ranks, hosts or "x" * len(ranks), strict=True):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(_node, "host_identity", lambda host=host: host)
        places.append(_node.node_identity())
    nodes = _node.number_nodes(places, range(len(places)), None)
    return [list(dict.fromkeys(nodes)).index(node) for node in nodes]


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


@pytest.mark.parametrize(
    ("hosts", "first", "second", "nodes"),
    [
        ("xxxx", [0, 0], [0, 0], [0, 0, 0, 0]),
        ("xxyy", [0, 0], [0, 0], [0, 0, 1, 1]),
        ("xyyx", [0, 1], [0, 1], [0, 1, 1, 0]),  # the same hosts in another order
        ("xyxx", [0, 1], [0, 0], [0, 1, 0, 0]),
        ("xxxx", [0, 1], [1, 0], [0, 1, 0, 1]),  # two agents of each job on one machine
        ("xxxx", [0, 1], [0, 0], [0, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "Ray"])
def test_nodes_of_a_group_across_two_jobs(
    monkeypatch: pytest.MonkeyPatch, hosts: str, first: list[int], second: list[int], nodes: list[int], launcher: str
) -> None:
    """Each job of two ranks numbers its agents from zero."""
    ranks = []
    for port, agents in ((29500, first), (29501, second)):
        for rank, agent in enumerate(agents):
            local = rank - agents.index(agent)
            variables = {"RANK": rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": agents.count(agent)}
            variables["MASTER_PORT"] = port
            ranks.append({**variables, "GROUP_RANK": agent} if launcher == "torchrun" else variables)
    assert nodes_of(monkeypatch, ranks, hosts) == nodes


def test_without_a_launcher_the_host_is_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nodes_of(monkeypatch, [{"RANK": 0}, {"RANK": 1}]) == [0, 0]


@pytest.mark.parametrize("is_one_host", [True, False], ids=["one host", "two hosts"])
def test_a_group_across_two_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_one_host: bool) -> None:
    """Two worlds of two ranks, and one group of all four. On two hosts all of it counted as inside of one node."""

    def body() -> None:
        distributed, number = torch.distributed.distributed_c10d, int(os.environ["RANK"])
        job, rank = divmod(number, 2)
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        for name, value in {**launched, "MASTER_PORT": 29500 + job}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(_node, "host_identity", lambda: "boot 0" if is_one_host else f"boot {job}")
        store = dist.FileStore(str(tmp_path / f"job {job}"), 2)
        dist.init_process_group("zcomm", store=store, rank=rank, world_size=2, pg_options=options())
        across, _ = distributed._new_process_group_helper(
            4, number, [], distributed.Backend("zcomm"), dist.FileStore(str(tmp_path / "across"), 4),
            group_name="across", backend_options=options(forms="out_of_place"), timeout=distributed.default_pg_timeout,
        )  # fmt: skip
        distributed._world.pg_group_ranks[across] = {other: other for other in range(4)}
        gathered = torch.empty(4096)
        across._allgather_base(gathered, torch.full((1024,), float(number))).wait()
        wanted = torch.arange(4.0).repeat_interleave(1024)
        torch.testing.assert_close(gathered, wanted, rtol=1 / 127, atol=0)
        sent = zcomm.stats(across).all_gather
        assert (sent.calls, sent.inter_node_bytes == 0) == (1, is_one_host)
        gather(mine())
        inside = zcomm.stats().all_gather
        assert (inside.intra_node_bytes > 0, inside.inter_node_bytes) == (True, 0)

    run(body, 4, backend=None, launched=True)


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
    assert _node.node_identity() == (CLIQUE, "", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _node.clique.cache_clear()
    assert _node.node_identity()[2] == "group 3"


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
    assert _node.node_identity()[2] == "group 3"


def test_without_nvml_the_launcher_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_node, "LIBRARY", "libnvidia-ml-of-no-driver.so.1")
    monkeypatch.setenv("GROUP_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _node.node_identity()[2] == "group 3"


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


def test_the_name_of_the_host_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo asks for each of its groups, two per group here. Without a name server each answer takes seconds."""
    asked: list[str] = []
    hosts: list[str] = []
    look_up, gloo = socket.getaddrinfo, dist.ProcessGroupGloo

    class Gloo:
        _Options = gloo._Options

        def __call__(self, store: dist.Store, rank: int, size: int, options: object) -> dist.ProcessGroupGloo:
            return gloo(store, rank, size, options)

        def create_device(self, **arguments: object) -> object:
            hosts.append(str(arguments.get("hostname", arguments.get("interface"))))
            return gloo.create_device(**arguments)

    def body() -> None:
        backend._address_of_host.cache_clear()
        monkeypatch.setattr(backend.socket, "gethostname", lambda: "the-host")
        monkeypatch.setattr(backend.socket, "getaddrinfo", lambda name, *rest, **named: answer(name))
        monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo())
        store = dist.HashStore()
        for number in range(2):
            dist.init_process_group(
                "zcomm", store=dist.PrefixStore(str(number), store), rank=0, world_size=1, pg_options=options()
            )
            gather(mine())
            dist.destroy_process_group()
        assert (asked, set(hosts)) == (["the-host"], {"127.0.0.1"})
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # counts from the next group on
        dist.init_process_group("zcomm", store=dist.PrefixStore("last", store), rank=0, world_size=1)
        assert (asked, hosts[-1]) == (["the-host"], "lo")

    def answer(name: str) -> object:
        asked.append(name)
        return look_up("127.0.0.1", None, type=socket.SOCK_STREAM)

    run(body, 1, backend=None)


@pytest.mark.parametrize("found", ["nothing", "another host"])
def test_a_host_without_an_address_uses_loopback(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    def answer(name: str, *rest: object, **named: object) -> object:
        if found == "nothing":
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]

    def body() -> None:
        backend._address_of_host.cache_clear()
        lines = logged()
        monkeypatch.setattr(backend.socket, "getaddrinfo", answer)
        for _ in range(2):
            assert backend._address_of_host() == "127.0.0.1"
        (line,) = lines
        assert "has no address of this host: Gloo uses loopback; set GLOO_SOCKET_IFNAME" in line

    run(body, 1, backend=None)
