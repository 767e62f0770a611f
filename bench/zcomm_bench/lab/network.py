"""A network on one machine: hosts as network namespaces, joined by a switch, with a limited link each.

    with NetLab(2, rate="100mbit") as lab:
        lab.run(0, ["python", "server.py"])
        print(lab.tx_bytes(0))

    launch(["python", "train.py"], nodes="2x2", rate="100mbit")

Works as root, and as an ordinary user where the kernel allows user namespaces. Where it allows neither, the hosts are
the machine itself: `isolated` is false, `note` says why, there is no limit, and bytes cannot be counted (None).
The links are built by pyroute2.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

from zcomm._units import parse_nodes, parse_rate

_SCRIPT = str(Path(__file__).with_name("_netns.py"))
# -I -S: the script must start fast and must not find this package's modules on its path.
_INTERPRETER = [sys.executable, "-I", "-S", _SCRIPT]
_RELAY = str(Path(__file__).with_name("_relay.py"))
MAX_HOSTS = 64
_LEAST_RATE, _MOST_RATE = 1_000, 4_250_000_000  # bytes per second, which tbf counts in 32 bits
_POLL_SECONDS = 0.05
_LAST_SECONDS = 1.0  # for the end of rank 0's output, once the ranks have ended
_LOG_LINES = 40


def parse_limit(text: str | None) -> float | None:
    """Bytes per second of "100mbit", as `parse_rate` reads it; None for None and "unlimited"."""
    if text is None or text == "unlimited":
        return None
    rate = parse_rate(text)
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise ValueError(f"expected a rate between 8kbit and 34gbit, got {text!r}")
    return rate


class _NoNamespaces(Exception):
    """The machine does not allow or cannot make what the lab needs; the message says which part."""


class NetLab:
    """`num_hosts` hosts with one interface each, whose traffic is limited to `rate` in both directions. Without
    `isolate` they are the machine itself, and nothing is built.

    With `round_trip_ms` or `loss_percent` a process of the lab carries all frames. It delays each by half the round
    trip, and loses some by chance. It needs a processor: unlimited links become links of a few hundred Mbit/s.

    `addresses[host]` is the address of a host and `interface` the name of its interface. Processes of a host talk to
    each other at memory speed. Everything is torn down on `close`. When this process is killed, namespaces and the
    processes that it started go all the same, but what those have started in the background stays.
    """

    def __init__(
        self,
        num_hosts: int,
        rate: str | None = None,
        *,
        round_trip_ms: float = 0.0,
        loss_percent: float = 0.0,
        isolate: bool = True,
    ) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"hosts: expected 1 to {MAX_HOSTS}, got {num_hosts}")
        if not 0 <= round_trip_ms < math.inf:
            raise ValueError(f"round_trip_ms: expected at least 0, got {round_trip_ms}")
        if not 0 <= loss_percent < 100:
            raise ValueError(f"loss_percent: expected 0 to less than 100, got {loss_percent}")
        rate_bytes = parse_limit(rate)
        self.num_hosts = num_hosts
        self.addresses = [f"10.42.0.{host + 1}" for host in range(num_hosts)]
        self.interface = "eth0"
        self.isolated = True
        self.note = ""
        self._networks: list[int] = []
        self._user = -1
        self._processes: list[subprocess.Popen[str]] = []
        self._relay: subprocess.Popen[str] | None = None
        if not isolate:
            self._be_the_machine("")
            return
        try:
            self._build(None if rate_bytes is None else int(rate_bytes), round_trip_ms / 2e3, loss_percent / 100)
        except _NoNamespaces as error:
            self._be_the_machine(f"no network namespaces here ({error}): loopback, no limit, bytes are not counted")

    def _be_the_machine(self, note: str) -> None:
        self.isolated = False
        self.note = note
        self.addresses = ["127.0.0.1"] * self.num_hosts
        self.interface = "lo"

    def _build(self, rate_bytes: int | None, delay: float, loss: float) -> None:
        if importlib.util.find_spec("pyroute2") is None:
            raise ImportError("the network lab needs pyroute2: pip install pyroute2")
        relayed = delay > 0 or loss > 0
        spec = json.dumps({"addresses": self.addresses, "rate_bytes": rate_bytes, "relayed": relayed, "path": sys.path})
        ours, theirs = socket.socketpair()
        with ours, theirs:
            descriptor = theirs.fileno()
            builder = subprocess.run(
                [*_INTERPRETER, "build", str(descriptor), spec],
                pass_fds=[descriptor],
                stderr=subprocess.PIPE,
                text=True,
            )
            if builder.returncode != 0:
                lines = builder.stderr.strip().splitlines()
                raise _NoNamespaces(lines[-1] if lines else f"exit status {builder.returncode}")
            has_user, descriptors, _, _ = socket.recv_fds(ours, 1, 3 * self.num_hosts + 2)
        num_networks = self.num_hosts + 1 + int(has_user)
        self._networks, taps = descriptors[:num_networks], descriptors[num_networks:]
        if has_user == b"1":
            self._user = self._networks.pop()
        if relayed:
            self._start_relay(taps[self.num_hosts :], taps[: self.num_hosts], delay, loss)

    def _start_relay(self, hosts: list[int], ports: list[int], delay: float, loss: float) -> None:
        """Start the process that carries all frames, which keeps the TAP devices."""
        taps = [*hosts, *ports]
        here = [str(os.getpid()), "-1", "-1"]  # not in a namespace, but tied to the lab like what is
        command = [*_INTERPRETER, "enter", *here, sys.executable, "-I", "-S", _RELAY, str(delay), str(loss)]
        self._relay = subprocess.Popen([*command, *map(str, taps)], pass_fds=taps, start_new_session=True, text=True)
        for tap in taps:
            os.close(tap)

    def __enter__(self) -> NetLab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs and let the namespaces go."""
        for process in (*self._processes, *([] if self._relay is None else [self._relay])):
            kill(process)
        for descriptor in (*self._networks, self._user):
            if descriptor >= 0:
                os.close(descriptor)
        self._processes, self._networks, self._user = [], [], -1

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **arguments: Any
    ) -> subprocess.Popen[str]:
        """Start a process on a host; `env` is added to this process's environment.

        It dies with the thread that calls this, so call from one that lives long enough.
        """
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"expected a host below {self.num_hosts}, got {host}")
        command = list(argv)
        if self.isolated:
            if not self._networks:
                raise RuntimeError("the network lab is closed")
            descriptors = [descriptor for descriptor in (self._user, self._networks[host]) if descriptor >= 0]
            arguments["pass_fds"] = [*arguments.get("pass_fds", ()), *descriptors]
            command = [*_INTERPRETER, "enter", str(os.getpid()), str(self._user), str(self._networks[host]), *command]
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            text=True,
            errors="replace",
            start_new_session=True,
            **arguments,
        )
        self._processes.append(process)
        return process

    def run(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end and return what it printed; raises CalledProcessError if it fails."""
        with self.popen(host, argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except BaseException:
                kill(process)
                raise
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, list(argv), output, errors)
        return subprocess.CompletedProcess(list(argv), 0, output, errors)

    def tx_bytes(self, host: int) -> int | None:
        """Bytes that have left a host through its interface, by the kernel's counter; None where there is no lab."""
        if not self.isolated:
            return None
        table = self.run(host, ["cat", "/proc/self/net/dev"]).stdout
        return interface_tx_bytes(table, self.interface)


def interface_tx_bytes(table: str, interface: str) -> int:
    """The transmit counter of an interface, out of the text of /proc/self/net/dev.

    Not out of /sys/class/net, which shows the namespace in which /sys was mounted.
    """
    for line in table.splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    raise ValueError(f"no interface {interface!r}")


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that `NetLab.popen` started, and its children, which may outlive it."""
    # Ids of groups that have members are not given away. So a process with the id of one that was reaped is a stranger.
    if process.returncode is None or not Path(f"/proc/{process.pid}").exists():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class RankFailed(RuntimeError):
    """A rank of `launch` ended with an error; the message holds the end of what it wrote to stderr."""


@dataclass(frozen=True)
class LaunchResult:
    """What `launch` saw: bytes that left each host (None where not isolated) and how long the ranks ran."""

    tx_bytes: list[int | None]
    seconds: float
    isolated: bool
    note: str


def launch(
    argv: Sequence[str],
    *,
    nodes: str = "2x2",
    rate: str | None = None,
    round_trip_ms: float = 0.0,
    loss_percent: float = 0.0,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], object] = print,
    timeout: float | None = None,
    isolate: bool = True,
) -> LaunchResult:
    """Run a command as every rank of a job: as torchrun would, with every node a host of a network lab, or, without
    `isolate`, the machine itself.

    `on_line` gets rank 0's standard output line by line as it comes. If a rank fails the others are killed and
    `RankFailed` is raised; `timeout` bounds the whole job in seconds.
    """
    num_nodes, ranks_per_node = parse_nodes(nodes)
    made = NetLab(num_nodes, rate, round_trip_ms=round_trip_ms, loss_percent=loss_percent, isolate=isolate)
    with made as lab, tempfile.TemporaryDirectory() as folder, raise_on_sigterm():
        common = {
            "WORLD_SIZE": str(num_nodes * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "MASTER_ADDR": lab.addresses[0],
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": lab.interface,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        start = time.monotonic()
        ranks = []
        logs = [Path(folder, f"rank{rank}.log") for rank in range(num_nodes * ranks_per_node)]
        for rank, log in enumerate(logs):
            node, local_rank = divmod(rank, ranks_per_node)
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(node)}
            with log.open("w") as file:
                output = subprocess.PIPE if rank == 0 else file
                ranks.append(lab.popen(node, argv, {**common, **own}, stdout=output, stderr=file))
        _run_follower(ranks, logs, on_line, None if timeout is None else start + timeout)
        seconds = time.monotonic() - start
        return LaunchResult([lab.tx_bytes(node) for node in range(num_nodes)], seconds, lab.isolated, lab.note)


def _run_follower(
    ranks: list[subprocess.Popen[str]], logs: list[Path], on_line: Callable[[str], object], deadline: float | None
) -> None:
    """Pass rank 0's lines on until every rank has ended well."""
    lines: queue.Queue[str] = queue.Queue()
    output = ranks[0].stdout
    assert output is not None
    reader = threading.Thread(target=_read_lines, args=(output, lines), daemon=True)
    reader.start()
    statuses: list[int | None] = [None] * len(ranks)
    while None in statuses and not any(statuses) and (deadline is None or time.monotonic() < deadline):
        with suppress(queue.Empty):
            on_line(lines.get(timeout=_POLL_SECONDS))
        statuses = [process.poll() for process in ranks]
    if None not in statuses:
        reader.join(_LAST_SECONDS)  # a child that rank 0 left in the background may keep the output open
    for process in ranks:
        kill(process)
    reader.join(_LAST_SECONDS)
    for _ in range(lines.qsize()):
        on_line(lines.get())
    failed = [(status, rank) for rank, status in enumerate(statuses) if status]
    if failed:
        status, rank = min(failed)  # below 0: killed, which others may have failed of
        raise RankFailed(_failure(rank, status, logs[rank]))
    if None in statuses:
        slow = [rank for rank, status in enumerate(statuses) if status is None]
        raise TimeoutError(f"ranks {slow} still ran at the timeout")


def _read_lines(output: IO[str], lines: queue.Queue[str]) -> None:
    for line in output:
        lines.put(line.rstrip("\n"))


def _failure(rank: int, status: int, log: Path) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    written = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"rank {rank} {how}:", *written])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that ranks and temporary files are cleaned up as they are after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers; elsewhere the kernel still kills the ranks with us.
        return

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
