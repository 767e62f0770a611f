"""How well an outer step uses a link between two sites, and what inner steps lose while fragments travel.

python bench/outer_step.py                                               100 Mbit/s, 50 ms, 0.1 % of the frames lost
python bench/outer_step.py --congestion reno --connections 16            another TCP

Two sites are hosts of the network lab, of one rank and one thread each. Their inner step multiplies matrices; it has as
many parameters as --elements. Whole outer steps are waited for; "busy" is what their all-reduces send, by what the link
could send meanwhile. Inner steps are timed alone and while a fragment is in flight; both are medians. "CPU" is the
share of a processor that a fragment takes from these steps; "wait" is what it leaves to be waited for.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import zcomm
from zcomm_bench.lab import network
from zcomm_bench.spec import parse_size

FORMATS = "exact,int8:64,int4:64,eden2:64"
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
WHOLE_STEPS, TURNS, STEPS_OF_A_TURN = 5, 4, 8
TENSORS = 8
HEADERS = ("format", "MB", "step s", "reduce s", "busy %", "alone ms", "in flight ms", "CPU %", "wait s")


def inner_step(matrix: torch.Tensor) -> float:
    start = time.monotonic()
    for _ in range(10):
        matrix @ matrix
    return time.monotonic() - start


def new_outer_step(elements: int, format: str, every: int, delay: int, connections: int) -> zcomm.outer.OuterStep:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(elements // TENSORS)) for _ in range(TENSORS)]
    sgd = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    return zcomm.outer.OuterStep(sgd, every=every, delay=delay, format=format, connections=connections)


def whole_steps(elements: int, format: str, connections: int) -> dict[str, float]:
    """Return medians of outer steps that nothing hides, and the bytes of one."""
    outer = new_outer_step(elements, format, 1, 0, connections)
    outer.step()
    seconds, reducing = [], []
    for _ in range(WHOLE_STEPS):
        dist.barrier()
        start, waited = time.monotonic(), outer.stats().wait_seconds
        outer.step()
        seconds.append(time.monotonic() - start)
        reducing.append(outer.stats().wait_seconds - waited)
    stats = outer.stats()
    return {
        "seconds": statistics.median(seconds), "reducing": statistics.median(reducing),
        "bytes": stats.sent_bytes // stats.reductions,
    }  # fmt: skip


def inner_steps(elements: int, format: str, connections: int) -> dict[str, float]:
    """Return medians of an inner step's seconds, alone and with a fragment in flight. Return the seconds of waiting and
    of the processor per fragment, too."""
    outer = new_outer_step(elements, format, 2 * STEPS_OF_A_TURN, STEPS_OF_A_TURN, connections)
    matrix = torch.randn(700, 700)
    alone, overlapped = [], []
    before = time.process_time() - time.thread_time()  # of all threads but this one
    for _ in range(2 * STEPS_OF_A_TURN * TURNS):
        seconds = inner_step(matrix)
        (overlapped if outer.stats().in_flight else alone).append(seconds)
        outer.step()
    stats = outer.stats()
    return {
        "alone": statistics.median(alone), "overlapped": statistics.median(overlapped),
        "waited": stats.wait_seconds / stats.reductions,
        "processor": (time.process_time() - time.thread_time() - before) / stats.reductions,
    }  # fmt: skip


def worker(elements: int, formats: str, congestion: str, connections: int) -> None:
    if congestion:
        CONGESTION.write_text(congestion)  # of this host alone
    torch.set_num_threads(1)
    dist.init_process_group("zcomm")
    for format in formats.split(","):
        ours = elements, format, connections
        row = {"format": format, **whole_steps(*ours), **inner_steps(*ours)}
        if dist.get_rank() == 0:
            print(json.dumps({**row, "congestion": CONGESTION.read_text().strip()}), flush=True)
    dist.destroy_process_group()


def main(
    elements: int = 8_000_000,
    formats: Annotated[str, typer.Option(help="Formats, joined by commas.")] = FORMATS,
    rate: str = "100mbit",
    round_trip_ms: float = 50.0,
    loss_percent: float = 0.1,
    chunk: Annotated[str, typer.Option(help="Values of a part that are sent as one piece.")] = "1M",
    congestion: Annotated[str, typer.Option(help="TCP's congestion control, by default the kernel's choice.")] = "",
    connections: Annotated[int, typer.Option(help="TCP connections each way.")] = 8,
) -> None:
    if "RANK" in os.environ:
        return worker(elements, formats, congestion, connections)
    rows = []
    ours = [
        f"--elements={elements}",
        f"--formats={formats}",
        f"--congestion={congestion}",
        f"--connections={connections}",
    ]
    result = network.launch(
        [sys.executable, __file__, *ours],
        nodes="2x1", rate=rate, round_trip_ms=round_trip_ms, loss_percent=loss_percent,
        env={"ZCOMM_CHUNK_BYTES": str(parse_size(chunk))}, on_line=lambda line: rows.append(json.loads(line)),
    )  # fmt: skip
    limit = network.parse_limit(rate)
    link = f"{rate}, {round_trip_ms:g} ms, {loss_percent:g} % lost, {rows[0]['congestion']}, {connections} connections"
    table = Table(title=f"{elements} parameters in chunks of {chunk}: {link}", caption=result.note)
    for header in HEADERS:
        table.add_column(header, justify="right")
    for row in rows:
        busy = f"{100 * row['bytes'] / row['reducing'] / limit:.0f}" if limit and result.isolated else ""
        table.add_row(
            row["format"], f"{row['bytes'] / 1e6:.2f}", f"{row['seconds']:.2f}",
            f"{row['reducing']:.2f}", busy, f"{1e3 * row['alone']:.0f}", f"{1e3 * row['overlapped']:.0f}",
            f"{100 * row['processor'] / row['overlapped'] / STEPS_OF_A_TURN:.1f}", f"{row['waited']:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
