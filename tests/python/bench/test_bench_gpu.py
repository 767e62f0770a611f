"""The benchmarks on GPUs, as far as they can be tried without one: options, reports, and the passes on CPU tensors."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")

import torch
from support.benchmarks import host_clock, load
from typer.testing import CliRunner

from bench import results_file
from zcomm_bench import gpu_clock, report_file
from zcomm_bench import report as bench_report
from zcomm_bench.cli import app
from zcomm_bench.contenders import Problem
from zcomm_bench.lab import gpus, network
from zcomm_bench.run import FIGURES, launch_ranks, merge, run_benchmark
from zcomm_bench.spec import COLLECTIVES, Spec, parse_backend

MACHINE = {"gpu": "NVIDIA H200", "num_gpus": 1}
needs_no_gpu = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has a GPU")


def test_backends_of_a_device() -> None:
    assert parse_backend("nccl", "cuda") == ("nccl", None)
    assert parse_backend("zcomm=int4:128", "cuda") == ("zcomm", "int4:128")
    for text, device in (("gloo", "cuda"), ("naive", "cuda"), ("nccl", "cpu"), ("nccl=int8:32", "cuda")):
        with pytest.raises(ValueError, match="expected backends"):
            parse_backend(text, device)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "tpu"}, "device: expected one of cpu, cuda"),
        ({"device": "cuda"}, "expected backends"),  # gloo is a CPU's
        ({"seconds": -1.0}, "seconds: expected at least 0"),
    ],
)
def test_a_spec_refuses_what_cannot_be_run(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec("all_gather", [1024], **wrong)  # type: ignore[arg-type]


def test_ranks_on_gpus_need_no_network_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def launch(argv: list[str], **fields: Any) -> Any:
        given.append(fields)
        return dataclasses.make_dataclass("Result", ["note"])("")

    monkeypatch.setattr(network, "launch", launch)
    for device, link, isolate in (("cuda", "none", False), ("cuda", "1gbit", True), ("cpu", "none", True)):
        backends = ["nccl" if device == "cuda" else "gloo"]
        spec = Spec("all_gather", [8], backends=backends, device=device, link=link, nodes="2x1")
        launch_ranks(spec, [], print)
        assert given[-1]["isolate"] is isolate, (device, link)
    assert network.NetLab(2, isolate=False).note == ""


def record(spec: Spec, backend: str) -> dict[str, Any]:
    sample = {"size": 1 << 20, "count": 1 << 18, "backend": backend, "format": "exact", "exact_reason": None}
    figures = {
        **dict.fromkeys(FIGURES),
        "median_us": 1e4,
        "min_us": 9e3,
        "p90_us": 1.1e4,
        "speedup": 1.0,
        "calls": 1,
        "hops": None,
    }
    return merge(spec, [{**sample, **figures}])


def test_a_report_says_that_ranks_shared_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(gpus, "facts", lambda: MACHINE)
    monkeypatch.setattr("zcomm_bench.run.launch_ranks", lambda spec, arguments, take: "")
    spec = Spec("all_gather", [1 << 20], backends=["nccl", "zcomm"], device="cuda", link="none", nodes="2x1")
    report = run_benchmark(spec)
    assert report["machine"]["gpu"] == "NVIDIA H200"
    assert "2 ranks share one NVIDIA H200" in report["note"] and "sockets" in report["note"]
    assert "on GPUs" in spec.title
    report["results"] = [record(spec, backend) for backend in spec.backends]
    report_file.save(report, tmp_path / "report.json")
    assert report_file.load(tmp_path / "report.json") == report
    bench_report.plot({"": report}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@needs_no_gpu
@pytest.mark.parametrize("arguments", [["all_gather", "--device", "cuda"]])
def test_without_a_gpu_the_command_says_so(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "found no GPU" in done.output, done.output
    done = CliRunner().invoke(app, [*arguments, "--backends", "gloo"])
    assert done.exit_code == 2 and "expected backends out of nccl" in done.output, done.output


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("pyroute2", "zcomm._core")),
    reason="needs pyroute2 and the torch.distributed backend",
)
def test_seconds_bound_the_samples() -> None:
    """Of a size: three are taken however long they take."""
    spec = Spec("all_gather", [1 << 20], nodes="2x1", link="none", iters=1000, warmup=1, calls=1, seconds=1e-4)
    report = run_benchmark(spec)
    assert [row["backend"] for row in report["results"]] == ["gloo", "zcomm"]
    assert all(row["calls"] == 1 and row["median_us"] > 0 for row in report["results"])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", [(4, 4), (4, 2), (4, 1), (2, 1), (2, 2)], ids=str)
def test_the_codecs_part_of_a_collective(
    collective: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass of it runs."""
    monkeypatch.setattr(gpu_clock, "seconds_of", host_clock)
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.randn(4 * 999 + 1).to(dtype)
        problem = Problem(collective, "sum", whole, whole[:999])
        formats = "int8:256" if collective == "all_gather" else "int8:128/int4:128"
        assert gpu_clock.codec_seconds(problem, formats, *shape) > 0


def test_the_codecs_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codec_cuda = load("codec_cuda")
    sizes, formats = [1 << 16, 1 << 18], ["int8:64", "int4:2048"]
    report = codec_cuda.run(
        formats,
        ["float32", "float16"],
        sizes,
        20,
        tmp_path,
        device="cpu",
        clock=host_clock,
        facts=lambda: MACHINE,
    )
    (kept,) = results_file.read(tmp_path / "codec-h200.jsonl")
    largest = [row for row in report["results"] if row["values_bytes"] > 200_000]
    assert 0 < len(kept.rows) == len(largest) < len(report["results"])
    assert kept.machine.startswith("H200 (") and kept.records[0]["operation"] == "encode"
    rows = report["results"]
    assert len(rows) == 2 * 2 * 2 * 4
    for row in rows:
        assert row["of_copy"] == pytest.approx(row["gbps"] / row["copy_gbps"])
        assert row["median_us"] > 0
    first = rows[0]
    # A byte and a sixty-fourth of two bytes for each value of four bytes that is read.
    assert (first["operation"], first["format"], first["values_bytes"]) == ("encode", "int8:64", 12288 * 4)
    assert first["moved_bytes"] == 12288 * 5 + 12288 // 64 * 2
    shown = capsys.readouterr().out
    assert "of copy" in shown and "NVIDIA H200" in shown


class FakeKernels:
    """Encodes to a message of `message_bytes`, decodes to the values that were encoded, on CPU tensors."""

    def __init__(self, message_bytes: int) -> None:
        self.message_bytes, self.bases = message_bytes, list[bytes]()

    def encode(self, jobs: Sequence[Any], *_: Any) -> None:
        for (values, num, _), (base, *_), _, message, _, num_bytes in jobs:
            self.bases.append(ctypes.string_at(base, 2 * num))
            self._encoded = ctypes.string_at(values, 2 * num)
            ctypes.memmove(base, values, 2 * num)
            if message:
                ctypes.c_uint64.from_address(num_bytes).value = self.message_bytes

    def decode(self, jobs: Sequence[Any], *_: Any) -> None:
        for _, num_bytes, (base, num, _), *_ in jobs:
            assert num_bytes == self.message_bytes
            assert ctypes.string_at(base, 2 * num) == self.bases[0]
            ctypes.memmove(base, self._encoded, 2 * num)


def test_the_lossless_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The arithmetic, and that each pass has the base of before: an encoder of its own values would find nothing."""
    lossless_cuda, repeats, num = load("lossless_cuda"), 20, 4096
    kernels = FakeKernels(64 + num // 4)
    for name, function in (("encode", kernels.encode), ("decode", kernels.decode)):
        monkeypatch.setattr(lossless_cuda._core, f"{name}_lossless_on_device", function)
    monkeypatch.setattr(lossless_cuda._core, "synchronize", lambda stream: None)

    def clock(passes: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
        host_clock(passes, repeats)
        encode_copy, decode_copy, restore, encode, decode = 1e-6, 2e-6, 1.0, 4e-6, 5e-6
        return [[each] * repeats for each in (encode_copy, decode_copy, restore, encode, restore, decode)]

    arguments: dict[str, Any] = {"device": "cpu", "facts": lambda: MACHINE}
    report = lossless_cuda.run([1e-2], [2 * num], repeats, tmp_path, clock=clock, **arguments)
    (kept,) = results_file.read(tmp_path / "lossless-h200.jsonl")
    assert [record["operation"] for record in kept.records] == ["encode", "decode"]
    encode, decode = report["results"]
    for row, name, us, of_copy, tensors in ((encode, "encode", 4, 0.25, 3), (decode, "decode", 5, 0.4, 2)):
        assert (row["operation"], row["learning_rate"], row["bits_per_weight"]) == (name, 1e-2, 2.0)
        assert row["median_us"] == pytest.approx(us) and row["of_copy"] == pytest.approx(of_copy)
        assert row["values_gbps"] == pytest.approx(2 * num / us / 1e3)
        assert (row["values_bytes"], row["moved_bytes"]) == (2 * num, 2 * num * tensors + kernels.message_bytes)
    assert len(kernels.bases) == 2 + repeats and len(set(kernels.bases)) == 1
    shown = capsys.readouterr().out
    assert "0.01" in shown and "2.000" in shown and "NVIDIA H200" in shown

    monkeypatch.setattr(lossless_cuda._core, "decode_lossless_on_device", lambda jobs, *_: None)
    with pytest.raises(SystemExit, match="other values than were encoded"):
        lossless_cuda.run([1e-2], [2 * num], repeats, None, clock=clock, **arguments)


@needs_no_gpu
def test_differences_on_a_gpu_are_refused_without_one() -> None:
    difference = load("lossless")
    done = CliRunner().invoke(difference.app, ["--device", "cuda"])
    assert done.exit_code == 1 and "found no GPU" in done.output
    for arguments, message in ((["cuda", "--repeats", "19"], "expected at least 20"), (["gpu"], "expected some of")):
        done = CliRunner().invoke(difference.app, ["--device", *arguments])
        assert done.exit_code == 2 and message in done.output.replace("\n", " "), done.output


def test_too_few_repeats_and_wrong_sizes_are_refused() -> None:
    codec = load("codec")
    for arguments, message in (
        (["--repeats", "19"], "expected at least 20"),
        (["-b", "1T"], "expected a size"),
        (["-b", "2G", "-e", "1G"], "minbytes <= maxbytes"),
        (["--dtype", "int"], "expected some of"),
    ):
        done = CliRunner().invoke(codec.app, ["--device", "cuda", *arguments])
        assert done.exit_code == 2 and message in done.output.replace("\n", " "), (arguments, done.output)


def test_the_standard_set_can_be_run() -> None:
    collectives = load("collectives")
    for name, fields in collectives.CUDA.items():
        spec = Spec(**{"backends": ["nccl", "zcomm"], **fields}, device="cuda", seconds=2.0)
        assert name.startswith(spec.collective) and spec.nodes in name
    assert max(collectives.WIDE) == 1 << 30 and min(collectives.WIDE) == 8
