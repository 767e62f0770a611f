"""All that there is to run on a machine with a GPU: builds zcomm for it, tests it, measures it. For ``make gpu``.

    python3 tools/run_gpu.py [--part 1|2|3|4|5] [--only STAGE,...] [--seconds N] [--rehearse]

Needs torch with CUDA, nvcc, cmake, ninja and scikit-build-core, and no network. Each stage has a limit of time, and one
that fails does not stop the others; the exit status says whether any did. One whose packages are not installed, or that
needs more GPUs, is not run, which is no failure. Each part takes less than ten minutes, the build included; parts 4 and
5 are for two GPUs or more. Logs: out/gpu. Results: bench/results. If the variable OUT names a folder, a summary and an
archive of both go there.

With --rehearse the stages that have a rehearsal run on the stand-in for a GPU, with tiny sizes: logs and results in
out/rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import hashlib
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
REHEARSAL = ROOT / "out" / "rehearsal"
BUILD = ROOT / "build" / "gpu"
VENV = BUILD / "venv"
GRACE_SECONDS = 8.0  # between the request to end and the end
TAIL_LINES = 60
PART_SECONDS = 570.0
PARTS = (1, 2, 3, 4, 5)
NEEDED = ("torch", "numpy", "pytest", "pytest_timeout", "typer", "rich", "matplotlib", "scikit_build_core")
BLOCKS = "64,128,256,512,1024,2048"

PROBE = """
import json, torch
if not torch.cuda.is_available(): raise SystemExit(f"torch {torch.__version__} sees no GPU")
gpu, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
print(json.dumps({"gpu": gpu, "gpus": count, "torch": torch.__version__}))
"""


@dataclass(frozen=True)
class Stage:
    """Commands that run one after the other, in `seconds` together. Without the Python packages or the GPUs that it
    needs, none.

    `expected`: the seconds that it took on an H100."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]
    needs: Sequence[str] = ()
    expected: float | None = None
    part: int = 1
    rehearses: bool = False
    gpus: int = 1

    def lacks(self, num_gpus: int) -> str:
        """Return what the stage needs and this machine has not, in words."""
        if num_gpus < self.gpus:
            return f"needs {self.gpus} GPUs, torch sees {num_gpus}"
        packages = not_installed(self.needs)
        return f"needs {', '.join(packages)}" if packages else ""


class Outcome(enum.Enum):
    passed = "passed"
    failed = "failed"
    not_run = "not run"  # for want of a package or of GPUs, which is no failure


@dataclass(frozen=True)
class Ending:
    """How a stage ended; `why` is for the reader: "status 3", "stopped after its 2 s", "needs pyroute2"."""

    name: str
    outcome: Outcome
    why: str
    seconds: float
    log: Path
    expected: float | None = None

    @property
    def how(self) -> str:
        return f"{self.outcome.value}: {self.why}" if self.why else self.outcome.value


def venv_python() -> str:
    return str(VENV / "bin" / "python")


def stages(python: str = "", out: Path = RESULTS) -> list[Stage]:
    """In the order of what is missed most if time runs out."""
    python = python or venv_python()
    parallel = ["-n", "4", "--dist", "loadgroup"] if importlib.util.find_spec("xdist") else []
    keep = ["--out", os.path.relpath(out, ROOT)]
    pytest = [python, "-m", "pytest", "-q", *parallel, "-m", "slow or not slow", "--durations=15"]
    codec = [python, "bench/codec.py", "--device", "cuda", "--dtype", "all", "--block", BLOCKS, "--minbytes", "4G"]
    codec += ["--format", "eden2:128,eden3:128,eden4:128"]
    difference = [python, "bench/lossless.py", "--device", "cuda"]
    collectives = [python, "bench/collectives.py", "--device", "cuda"]
    training = [python, "bench/training_step.py", "--device", "cuda", "--uncompressed", "--turns", "12"]
    training += ["--nodes", "2x1", "--width", "512", "--layers", "8"]
    study = [python, "-m", "bench.convergence.large", "--seconds", "110" if out == RESULTS else "2"]

    def probe(name: str, seconds: float, expected: float) -> Stage:
        return Stage(name, seconds, [[python, "-m", f"bench.one_gpu.{name}", *keep]], expected=expected, rehearses=True)

    def of_several(name: str, seconds: float, part: int) -> Stage:
        command = [python, "-m", f"bench.several_gpus.{name}", *keep]
        return Stage(name, seconds, [command], part=part, rehearses=True, gpus=2)

    def tests(name: str, *paths: str) -> list[list[str]]:
        return [[*pytest, *paths, f"--junitxml={(LOGS if out == RESULTS else out) / name}.xml"]]

    aborts, matrix = "tests/gpu/test_aborts.py", "tests/gpu/test_abort_matrix.py"
    ignored, alone = [f"--ignore={path}" for path in (aborts, matrix)], ["-n", "0"] if parallel else []
    return [
        Stage("build", 300, build_commands(), expected=60),
        Stage("info", 40, [[python, "-m", "zcomm", "info"]], expected=5),
        probe("beside_gemm", 120, 65),  # builds the probes, too
        probe("chains", 120, 40),
        probe("nccl_host_cost", 60, 10),
        probe("real_shapes", 60, 10),
        probe("fsdp_copies", 60, 10),
        probe("floors", 90, 25),
        probe("ipc", 120, 45),
        Stage("tests", 300, tests("tests", "tests/gpu", *ignored), expected=170, part=2),
        Stage("aborts", 300, tests("aborts", aborts), expected=140, part=2),
        Stage("codec", 120, [[*codec, *keep]], expected=60, part=3),
        Stage("lossless", 60, [[*difference, *keep]], expected=25, part=3),
        Stage("collectives", 150, [[*collectives, "--iters", "9", "--seconds", "1"]], expected=130, part=3),
        Stage("training", 90, [[*training, *keep]], ("pyroute2",), expected=55, part=3),
        Stage("study_100m", 175, [[*study, *keep]], expected=135, part=3, rehearses=True),
        of_several("channels", 190, 4),
        of_several("sizes", 300, 4),
        of_several("steps", 300, 5),
        Stage("abort_matrix", 210, tests("abort_matrix", matrix, *alone), part=5, rehearses=True, gpus=2),
    ]


def build_commands() -> list[list[str]]:
    settings = (
        "cmake.define.ZCOMM_CUDA=ON",
        "cmake.define.CMAKE_CUDA_ARCHITECTURES=native",
        f"build-dir={BUILD}/cmake",
    )
    pip = [venv_python(), "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "-v", "-e"]
    zcomm = [*pip, str(ROOT), *(part for setting in settings for part in ("-C", setting))]
    return [zcomm, [*pip, str(ROOT / "bench")]]


def make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of all stages: nvcc, cmake and ninja are found, and nothing is skipped for want of a GPU."""
    folders = [VENV / "bin", Path(sys.executable).parent, Path("/usr/local/cuda/bin")]
    path = os.pathsep.join([*map(str, folders), environment.get("PATH", "")])
    return {**environment, "PATH": path, "TESTS_REQUIRE_GPU": "1", "PYTHONUNBUFFERED": "1"}


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


def run_stage(
    stage: Stage, limit: float, environment: Mapping[str, str], logs: Path = LOGS, num_gpus: int = 1
) -> Ending:
    """Runs the commands of a stage until one fails, or the limit is reached; what they print goes to a log."""
    log, start, why = logs / f"{stage.name}.log", time.monotonic(), ""
    log.write_text("")
    if lacks := stage.lacks(num_gpus):
        return Ending(stage.name, Outcome.not_run, lacks, 0.0, log, stage.expected)
    if limit < 1:
        return Ending(stage.name, Outcome.failed, "no time was left", 0.0, log, stage.expected)
    try:
        for command in stage.commands:
            status = run_command(command, start + limit - time.monotonic(), environment, log)
            if status != 0:
                why = f"status {status}"
                break
    except subprocess.TimeoutExpired:
        why = f"stopped after its {limit:.0f} s"
    outcome = Outcome.failed if why else Outcome.passed
    return Ending(stage.name, outcome, why, time.monotonic() - start, log, stage.expected)


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
    """Ends a process and its group: those that clean up get the time for it. pytest reports what has failed so far when
    it is interrupted, and not when it is terminated."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            if number != signal.SIGKILL:
                time.sleep(0.2)


def run_stages(
    every: Sequence[Stage],
    seconds: float,
    environment: Mapping[str, str],
    logs: Path = LOGS,
    say: Callable[[str], object] = print,
    after: Callable[[list[Ending]], object] = lambda endings: None,
    num_gpus: int = 1,
) -> list[Ending]:
    """All of them, whatever becomes of one; but nothing without a build. ``after`` each gets those that have ended."""
    start, endings = time.monotonic(), list[Ending]()
    for stage in every:
        say(f"--- {stage.name}")
        left = seconds - (time.monotonic() - start)
        ending = run_stage(stage, min(stage.seconds, left), environment, logs, num_gpus)
        endings.append(ending)
        say(f"{stage.name}: {ending.how}, {ending.seconds:.0f} s")
        lines = ending.log.read_text(errors="replace").splitlines()
        say("\n".join(lines[-(TAIL_LINES if ending.outcome is Outcome.failed else 3) :]))
        after(endings)
        if stage.name == "build" and ending.outcome is not Outcome.passed:
            break
    return endings


def summary(endings: Sequence[Ending], facts: Mapping[str, Any], reports: Sequence[Path]) -> str:
    read = load(ROOT / "bench" / "results_file.py").read
    text: str = load(ROOT / "tools" / "gpu_summary.py").text_of(endings, facts, reports, read)
    return text


def hand_over(out: Path, text: str, reports: Sequence[Path], logs: Path = LOGS) -> None:
    """The summary, and everything else in one file."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.txt").write_text(text)
    with tarfile.open(out / "gpu.tar.gz", "w:gz") as archive:
        archive.add(logs, "logs")
        for path in reports:
            archive.add(path, f"results/{path.name}")


def arguments(every: Sequence[Stage]) -> tuple[list[Stage], float, Path | None]:
    """Of the command line: the stages that are to run, in how many seconds, and the folder of a rehearsal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [stage.name for stage in every]
    parser.add_argument("--only", default="", help=f"stages, by commas: {', '.join(names)}")
    parser.add_argument("--part", type=int, choices=PARTS, help="some of them, in less than ten minutes")
    parser.add_argument("--seconds", type=float, help="for everything; ten minutes a part, less a little, unless given")
    parser.add_argument("--rehearse", action="store_true", help="on the stand-in: what has a rehearsal")
    parser.add_argument("--out", type=Path, default=REHEARSAL, help="of a rehearsal: for logs and results")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else names
    for name in chosen:
        if name not in names:
            parser.error(f"--only: expected some of {', '.join(names)}, got {name!r}")
    run = [stage for stage in every if stage.name in chosen and given.part in (None, stage.part)]
    if given.rehearse:
        run = [stage for stage in run if stage.rehearses]
    if not run:
        parser.error("--only: expected stages of this part, or with a rehearsal, got none")
    seconds = given.seconds or PART_SECONDS * len({stage.part for stage in run})
    return run, seconds, given.out if given.rehearse else None


def written_since(begun: float, paths: Iterable[Path]) -> list[Path]:
    return [path for path in sorted(paths) if path.stat().st_mtime >= begun]


def rehearse(names: Iterable[str], seconds: float, out: Path) -> int:
    """The stages of these names on the stand-in, with this Python."""
    out.mkdir(parents=True, exist_ok=True)
    every = [stage for stage in stages(sys.executable, out) if stage.name in names]
    environment = {**os.environ, "TESTS_GPU_DEVICE": "stand-in", "PYTHONUNBUFFERED": "1"}
    begun = time.time()
    endings = run_stages(every, seconds, environment, out, num_gpus=max(stage.gpus for stage in every))
    facts = {"gpu": "a rehearsal on the stand-in", "torch": "for CPUs"}
    print(summary(endings, facts, written_since(begun, out.glob("*.jsonl"))))
    return 1 if any(ending.outcome is Outcome.failed for ending in endings) else 0


def sources() -> str:
    """A digest of all that is compiled."""
    digest = hashlib.sha256()
    for folder in ("src", "include", "python", "CMakeLists.txt"):
        for path in sorted((ROOT / folder).rglob("*")) or [ROOT / folder]:
            if path.is_file():
                digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


def with_build(every: Sequence[Stage]) -> list[Stage]:
    """The build goes ahead where these sources were not built yet: a later call may meet a fresh machine."""
    done = BUILD / "done"
    is_there = done.exists() and done.read_text() == sources()
    return [stage for stage in stages() if stage in every or (stage.name == "build" and not is_there)]


def main() -> int:
    every, seconds, rehearsal = arguments(stages())
    if rehearsal is not None:
        return rehearse([stage.name for stage in every], seconds, rehearsal)
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
    begun = time.time()

    def report(endings: list[Ending]) -> str:
        """After each stage: who stops this program has what has ended."""
        if endings[-1].name == "build" and endings[-1].outcome is Outcome.passed:
            (BUILD / "done").write_text(sources())
        reports = written_since(begun, RESULTS.glob(f"*-{chip}.jsonl"))
        text = summary(endings, facts, reports)
        (LOGS / "summary.txt").write_text(text)
        if out := os.environ.get("OUT"):
            hand_over(Path(out), text, reports)
        return text

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # after the stage has been ended, too
    left = seconds - (time.monotonic() - start)
    endings = run_stages(with_build(every), left, environment, after=report, num_gpus=facts["gpus"])
    print(report(endings))
    return 1 if any(ending.outcome is Outcome.failed for ending in endings) else 0


if __name__ == "__main__":
    sys.exit(main())
