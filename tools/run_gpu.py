"""All that there is to run on a machine with a GPU: builds zcomm for it, tests it, measures it. For ``make gpu``.

    python3 tools/run_gpu.py [--only STAGE,...] [--seconds N]

Needs torch with CUDA, nvcc, cmake, ninja and scikit-build-core, and no network. Each stage has a limit of time, and one
that fails does not stop the others; the exit status says whether any did. One whose packages are not installed is not
run, which is no failure. Logs: out/gpu. Results: bench/results. If the variable OUT names a folder, a summary and an
archive of both go there.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "out" / "gpu"
RESULTS = ROOT / "bench" / "results"
BUILD = ROOT / "build" / "gpu"
VENV = BUILD / "venv"
GRACE_SECONDS = 8.0  # between the request to end and the end
TAIL_LINES = 60
TOTAL_SECONDS = 570.0
NEEDED = ("torch", "numpy", "pytest", "pytest_timeout", "typer", "rich", "matplotlib", "scikit_build_core")
BLOCKS = "64,128,256,512,1024,2048"

PROBE = """
import json, torch
if not torch.cuda.is_available(): raise SystemExit(f"torch {torch.__version__} sees no GPU")
print(json.dumps({"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}))
"""


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other, in `seconds` together. Without the Python packages that it needs, none."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    needs: Sequence[str] = ()


class Outcome(enum.Enum):
    passed = "passed"
    failed = "failed"
    not_run = "not run"  # for want of a package, which is no failure


@dataclass(frozen=True)
class Ending:
    """How a stage ended; `why` is for the reader: "status 3", "stopped after its 2 s", "needs pyroute2"."""

    name: str
    outcome: Outcome
    why: str
    seconds: float
    log: Path

    @property
    def how(self) -> str:
        return f"{self.outcome.value}: {self.why}" if self.why else self.outcome.value


def python() -> str:
    return str(VENV / "bin" / "python")


def stages() -> list[Stage]:
    """In the order of what is missed most if time runs out."""
    parallel = ["-n", "4", "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
    pytest = [python(), "-m", "pytest", "-q", "tests/gpu", *parallel, "-m", "slow or not slow"]
    codec = [python(), "bench/codec.py", "--device", "cuda", "--dtype", "all", "--block", BLOCKS]
    difference = [python(), "bench/lossless.py", "--device", "cuda"]
    collectives = [python(), "bench/collectives.py", "--device", "cuda"]
    training = [python(), "bench/training_step.py", "--device", "cuda", "--uncompressed", "--turns", "12"]
    training += ["--nodes", "2x1", "--width", "512", "--layers", "8"]
    keep = ["--out", str(RESULTS.relative_to(ROOT))]
    return [
        Stage("build", 170, build_commands()),
        Stage("info", 40, [[python(), "-m", "zcomm", "info"]]),
        Stage("codec", 90, [[*codec, *keep]]),
        Stage("lossless", 60, [[*difference, *keep]]),
        Stage("tests", 230, [[*pytest, "--durations=15", f"--junitxml={LOGS / 'tests.xml'}"]]),
        Stage("collectives", 150, [[*collectives, "--iters", "9", "--seconds", "1"]]),
        Stage("training", 90, [[*training, *keep]], ("pyroute2",)),
    ]


def build_commands() -> list[list[str]]:
    settings = (
        "cmake.define.ZCOMM_CUDA=ON",
        "cmake.define.CMAKE_CUDA_ARCHITECTURES=native",
        f"build-dir={BUILD}/cmake",
    )
    pip = [python(), "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "-v", "-e"]
    zcomm = [*pip, str(ROOT), *(part for setting in settings for part in ("-C", setting))]
    return [zcomm, [*pip, str(ROOT / "bench")]]


def make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of all stages: nvcc, cmake and ninja are found, and nothing is skipped for want of a GPU."""
    folders = [VENV / "bin", Path(sys.executable).parent, Path("/usr/local/cuda/bin")]
    path = os.pathsep.join([*map(str, folders), environment.get("PATH", "")])
    return {**environment, "PATH": path, "ZCOMM_REQUIRE_GPU": "1", "PYTHONUNBUFFERED": "1"}


def make_venv() -> None:
    """A virtual environment that sees all that this Python sees, which may itself be that of a virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(VENV)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    lines = [f"import site; site.addsitedir({folder!r})" for folder in own]
    (VENV / "lib" / version / "site-packages" / "parent.pth").write_text("\n".join(lines) + "\n")


def not_installed(packages: Iterable[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def missing(environment: Mapping[str, str]) -> list[str]:
    """What this machine lacks, in words."""
    lacks = [f"the Python package {name}" for name in not_installed(NEEDED)]
    lacks += [f"{tool} on the PATH" for tool in ("nvcc", "cmake", "ninja", "g++") if not find(tool, environment)]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks.append(f"Python.h in {sysconfig.get_path('include')}")
    return lacks


def load(path: Path) -> Any:
    """A module by itself: zcomm is not built yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def find(tool: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(tool, path=environment["PATH"])


def run_stage(stage: Stage, limit: float, environment: Mapping[str, str], logs: Path = LOGS) -> Ending:
    """Runs the commands of a stage until one fails, or the limit is reached; what they print goes to a log."""
    log, start, why = logs / f"{stage.name}.log", time.monotonic(), ""
    log.write_text("")
    if lacks := not_installed(stage.needs):
        return Ending(stage.name, Outcome.not_run, f"needs {', '.join(lacks)}", 0.0, log)
    if limit < 1:
        return Ending(stage.name, Outcome.failed, "no time was left", 0.0, log)
    try:
        for command in stage.commands:
            status = run_command(command, start + limit - time.monotonic(), environment, log)
            if status != 0:
                why = f"status {status}"
                break
    except subprocess.TimeoutExpired:
        why = f"stopped after its {limit:.0f} s"
    return Ending(stage.name, Outcome.failed if why else Outcome.passed, why, time.monotonic() - start, log)


def run_command(command: Sequence[str], seconds: float, environment: Mapping[str, str], log: Path) -> int:
    """Its exit status. Raises subprocess.TimeoutExpired, once it and all that it started have ended."""
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        # A session of its own, so that all that it starts can be ended with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(max(0.1, seconds))
        finally:
            end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process and its group: those that clean up get the time for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            if number == signal.SIGTERM:
                time.sleep(0.2)


def run_stages(
    every: Sequence[Stage],
    seconds: float,
    environment: Mapping[str, str],
    logs: Path = LOGS,
    say: Callable[[str], object] = print,
) -> list[Ending]:
    """All of them, whatever becomes of one; but nothing without a build."""
    start, endings = time.monotonic(), list[Ending]()
    for stage in every:
        say(f"--- {stage.name}")
        left = seconds - (time.monotonic() - start)
        ending = run_stage(stage, min(stage.seconds, left), environment, logs)
        endings.append(ending)
        say(f"{stage.name}: {ending.how}, {ending.seconds:.0f} s")
        lines = ending.log.read_text(errors="replace").splitlines()
        say("\n".join(lines[-(TAIL_LINES if ending.outcome is Outcome.failed else 3) :]))
        if stage.name == "build" and ending.outcome is not Outcome.passed:
            break
    return endings


def codec_lines(measurement: Any) -> list[str]:
    """The largest size of every dtype and operation: the slowest and the fastest block, as parts of a copy."""
    rows = [row for row in measurement.records if row["codec"] == "zcomm"]
    lines = [f"{'dtype':9} {'operation':24} {'format':5} {'MiB':>6} {'GB/s':>12} {'of a copy':>12}"]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        largest = max(row["values_bytes"] for row in rows if row["dtype"] == dtype)
        here = [row for row in rows if row["dtype"] == dtype and row["values_bytes"] == largest]
        for operation in dict.fromkeys(row["operation"] for row in here):
            for kind in dict.fromkeys(row["format"].partition(":")[0] for row in here):
                these = [row for row in here if row["operation"] == operation and row["format"].startswith(kind)]
                speeds, parts = [row["gbps"] for row in these], [row["of_copy"] for row in these]
                of = f"{min(parts):.2f} to {max(parts):.2f}"
                gbps = f"{min(speeds):.0f} to {max(speeds):.0f}"
                lines.append(f"{dtype:9} {operation:24} {kind:5} {largest >> 20:6d} {gbps:>12} {of:>12}")
    return lines + [f"{name}: absent ({why})" for name, why in measurement.facts["absent"].items()]


def lossless_lines(measurement: Any) -> list[str]:
    """The largest piece at every learning rate."""
    rows = measurement.records
    largest = max(row["values_bytes"] for row in rows)
    lines = [f"{'learning rate':13} {'bits':>6} {'operation':9} {'MiB':>6} {'GB/s':>6} {'of a copy':>9}"]
    return lines + [
        f"{row['learning_rate']:<13g} {row['bits_per_weight']:>6.3f} {row['operation']:9} {largest >> 20:6d} "
        f"{row['values_gbps']:>6.0f} {row['of_copy']:>9.2f}"
        for row in rows
        if row["values_bytes"] == largest
    ]


def collective_lines(measurement: Any) -> list[str]:
    """The largest sizes, with the speed-up over the first backend."""
    lines = [measurement.name]
    sizes = sorted({row["size"] for row in measurement.records})[-3:]
    for row in measurement.records:
        if row["size"] in sizes:
            error = "-" if row["max_error"] is None else f"{row['max_error']:.1e}"
            lines.append(
                f"  {row['size']:>12} B {row['backend']:17} {row['median_us']:>12.0f} us {row['speedup']:>6.2f}x  "
                f"max error {error}"
            )
    return lines


def training_lines(measurement: Any) -> list[str]:
    """Steps by how weights are sent, with the speed-up over the first way."""
    text = "training step, {nodes} ranks, links of {rate}, {parameters} parameters"
    seconds = {row["way"]: row["seconds"] for row in measurement.records}
    first = next(iter(seconds.values()))
    rows = [f"  {way:14} {own:8.4f} s {first / own:6.2f}x" for way, own in seconds.items()]
    return [text.format(**measurement.facts), *rows]


LINES = {
    "codec": codec_lines,
    "lossless": lossless_lines,
    "training_step": training_lines,
    "collectives": collective_lines,
}


def summary(endings: Sequence[Ending], facts: Mapping[str, Any], reports: Sequence[Path]) -> str:
    read = load(ROOT / "bench" / "results_file.py").read
    lines = [f"{facts['gpu']}, torch {facts['torch']}", ""]
    for path in reports:
        try:
            for measurement in read(path):
                lines += [*LINES[path.stem.partition("-")[0]](measurement), ""]
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines += [f"{path.name}: not readable: {type(error).__name__}: {error}", ""]
    lines += [f"{'stage':12} {'seconds':>8}  ending"]
    lines += [f"{ending.name:12} {ending.seconds:8.0f}  {ending.how}" for ending in endings]
    return "\n".join(lines) + "\n"


def hand_over(out: Path, text: str, reports: Sequence[Path], logs: Path = LOGS) -> None:
    """The summary, and everything else in one file."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.txt").write_text(text)
    with tarfile.open(out / "gpu.tar.gz", "w:gz") as archive:
        archive.add(logs, "logs")
        for path in reports:
            archive.add(path, f"results/{path.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [stage.name for stage in stages()]
    parser.add_argument("--only", default="", help=f"stages, by commas: {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for everything")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else names
    for name in chosen:
        if name not in names:
            parser.error(f"--only: expected some of {', '.join(names)}, got {name!r}")
    start = time.monotonic()
    environment = make_environment(os.environ)
    if lacks := missing(environment):
        print("make gpu needs, and this machine lacks: " + "; ".join(lacks))
        return 2
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        print(f"make gpu needs a GPU: {(probe.stderr or probe.stdout).strip().splitlines()[-1]}")
        return 2
    facts = json.loads(probe.stdout.splitlines()[-1])
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    make_venv()
    chip = load(ROOT / "bench" / "zcomm_bench" / "lab" / "gpus.py").chip(facts["gpu"])
    every = [stage for stage in stages() if stage.name in chosen]
    begun = time.time()
    endings = run_stages(every, given.seconds - (time.monotonic() - start), environment)
    reports = [path for path in sorted(RESULTS.glob(f"*-{chip}.jsonl")) if path.stat().st_mtime >= begun]
    text = summary(endings, facts, reports)
    (LOGS / "summary.txt").write_text(text)
    print(text)
    if out := os.environ.get("OUT"):
        hand_over(Path(out), text, reports)
    return 1 if any(ending.outcome is Outcome.failed for ending in endings) else 0


if __name__ == "__main__":
    sys.exit(main())
