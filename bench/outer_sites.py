"""What losing sites costs: three sites train in the network lab. One at a time is killed, and started anew.

python bench/outer_sites.py                                   ten losses; 100 Mbit/s, 50 ms: a quarter of an hour
python bench/outer_sites.py --seeds 3 --out bench/results
python bench/outer_sites.py --losses 2 --steps 800
python bench/outer_sites.py --losses 0 --steps 400            two undisturbed runs, which are equal

Each site is a host of the lab, with examples/diloco.py; a fourth one has the meeting point. Each seed of the model and
the batches has two runs of as many inner steps: an undisturbed one, and one with losses. The undisturbed ones of all
seeds come first. The result is the loss on text that no site trains on, of the model that all sites have at the end.
A site that is started anew has lost its inner optimizer's state and its place in the data.
"""

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import results_file
from zcomm_bench.lab.network import NetLab, kill

EXAMPLE = Path(__file__).parents[1] / "examples" / "diloco.py"
SITES, PORT = 3, 29511


class Run:
    """Sites in a lab, and what they print: the site, the seconds since the start, and the object."""

    def __init__(self, lab: NetLab, arguments: list[str], title: str) -> None:
        self._lab, self._arguments, self._title = lab, arguments, title
        self.events: list[tuple[int, float, dict[str, Any]]] = []
        self.changes: list[tuple[str, int, int, float]] = []  # what, the site, the inner step, seconds
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
                self.events.append((site, self._seconds(), json.loads(line)))

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def reached(self) -> int:
        return max((event.get("step", 0) for _, _, event in self.events), default=0)

    def lose(self, site: int, steps: int) -> None:
        """Kill a site, start it anew when the others have made as many more inner steps, and wait until it trains."""
        kill(self._sites[site])
        self._note("lost", site)
        until = self.reached() + steps
        while self.reached() < until:
            time.sleep(0.1)
        self._sites[site] = self.start(site)
        known = len(self.events)
        while not any(of == site for of, _, _ in self.events[known:]):
            time.sleep(0.1)
        self._note("returned", site)

    def _note(self, what: str, site: int) -> None:
        self.changes.append((what, site, self.reached(), self._seconds()))
        print(f"{self._title}: site {site} {what}, step {self.reached()}, {self._seconds():.0f} s", flush=True)

    def end(self) -> dict[str, Any]:
        """Wait for all sites. Return the loss, the seconds, and what happened."""
        for process in self._sites.values():
            if process.wait() != 0:
                raise RuntimeError("a site has failed")
        seconds = self._seconds()
        kill(self._point)
        time.sleep(0.5)  # for the last lines
        losses = {event["held_out_loss"] for _, _, event in self.events if "step" not in event}
        if len(losses) != 1:
            raise RuntimeError(f"expected one loss at all sites, got {losses}")
        loss = losses.pop()
        print(f"{self._title}: loss {loss:.4f}, {seconds:.0f} s", flush=True)
        curve = {event["step"]: event["held_out_loss"] for _, _, event in self.events if "step" in event}
        return {"loss": loss, "seconds": seconds, "changes": self.changes, "curve": curve}


def measure(lab: NetLab, seed: int, losses: int, steps: int, every: int) -> dict[str, Any]:
    draw = random.Random(seed)
    arguments = [f"--steps={steps}", f"--every={every}", f"--seed={seed}", "--decay", "--timeout=20"]
    run = Run(lab, arguments, f"seed {seed}, {losses or 'no'} losses")
    for loss in range(losses):
        due = (loss + 1) * steps // (losses + 1)
        while run.reached() < due:
            time.sleep(0.1)
        run.lose(draw.randrange(SITES), every)
    return {"seed": seed, "losses": losses, **run.end()}


def show(pairs: list[tuple[Any, Any]], title: str, note: str) -> None:
    """Print a row for each seed, and the mean difference with its standard error."""
    differences = [100 * (disturbed["loss"] / calm["loss"] - 1) for calm, disturbed in pairs]
    mean = f"{statistics.fmean(differences):+.2f}"
    if len(differences) > 1:
        mean += f" ± {statistics.stdev(differences) / len(differences) ** 0.5:.2f}"
    table = Table(title=title, caption=note, show_footer=True)
    table.add_column("seed", "mean", justify="right")
    for header in ("undisturbed: loss", "seconds", f"{pairs[0][1]['losses']} losses: loss", "seconds"):
        table.add_column(header, justify="right")
    table.add_column("difference %", mean, justify="right")
    for runs, difference in zip(pairs, differences, strict=True):
        numbers = [text for run in runs for text in (f"{run['loss']:.4f}", f"{run['seconds']:.0f}")]
        table.add_row(str(runs[0]["seed"]), *numbers, f"{difference:+.2f}")
    Console().print(table)


def keep(folder: Path, pairs: list[tuple[Any, Any]], **facts: Any) -> None:
    """Keep all losses, and the curves of the first seed."""
    isa = results_file.own_isa()
    machine = results_file.cpu_machine(isa)
    runs = [run for pair in pairs for run in pair]
    calm, disturbed = pairs[0]
    points = [
        {"step": step, "calm": loss, "disturbed": disturbed["curve"].get(step)} for step, loss in calm["curve"].items()
    ]
    path = folder / f"outer_sites-{isa}.jsonl"
    changes = [change[:3] for change in disturbed["changes"]]
    results_file.keep(
        path,
        [
            results_file.measured("losses", machine, ("seed", "losses", "loss", "seconds"), runs, **facts),
            results_file.measured("curves", machine, ("step", "calm", "disturbed"), points, changes=changes),
        ],
    )


def main(
    losses: int = 10,
    seeds: Annotated[int, typer.Option(help="Pairs of runs, each with another seed.")] = 1,
    steps: int = 4000,
    every: int = 50,
    rate: str = "100mbit",
    round_trip_ms: float = 50.0,
    out: Annotated[Path | None, typer.Option(help="Folder of results.")] = None,
) -> None:
    runs: dict[tuple[int, bool], Any] = {}
    for is_disturbed in (False, True):
        for seed in range(seeds):
            with NetLab(SITES + 1, rate, round_trip_ms=round_trip_ms) as lab:
                runs[seed, is_disturbed] = measure(lab, seed, losses * is_disturbed, steps, every)
                note = lab.note
    pairs = [(runs[seed, False], runs[seed, True]) for seed in range(seeds)]
    show(pairs, f"{SITES} sites, {rate}, {round_trip_ms:g} ms, {steps} inner steps", note)
    if out is not None:
        keep(out, pairs, rate=rate, round_trip_ms=round_trip_ms, steps=steps, every=every)


if __name__ == "__main__":
    typer.run(main)
