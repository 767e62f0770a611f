"""The network lab: names, byte counts, failures and what is left behind. Nothing here measures time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyroute2")

from zcomm_bench.lab.network import NetLab, RankFailed, interface_tx_bytes, kill, launch, parse_limit

PAYLOAD = 1_000_000
SEND = f"""
import socket, sys
if sys.argv[1] == "receive":
    with socket.create_server((sys.argv[2], 5201)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        while connection.recv(65536):
            pass
        connection.sendall(b"x")
else:
    with socket.create_connection((sys.argv[2], 5201)) as connection:
        connection.sendall(bytes({PAYLOAD}))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
"""


@pytest.fixture
def lab() -> Iterator[NetLab]:
    with NetLab(2, "1gbit") as lab:
        if not lab.isolated:
            pytest.skip(lab.note)
        yield lab


def namespaces(lab: NetLab) -> set[str]:
    return {f"net:[{os.fstat(descriptor).st_ino}]" for descriptor in lab._networks}


def in_use() -> set[str]:
    """The network namespaces that any process is in or holds open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns" / "net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                found.add(os.readlink(link))
            except OSError:
                continue
    return found


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until_dead(pid: int) -> None:
    for _ in range(200):
        if not is_alive(pid):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} still lives")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 12.5e6), ("2.5gbit", 312.5e6), ("64kbit", 8e3), ("unlimited", None), (None, None)],
)
def test_limits_parse(text: str | None, rate: float | None) -> None:
    assert parse_limit(text) == rate


@pytest.mark.parametrize("text", ["", "100mb", "0mbit", "7kbit", "40gbit"])
def test_bad_limits_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected a rate"):
        parse_limit(text)


def test_counter_is_the_transmit_column() -> None:
    table = "Inter-| Receive\n face |bytes\n  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    assert interface_tx_bytes(table, "eth0") == 9
    with pytest.raises(ValueError, match="eth1"):
        interface_tx_bytes(table, "eth1")


def test_bytes_between_hosts_are_counted(lab: NetLab) -> None:
    before = [lab.tx_bytes(0), lab.tx_bytes(1)]
    receiver = lab.popen(1, [sys.executable, "-c", SEND, "receive", lab.addresses[1]], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    lab.run(0, [sys.executable, "-c", SEND, "send", lab.addresses[1]], timeout=60)
    receiver.communicate(timeout=60)
    sent, answered = ((lab.tx_bytes(host) or 0) - (before[host] or 0) for host in (0, 1))
    # Headers cost a few percent; only acknowledgements come back.
    assert PAYLOAD < sent < 1.1 * PAYLOAD
    assert 0 < answered < 0.2 * PAYLOAD


def test_bytes_inside_a_host_are_not_counted(lab: NetLab) -> None:
    before = lab.tx_bytes(0) or 0
    receiver = lab.popen(0, [sys.executable, "-c", SEND, "receive", lab.addresses[0]], stdout=subprocess.PIPE)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    lab.run(0, [sys.executable, "-c", SEND, "send", lab.addresses[0]], timeout=60)
    assert (lab.tx_bytes(0) or 0) - before < 10_000


def test_run_reports_failure(lab: NetLab) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failure:
        lab.run(0, ["sh", "-c", "echo oh >&2; exit 3"])
    assert (failure.value.returncode, failure.value.stderr) == (3, "oh\n")


def test_nothing_is_left_after_an_exception(lab: NetLab) -> None:
    made = namespaces(lab)
    with pytest.raises(KeyError), lab:
        process = lab.popen(0, ["sleep", "1000"])
        assert made <= in_use()
        raise KeyError
    assert not is_alive(process.pid)
    assert not made & in_use()
    with pytest.raises(RuntimeError, match="closed"):
        lab.run(0, ["true"])


def test_nothing_is_left_after_a_kill(lab: NetLab) -> None:
    code = """
import os, time
from zcomm_bench.lab.network import NetLab
lab = NetLab(2, round_trip_ms=1)
process = lab.popen(0, ["sleep", "1000"])
while os.readlink(f"/proc/{process.pid}/exe").find("sleep") < 0:
    time.sleep(0.01)
print(process.pid, lab._relay.pid, *(os.fstat(descriptor).st_ino for descriptor in lab._networks), flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, relay, *inodes = map(int, owner.stdout.readline().split())
        made = {f"net:[{inode}]" for inode in inodes}
        assert len(made) == 3
        owner.send_signal(signal.SIGKILL)
    wait_until_dead(pid)
    wait_until_dead(relay)
    assert not made & in_use()


def test_launch_sets_the_environment_of_every_rank() -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK OMP_NUM_THREADS EXTRA"
    lines: list[str] = []
    # Only rank 0 is heard, so every rank checks for itself, and a wrong one fails the launch.
    check = f"""
import os
rank, *others = [os.environ[name] for name in {names!r}.split()]
node, local = divmod(int(rank), 2)
assert others == ["4", str(local), "2", str(node), "1", "yes"], others
print("rank", rank, os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"])
"""
    result = launch([sys.executable, "-c", check], nodes="2x2", env={"EXTRA": "yes"}, on_line=lines.append, timeout=60)
    where = "10.42.0.1 eth0" if result.isolated else "127.0.0.1 lo"
    assert lines == [f"rank 0 {where}"]
    assert all((count is not None) == result.isolated for count in result.tx_bytes)


def test_launch_shows_the_failing_rank_and_kills_the_rest() -> None:
    with pytest.raises(RankFailed, match=r"rank 2 exited with status 3:\nbroken"):
        launch(["sh", "-c", '[ "$RANK" = 2 ] && echo broken >&2 && exit 3; exec sleep 1000'], timeout=60)


def test_launch_stops_at_its_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        launch(["sleep", "1000"], nodes="1x2", timeout=0.5)


def test_output_that_is_no_text_is_passed_on() -> None:
    lines: list[str] = []
    launch(["printf", r"a\n\377\nb\n"], nodes="1x1", on_line=lines.append, timeout=30)
    assert lines == ["a", "\ufffd", "b"]


def test_the_last_lines_of_a_rank_that_fails_are_passed_on() -> None:
    lines: list[str] = []
    with pytest.raises(RankFailed, match="rank 0 exited with status 3"):
        launch(["sh", "-c", "seq 100000; exit 3"], nodes="1x1", on_line=lines.append, timeout=60)
    assert len(lines) == 100_000 and lines[-1] == "100000"


def test_launch_does_not_wait_for_what_a_rank_left_in_the_background() -> None:
    lines: list[str] = []
    launch(["sh", "-c", "sleep 1000 & echo $!"], nodes="1x1", on_line=lines.append, timeout=30)
    wait_until_dead(int(lines[0]))


def test_children_of_processes_that_have_ended_are_killed() -> None:
    with NetLab(1, isolate=False) as lab:
        child = int(lab.run(0, ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], timeout=60).stdout)
        lab.run(0, ["true"], timeout=60)
        assert is_alive(child)
    wait_until_dead(child)


def test_a_stranger_with_the_id_of_a_process_that_has_ended_is_spared() -> None:
    with NetLab(1, isolate=False) as lab:
        ended, stranger = lab.popen(0, ["true"]), lab.popen(0, ["sleep", "1000"])
        ended.wait(timeout=60)
        ended.pid = stranger.pid
        kill(ended)
        with pytest.raises(subprocess.TimeoutExpired):
            stranger.wait(0.5)


def test_nothing_is_left_of_a_command_that_is_terminated() -> None:
    pytest.importorskip("typer")
    command = [sys.executable, "-m", "zcomm_bench", "lab", "run", "--hosts", "1", "--"]
    shell = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    with subprocess.Popen([*command, *shell], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.terminate()
        assert owner.wait(timeout=60) == 128 + signal.SIGTERM
    wait_until_dead(child)


PROBE = """
import socket, sys, time
role, address = sys.argv[1:]
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if role == "receive":
    datagrams.bind((address, 5202))
    with socket.create_server((address, 5201)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        connection.recv(1)  # after all datagrams: what has not arrived by now and a second is lost
        datagrams.settimeout(1.0)
        count = 0
        try:
            while datagrams.recv(10):
                count += 1
        except TimeoutError:
            print(count)
else:
    begin = time.monotonic()
    connection = socket.create_connection((address, 5201), timeout=60)
    print(time.monotonic() - begin)
    for _ in range(200):
        datagrams.sendto(b"x", (address, 5202))
    connection.sendall(b"x")
"""


def test_frames_are_late_and_some_are_lost() -> None:
    """Streams arrive whole all the same. A slow machine only adds to the round trip."""
    with NetLab(2, "100mbit", round_trip_ms=80, loss_percent=20) as lab:
        if not lab.isolated:
            pytest.skip(lab.note)
        receiver = lab.popen(1, [sys.executable, "-c", PROBE, "receive", lab.addresses[1]], stdout=subprocess.PIPE)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sent = lab.run(0, [sys.executable, "-c", PROBE, "send", lab.addresses[1]], timeout=60)
        assert float(sent.stdout) >= 0.08
        assert 50 < int(receiver.communicate(timeout=60)[0]) < 200
        relay = lab._relay
        assert relay is not None
    wait_until_dead(relay.pid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--hosts", "0"], "hosts: expected 1 to 64, got 0"),
        (["ranks", "--nodes", "2"], "nodes: expected NODESxRANKS such as '2x4', got '2'"),
        (["ranks", "--nodes", "65x1"], "hosts: expected 1 to 64, got 65"),
        (["selfcheck", "--round-trip-ms", "inf"], "round_trip_ms: expected at least 0, got inf"),
    ],
    ids=str,
)
def test_a_lab_that_cannot_be_is_refused_by_name(arguments: list[str], message: str) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from zcomm_bench.lab.command import app

    command = [] if arguments[0] == "selfcheck" else ["--", "true"]
    done = typer_testing.CliRunner().invoke(app, [*arguments, *command], env={"COLUMNS": "1000"})
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"round_trip_ms": -1}, "round_trip_ms: expected at least 0, got -1"),
        ({"loss_percent": 100}, "loss_percent: expected 0 to less than 100, got 100"),
    ],
)
def test_ways_that_cannot_be_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NetLab(2, **arguments)  # type: ignore[arg-type]
