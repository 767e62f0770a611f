"""What ``make gpu`` runs on a machine with a GPU, as far as it can be tried without one: what is skipped and refused,
limits of time, the summary and what is handed over."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import results_file
from zcomm_bench.lab import gpus

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]
GPU_TESTS = ROOT / "tests" / "gpu"
needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


run_gpu = load(ROOT / "tools" / "run_gpu.py")


def pytest_of_gpu(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(GPU_TESTS), *arguments]
    hidden = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST")
    own = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        command, cwd=GPU_TESTS, capture_output=True, text=True, timeout=100, env={**own, **environment}
    )


@needs_no_gpu
@pytest.mark.slow
def test_without_a_gpu_all_of_its_tests_are_skipped() -> None:
    done = pytest_of_gpu()
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert "skipped" in last and not any(word in last for word in ("passed", "failed", "error")), done.stdout
    assert "no GPU tests: torch" in done.stdout


@needs_no_gpu
@pytest.mark.slow
def test_where_a_gpu_is_demanded_they_are_refused() -> None:
    done = pytest_of_gpu(TESTS_REQUIRE_GPU="1")
    assert done.returncode != 0
    assert "TESTS_REQUIRE_GPU=1, and no GPU tests" in done.stdout + done.stderr


def test_the_tests_themselves_work_on_cpu_tensors() -> None:
    """One of each kind; all of them: TESTS_GPU_DEVICE=cpu pytest tests/gpu."""
    done = pytest_of_gpu("-k", "2x2 or test_sums_in_place or test_what_is_not_compressed", TESTS_GPU_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout, done.stdout


@needs_no_gpu
def test_make_gpu_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "run_gpu.py")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "make gpu needs" in done.stdout, done.stdout + done.stderr


def test_missing_things_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_gpu, "NEEDED", ("json", "no_such_package"))
    lacks = run_gpu.missing({"PATH": str(tmp_path)})
    assert "the Python package no_such_package" in lacks
    assert {f"{tool} on the PATH" for tool in ("nvcc", "cmake", "ninja", "g++")} <= set(lacks)
    assert not any("json" in lack for lack in lacks)


def stage(name: str, code: str, seconds: float = 20.0, needs: tuple[str, ...] = ()) -> Any:
    return run_gpu.Stage(name, seconds, [[sys.executable, "-c", code]], needs)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_stages_end_in_time_and_none_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    # It does not listen, and neither does what it has started.
    deaf = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; [signal.signal(number, signal.SIG_IGN) for number in (2, 15)]; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sleep])
open({str(pid_file)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    polite = "import sys, time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('cleaned up')"
    said: list[str] = []
    seen: list[int] = []
    monkeypatch.setattr(run_gpu, "GRACE_SECONDS", 2.0)
    every = [
        stage("good", "print('fine')"),
        stage("bad", "raise SystemExit(3)"),
        stage("deaf", deaf, 4.0),
        stage("polite", polite, 4.0),
        stage("last", "print('still here')"),
    ]
    endings = run_gpu.run_stages(every, 60.0, os.environ, tmp_path, said.append, lambda ended: seen.append(len(ended)))
    assert seen == [1, 2, 3, 4, 5]
    hows = {ending.name: ending.how for ending in endings}
    assert hows == {
        "good": "passed",
        "bad": "failed: status 3",
        "deaf": "failed: stopped after its 4 s",
        "polite": "failed: stopped after its 4 s",
        "last": "passed",
    }
    assert "cleaned up" in (tmp_path / "polite.log").read_text()
    assert "still here" in "\n".join(said)
    deadline = time.monotonic() + 20
    while is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "what a stage started outlived it"
        time.sleep(0.05)


def test_without_a_build_or_without_time_nothing_runs(tmp_path: Path) -> None:
    every = [stage("build", "raise SystemExit(1)"), stage("tests", "print('no')")]
    assert [ending.name for ending in run_gpu.run_stages(every, 60.0, os.environ, tmp_path, lambda _: None)] == [
        "build"
    ]
    (late,) = run_gpu.run_stages([stage("tests", "print('no')")], 0.5, os.environ, tmp_path, lambda _: None)
    assert (late.outcome, late.how) == (run_gpu.Outcome.failed, "failed: no time was left")


def test_a_stage_that_lacks_a_package_says_so_and_is_no_failure(tmp_path: Path) -> None:
    every = [
        stage("lacking", "raise SystemExit(1)", needs=("json", "no_such_package")),
        stage("bad", "raise SystemExit(1)", needs=("json",)),
        stage("good", "print('fine')", needs=("json",)),
    ]
    endings = run_gpu.run_stages(every, 60.0, os.environ, tmp_path, lambda _: None)
    assert [(ending.outcome, ending.how) for ending in endings] == [
        (run_gpu.Outcome.not_run, "not run: needs no_such_package"),
        (run_gpu.Outcome.failed, "failed: status 1"),
        (run_gpu.Outcome.passed, "passed"),
    ]
    assert "not run: needs no_such_package" in run_gpu.summary(endings, {"gpu": "", "torch": ""}, [])


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_a_stage_for_two_gpus_runs_where_torch_sees_as_many(tmp_path: Path, num_gpus: int) -> None:
    every, said = [run_gpu.Stage("two", 20.0, [[sys.executable, "-c", ""]], gpus=2)], list[str]()
    (ending,) = run_gpu.run_stages(every, 60.0, os.environ, tmp_path, said.append, num_gpus=num_gpus)
    if num_gpus == 1:
        assert ending.outcome is run_gpu.Outcome.not_run
        assert said[1] == "two: not run: needs 2 GPUs, torch sees 1, 0 s"
    else:
        assert ending.outcome is run_gpu.Outcome.passed


def test_the_stages_are_commands_of_this_repository() -> None:
    stages = run_gpu.stages()
    names = ["build", "info", "beside_gemm", "chains", "nccl_host_cost", "real_shapes", "fsdp_copies", "floors", "ipc"]
    names += ["tests", "aborts", "codec", "lossless", "collectives", "training", "study_100m"]
    of_several = ["channels", "sizes", "steps", "abort_matrix"]
    assert [one.name for one in stages] == [*names, *of_several]
    assert [one.name for one in stages if one.gpus > 1] == of_several and all(one.rehearses for one in stages[-4:])
    for part in (1, 2, 3):
        expected = [one.expected for one in stages if one.part == part or one.name == "build"]
        assert sum(expected) <= run_gpu.PART_SECONDS and all(expected)
    for part in (4, 5):  # which were not run on GPUs yet: their limits count
        assert sum(one.seconds for one in stages if one.part == part) + stages[0].expected <= run_gpu.PART_SECONDS
    assert all((one.expected or 0) < one.seconds <= 300 for one in stages)
    for one in stages:
        for command in one.commands:
            for part in command:
                if part.startswith(("bench.one_gpu", "bench.several_gpus", "bench.conv")):
                    part = part.replace(".", "/") + ".py"
                if part.endswith(".py"):
                    assert (ROOT / part.removeprefix("--ignore=")).exists(), part
    assert {one.name: one.needs for one in stages if one.needs} == {"training": ("pyroute2",)}
    text = json.dumps([one.commands for one in stages])
    for part in ('"--out", "bench/results"', "CMAKE_CUDA_ARCHITECTURES=native", "--no-index"):
        assert part in text


def test_a_part_brings_its_build_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*arguments: str) -> tuple[list[str], float]:
        monkeypatch.setattr(sys, "argv", ["run_gpu.py", *arguments])
        every, seconds, _ = run_gpu.arguments(run_gpu.stages())
        return [one.name for one in run_gpu.with_build(every)], seconds

    monkeypatch.setattr(run_gpu, "BUILD", tmp_path)
    assert chosen("--part", "2") == (["build", "tests", "aborts"], 570)
    (tmp_path / "done").write_text("of other sources")
    assert chosen("--part", "2") == (["build", "tests", "aborts"], 570)
    (tmp_path / "done").write_text(run_gpu.sources())
    assert chosen("--part", "2") == (["tests", "aborts"], 570)
    assert chosen("--only", "floors,codec") == (["floors", "codec"], 1140)
    assert chosen("--only", "floors", "--seconds", "9") == (["floors"], 9)
    with pytest.raises(SystemExit):
        chosen("--only", "tests", "--rehearse")


def reports(folder: Path) -> list[Path]:
    row = {"operation": "encode", "format": "int8:128", "dtype": "bfloat16", "gbps": 4000.0}
    row |= {"values_bytes": 1 << 30, "of_copy": 0.93}
    codec = [row, {**row, "format": "int8:64", "of_copy": 0.9}]
    row = {"learning_rate": 3e-4, "bits_per_weight": 3.4321, "operation": "encode", "values_bytes": 1 << 24}
    row |= {"values_gbps": 222.0, "of_copy": 0.44}
    difference = [row, {**row, "values_bytes": 1 << 28, "values_gbps": 333.0, "of_copy": 0.55}]
    training = [{"way": "uncompressed", "seconds": 0.9}, {"way": "lossless", "seconds": 0.3}]
    row = {"size": 1 << 20, "backend": "nccl", "median_us": 1e4, "speedup": 1.0}
    collective = [row, {**row, "backend": "zcomm", "speedup": 2.0}]
    facts = {
        "training_step": {"nodes": "2x1", "rate": "1gbit", "parameters": 25502208},
    }
    rows = {"codec": codec, "lossless": difference, "training_step": training, "collectives": collective}
    for name, records in rows.items():
        one = results_file.measured(name, "H200", list(records[0]), records, **facts.get(name, {}))
        results_file.keep(folder / f"{name}-h200.jsonl", [one])
    (folder / "lossless-broken.jsonl").write_text("[1]\n")
    return sorted(folder.glob("*.jsonl"))


def test_the_summary_and_what_is_handed_over(tmp_path: Path) -> None:
    paths = reports(tmp_path)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "build.log").write_text("built\n")
    endings = [run_gpu.Ending("build", run_gpu.Outcome.passed, "", 61.0, logs / "build.log", 130.0)]
    text = run_gpu.summary(endings, {"gpu": "NVIDIA H200", "torch": "2.11.0"}, paths)
    assert "    61      130  passed" in text
    for part in ("NVIDIA H200", "0.90 to 0.93", "2.00x", "lossless-broken.jsonl: not readable"):
        assert part in text, text
    (line,) = (line.split() for line in text.splitlines() if line.startswith("0.0003"))
    assert line == ["0.0003", "3.432", "encode", "256", "333", "0.55"], text
    (line,) = (line.split() for line in text.splitlines() if line.startswith("  lossless"))
    assert line == ["lossless", "0.3000", "s", "3.00x"], text
    assert "build" in text.splitlines()[-1]
    run_gpu.hand_over(tmp_path / "out", text, paths, logs)
    assert (tmp_path / "out" / "summary.txt").read_text() == text
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as archive:
        assert {"logs/build.log", "results/codec-h200.jsonl"} <= set(archive.getnames())


def test_chips_and_sharing() -> None:
    assert [gpus.chip(name) for name in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla T4", "")] == [
        "h200",
        "a100-sxm4-80gb",
        "tesla-t4",
        "gpu",
    ]
    one = {"num_gpus": 1, "gpu": "NVIDIA H200"}
    assert gpus.sharing(1, one, "none") == ""
    text = gpus.sharing(4, one, "none")
    assert "4 ranks share one NVIDIA H200" in text and "sockets over loopback" in text
    assert "1gbit links" in gpus.sharing(2, one, "1gbit")
    assert gpus.nccl_environment(3)["NCCL_HOSTID"] != gpus.nccl_environment(2)["NCCL_HOSTID"]
    assert gpus.nccl_environment(0, "eth0")["NCCL_SOCKET_IFNAME"] == "eth0"


def test_ranks_are_placed_on_the_gpus_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for count, rank, size, interface, shares in (
        (1, 1, 2, "lo", True),
        (4, 3, 4, "lo", False),
        (4, 1, 2, "eth0", True),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        environment: dict[str, str] = {}
        assert gpus.place(rank, size, interface, environment) == rank % count == used[-1]
        assert ("NCCL_HOSTID" in environment) == shares
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(gpus.NoGpu, match="found no GPU"):
        gpus.place(0, 1)
