"""What losing sites costs: three sites train in the network lab. One at a time is killed, and started anew.

python bench/outer_sites.py                                   ten losses; 100 Mbit/s, 50 ms: half an hour
python bench/outer_sites.py --losses 3 --steps 400

Each site is a host of the lab, with examples/diloco.py; a fourth one has the meeting point. Another run is undisturbed.
Both have the same number of inner steps. The result is the loss on text that no site trains on, of the model that
all sites have at the end. A site that is started anew has lost its inner optimizer's state and its place in the data.
"""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zcomm_bench.lab.network import NetLab, kill

EXAMPLE = Path(__file__).parents[1] / "examples" / "diloco.py"
SITES, PORT = 3, 29511


class Run:
    """Sites in a lab, and what they print: the site, the seconds since the start, and the object."""

    def __init__(self, lab: NetLab, arguments: list[str]) -> None:
        self._lab, self._arguments = lab, arguments
        self.events: list[tuple[int, float, dict[str, Any]]] = []
        self._began = time.monotonic()
        point = [sys.executable, "-m", "zcomm", "meet", f"--port={PORT}", f"--least={SITES}"]
        self._point = lab.popen(SITES, point, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._point.stdout is not None
        self._point.stdout.readline()
        self._sites = {site: self.start(site) for site in range(SITES)}

    def start(self, site: int) -> subprocess.Popen[str]:
        meeting = f"{self._lab.addresses[SITES]}:{PORT}"
        command = [sys.executable, str(EXAMPLE), f"--meeting={meeting}", f"--site={site}", *self._arguments]
        env = {"GLOO_SOCKET_IFNAME": self._lab.interface, "OMP_NUM_THREADS": "1", "GROUP_RANK": str(site)}
        process = self._lab.popen(site, command, env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        threading.Thread(target=self._read, args=(site, process), daemon=True).start()
        return process

    def _read(self, site: int, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or []:
            if line.startswith("{"):
                self.events.append((site, time.monotonic() - self._began, json.loads(line)))

    def reached(self) -> int:
        return max((event.get("step", 0) for _, _, event in self.events), default=0)

    def lose(self, site: int, steps: int) -> None:
        """Kill a site, start it anew when the others have made as many more inner steps, and wait until it trains."""
        kill(self._sites[site])
        until = self.reached() + steps
        while self.reached() < until:
            time.sleep(0.1)
        self._sites[site] = self.start(site)
        known = len(self.events)
        while not any(of == site for of, _, _ in self.events[known:]):
            time.sleep(0.1)

    def end(self) -> tuple[float, float]:
        """Wait for all sites. Return the loss and the seconds."""
        for process in self._sites.values():
            if process.wait() != 0:
                raise RuntimeError("a site has failed")
        seconds = time.monotonic() - self._began
        kill(self._point)
        time.sleep(0.5)  # for the last lines
        losses = {event["held_out_loss"] for _, _, event in self.events if "step" not in event}
        if len(losses) != 1:
            raise RuntimeError(f"expected one loss at all sites, got {losses}")
        return losses.pop(), seconds


def main(
    losses: int = 10,
    steps: int = 4000,
    every: int = 50,
    rate: str = "100mbit",
    round_trip_ms: float = 50.0,
    out: Annotated[Path | None, typer.Option(help="A file for what the sites print, as JSON.")] = None,
) -> None:
    arguments = [f"--steps={steps}", f"--every={every}", "--timeout=20"]
    results, kept = [], {}
    draw = random.Random(0)
    for number in (0, losses):
        with NetLab(SITES + 1, rate, round_trip_ms=round_trip_ms) as lab:
            run = Run(lab, arguments)
            for loss in range(number):
                due = (loss + 1) * steps // (number + 1)
                while run.reached() < due:
                    time.sleep(0.1)
                run.lose(draw.randrange(SITES), every)
            results.append((number, *run.end()))
            kept[str(number)] = run.events
            note = lab.note
    table = Table(title=f"{SITES} sites, {rate}, {round_trip_ms:g} ms, {steps} inner steps", caption=note)
    for header in ("losses of a site", "loss at the end", "difference %", "seconds"):
        table.add_column(header, justify="right")
    for number, loss, seconds in results:
        difference = 100 * (loss / results[0][1] - 1)
        table.add_row(str(number), f"{loss:.4f}", f"{difference:+.2f}", f"{seconds:.0f}")
    Console().print(table)
    if out is not None:
        out.write_text(json.dumps(kept))


if __name__ == "__main__":
    typer.run(main)
