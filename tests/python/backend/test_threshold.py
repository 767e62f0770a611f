"""The ``min_bytes`` of ``compress="auto"``: ranks agree on it by the slowest link between their nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import gather, mine, newly_counted
from support.decisions import SLOW_LINK, table
from support.worlds import run

import zcomm
from zcomm import _network
from zcomm.distributed import threshold
from zcomm.distributed.groups import backend_of

NODES = [0, 1]
AUTO = zcomm.Options(compress="auto")
DEFAULT = 64 * 1024
MBIT = 125_000.0  # bytes per second


def write(path: Path, **files: str) -> None:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name).write_text(text + "\n")


def ethernet(system: Path, name: str, speed: str, operstate: str = "up") -> None:
    write(system / "net" / name, type="1", operstate=operstate, speed=speed)
    (system / "net" / name / "device").mkdir()


def infiniband(system: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    write(system / "infiniband" / name / "ports" / "1", state=state, rate=rate)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands in for /sys/class, on a host without GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(_network, "SYSTEM", tmp_path)
    return tmp_path


def test_network_cards_are_those_that_are_up(system: Path) -> None:
    """As Linux lists them in /sys/class."""
    assert _network.network_cards() == [] and _network.network_rate() is None
    ethernet(system, "eth0", "25000")
    ethernet(system, "eth1", "-1")  # of a virtual machine
    ethernet(system, "eth2", "25000", operstate="down")
    write(system / "net" / "ib0", type="32", operstate="up", speed="400000")  # counted below
    write(system / "net" / "veth0", type="1", operstate="up", speed="10000")
    infiniband(system, "mlx5_0", "400 Gb/sec (4X NDR)")
    infiniband(system, "mlx5_1", "400 Gb/sec (4X NDR)", state="1: DOWN")
    assert _network.network_cards() == [
        {"name": "eth0", "bits_per_second": 25 * 10**9},
        {"name": "eth1", "bits_per_second": None},
        {"name": "mlx5_0:1", "bits_per_second": 400 * 10**9},
    ]
    assert _network.network_rate() == 50e9


def test_cards_that_are_listed_twice_count_once(system: Path) -> None:
    """Ethernet cards with RDMA are under both names. Cards of one kind add up."""
    for number in range(2):
        ethernet(system, f"eth{number}", "100000")
        infiniband(system, f"mlx5_{number}", "100 Gb/sec (4X EDR)")
    assert _network.network_rate() == 25e9


@pytest.mark.parametrize("text", ["", "0", "-1", "4294967295", "99999999999999999999", "fast", "1.5", "\udcff\udcfe"])
def test_a_card_that_tells_no_speed_is_unknown(system: Path, text: str) -> None:
    ethernet(system, "eth0", "")
    (system / "net" / "eth0" / "speed").write_bytes(os.fsencode(text))
    infiniband(system, "mlx5_0", "")
    (system / "infiniband" / "mlx5_0" / "ports" / "1" / "rate").write_bytes(os.fsencode(text))
    (system / "infiniband" / "mlx5_1" / "ports" / "1" / "rate").mkdir(parents=True)  # not even a file
    assert [card["bits_per_second"] for card in _network.network_cards()] == [None, None]
    assert _network.network_rate() is None


def chosen(*rates: float | None, gpus: bool = False, num_nodes: int = 2) -> int:
    return threshold.choose([{"rate": rate, "gpus": gpus} for rate in rates], num_nodes)[0]


def test_the_threshold_is_where_saved_bytes_take_as_long_as_the_call_costs() -> None:
    """100 us at half of the bytes: 25,000 bytes of 1 Gbit/s, which is nearest to 32 KiB."""
    assert chosen(1000 * MBIT) == 32 * 1024
    assert chosen(1000 * MBIT, 300 * MBIT) == 8 * 1024
    assert chosen(10 * MBIT) == 4 * 1024
    for fast in (10_000 * MBIT, 3_200_000 * MBIT):
        assert chosen(fast) == DEFAULT
    assert chosen(10_000 * MBIT, gpus=True) == 256 * 1024
    assert chosen(3_200_000 * MBIT, gpus=True) == 1024 * 1024
    for gpus in (False, True):
        assert chosen(1000 * MBIT, None, gpus=gpus) == DEFAULT
    assert chosen(None, num_nodes=1) == DEFAULT
    assert chosen(None, num_nodes=1, gpus=True) == 1024 * 1024


def in_group(options: Any = AUTO) -> tuple[int, str]:
    """``min_bytes`` and its reason in a new group of the world's ranks."""
    group = dist.new_group(pg_options=options)
    dist.barrier(group)
    return backend_of(group).options.min_bytes, zcomm.stats(group).threshold


def test_ranks_agree_on_the_slowest_link(system: Path) -> None:
    def body() -> list[tuple[int, str]]:
        mine = system / str(dist.get_rank())
        _network.SYSTEM = mine
        unknown = in_group()
        ethernet(mine, "eth0", ("1000", "300")[dist.get_rank()])
        return [unknown, in_group(), in_group(zcomm.Options(compress="auto", node_size=2))]

    unknown, slowest, one_node = run(body, nodes=NODES)[0]
    assert unknown == (DEFAULT, "calls below 64 KiB stay exact, as no network card of rank 0's host tells its speed")
    assert slowest == (8192, "calls below 8 KiB stay exact, as the slowest link between nodes has 0.3 Gbit/s")
    assert one_node == (DEFAULT, "calls below 64 KiB stay exact, as all ranks are in one node")


def test_what_the_options_say_wins(system: Path, tmp_path: Path) -> None:
    ethernet(system, "eth0", "300")
    file = table(tmp_path, SLOW_LINK)

    def body() -> None:
        for given in (
            zcomm.Options(compress="auto", min_bytes=DEFAULT),
            zcomm.Options(compress="auto", decisions=file),
            zcomm.Options(compress="always"),
        ):
            assert in_group(given) == (DEFAULT, "")
        os.environ["ZCOMM_MIN_BYTES"] = "512"
        assert in_group(zcomm.Options(compress="auto")) == (512, "")

    run(body, nodes=NODES)


def test_calls_from_the_threshold_on_are_decided_about(system: Path) -> None:
    """A group of the world's ranks has the world's options, and its own threshold."""
    ethernet(system, "eth0", "300")

    def body() -> None:
        assert newly_counted(lambda: gather(mine(1023))) == {"all_gather: min_bytes": 1}
        assert "all_gather: min_bytes" not in newly_counted(lambda: gather(mine(1024)))
        line, *decisions = zcomm.report().decisions
        assert line == zcomm.stats().threshold and len(decisions) == 1
        assert f"auto: {line}\nauto: all_gather of 8 KiB and more" in str(zcomm.stats())
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        assert backend_of(alone).options.min_bytes == DEFAULT

    run(body, nodes=NODES, options=AUTO)


def test_a_rank_that_names_the_default_differs_from_one_that_follows_the_link() -> None:
    def body() -> str:
        given: dict[str, Any] = [{}, {"min_bytes": DEFAULT}][dist.get_rank()]
        with pytest.raises(RuntimeError) as raised:
            in_group(zcomm.Options(compress="auto", **given))
        return str(raised.value)

    for message in run(body, nodes=NODES):
        assert "rank 0 has min_bytes=None, rank 1 has min_bytes=65536" in message
