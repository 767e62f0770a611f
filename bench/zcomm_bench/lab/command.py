"""The network lab from the command line: commands on hosts with limited links, and a check that the limits hold.

python -m zcomm_bench lab run --hosts 2 --rate 100mbit -- CMD...       the command on every host
python -m zcomm_bench lab ranks --nodes 2x2 --rate 1gbit -- CMD...     the command as every rank of a job, like torchrun
python -m zcomm_bench lab selfcheck --rate 100mbit                     what one TCP stream gets through
python -m zcomm_bench lab selfcheck --rate 100mbit --round-trip-ms 50 --loss-percent 0.1     the same over the internet
"""

import json
import socket
import subprocess
import sys
import time
from typing import Annotated

import typer

from zcomm_bench.lab import network
from zcomm_bench.lab.usage import checked, refusals

PORT = 5201
CHUNK_BYTES = 1 << 20

app = typer.Typer(
    help=(__doc__ or "").replace("\npython", "\n\npython"),
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)


Rate = Annotated[
    str,
    typer.Option(
        callback=checked(network.parse_limit),
        help='Limit of every link, each way: "100mbit", "2.5gbit" or "unlimited".',
    ),
]
RoundTrip = Annotated[float, typer.Option(min=0, help="Milliseconds from a host to another and back.")]
QuantizationError = Annotated[
    float, typer.Option(min=0, max=99, help="Share of the frames between hosts that are lost.")
]
Command = Annotated[list[str], typer.Argument(help="The command, after --.", metavar="CMD...")]


def warn(note: str) -> None:
    if note:
        typer.echo(f"warning: {note}", err=True)


@app.command()
def run(
    command: Command,
    hosts: int = 2,
    rate: Rate = "unlimited",
    round_trip_ms: RoundTrip = 0.0,
    loss_percent: QuantizationError = 0.0,
) -> None:
    """Run a command on every host at once; HOST is its number, HOSTS the addresses of all, joined by commas."""
    with refusals():
        lab = network.NetLab(hosts, rate, round_trip_ms=round_trip_ms, loss_percent=loss_percent)
    with network.raise_on_sigterm(), lab:
        warn(lab.note)
        common = {"HOSTS": ",".join(lab.addresses)}
        processes = [lab.popen(host, command, {**common, "HOST": str(host)}) for host in range(hosts)]
        statuses = [process.wait() for process in processes]
        for host in range(hosts):
            typer.echo(f"host {host}: exit status {statuses[host]}, sent {lab.tx_bytes(host)} bytes", err=True)
    raise typer.Exit(next((1 for status in statuses if status != 0), 0))


@app.command()
def ranks(
    command: Command,
    nodes: str = "2x2",
    rate: Rate = "unlimited",
    round_trip_ms: RoundTrip = 0.0,
    loss_percent: QuantizationError = 0.0,
) -> None:
    """Run a command as every rank of a job and print what rank 0 prints."""
    try:
        with refusals():
            result = network.launch(
                command, nodes=nodes, rate=rate, round_trip_ms=round_trip_ms, loss_percent=loss_percent
            )
    except network.RankFailed as error:
        raise SystemExit(str(error)) from None
    warn(result.note)
    typer.echo(f"{result.seconds:.1f} s, bytes sent by each node: {result.tx_bytes}", err=True)


@app.command()
def selfcheck(
    rate: Rate = "100mbit", seconds: float = 3.0, round_trip_ms: RoundTrip = 0.0, loss_percent: QuantizationError = 0.0
) -> None:
    """Measure a TCP stream from one host to another and print it beside the limit, as one JSON line."""
    with refusals():
        lab = network.NetLab(2, rate, round_trip_ms=round_trip_ms, loss_percent=loss_percent)
    with network.raise_on_sigterm(), lab:
        warn(lab.note)
        here = [sys.executable, "-m", "zcomm_bench", "lab"]
        sink = lab.popen(1, [*here, "sink", lab.addresses[1]], stdout=subprocess.PIPE)
        assert sink.stdout is not None
        sink.stdout.readline()  # it listens
        before = lab.tx_bytes(0)
        source = lab.run(0, [*here, "source", lab.addresses[1], str(seconds)])
        measured = json.loads(source.stdout)
        after = lab.tx_bytes(0)
        limit = network.parse_limit(rate) if lab.isolated else None
        record = {
            "limit_mbit": None if limit is None else limit * 8 / 1e6,
            "stream_mbit": round(measured["bytes"] * 8 / measured["seconds"] / 1e6, 1),
            "payload_bytes": measured["bytes"],
            "tx_bytes": None if before is None or after is None else after - before,
        }
        typer.echo(json.dumps(record))


@app.command(hidden=True)
def sink(address: str) -> None:
    """Receive one stream to its end and confirm it."""
    with socket.create_server((address, PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
        with connection:
            while connection.recv(CHUNK_BYTES):
                pass
            connection.sendall(b"x")


@app.command(hidden=True)
def source(address: str, seconds: float) -> None:
    """Send for some seconds; print the bytes, and the time until the receiver had them all."""
    payload = bytes(CHUNK_BYTES)
    sent = 0
    with socket.create_connection((address, PORT)) as connection:
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            connection.sendall(payload)
            sent += len(payload)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(json.dumps({"bytes": sent, "seconds": time.monotonic() - start}))
