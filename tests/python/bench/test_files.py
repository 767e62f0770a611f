"""Files that others have written: what plan and prove --verify refuse before they allocate or compute."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from support import proof
from support.model_configs import LLAMA_8B
from typer.testing import CliRunner

from zcomm_bench import files, report_file
from zcomm_bench.cli import app
from zcomm_bench.planner.cluster import MOST_RANKS
from zcomm_bench.planner.workload import MOST_ELEMENTS
from zcomm_bench.prove import verify

# Deeper than Python's limit of recursions. The time of PyYAML grows with the square of the depth.
DEEP = {"JSON": "[" * 100_000 + "]" * 100_000, "YAML": "[" * 1_000 + "]" * 1_000}
FITS = {"JSON": "[" * 49 + "1]" + "]" * 48, "YAML": "[" * 49 + "1]" + "]" * 48}


@pytest.mark.parametrize("kind", ["JSON", "YAML"])
def test_depth_size_and_numbers_have_bounds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"

    def refused(text: str, reason: str) -> None:
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"file: expected a thing: {reason}"):
            files.read(file, "a thing", kind)

    file.write_text(FITS[kind])
    assert files.read(file, "a thing", kind) == json.loads(FITS[kind])
    refused(DEEP[kind], "depth: expected at most 50 levels")
    refused("[" * 51 + "]" * 51, "depth: expected at most 50 levels")
    refused('{"a": [1, 9223372036854775809]}', r"numbers: expected at most 2\^63")
    refused(f'{{"a": 1{"0" * 400}}}', r"numbers: expected at most 2\^63")
    refused("[" + "0, " * 3 + "1", "")
    monkeypatch.setitem(files.MOST_BYTES, kind, 1 << 20)
    refused(f"[{'1, ' * (1 << 19)} 1]", "size: expected at most 1 MiB")
    file.unlink()
    with pytest.raises(ValueError, match=r"file: expected a thing: .*No such file"):
        files.read(file, "a thing", kind)


def test_aliases_of_yaml_are_read_once(tmp_path: Path) -> None:
    """Nine levels of ten references each stand for a billion values."""
    lines = ["a0: &a0 [1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (tmp_path / "file").write_text("\n".join(lines))
    assert len(files.read(tmp_path / "file", "a thing", "YAML")) == 10
    (tmp_path / "file").write_text("&a [*a]")
    assert files.read(tmp_path / "file", "a thing", "YAML")


def _refuses(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "1000"})
    assert result.exit_code in (1, 2) and reason in result.output, (result.output, result.exception)


@pytest.mark.parametrize("sizes", [{"hidden_size": 10**9}, {"vocab_size": 10**9}, {"intermediate_size": 10**15}])
def test_a_model_beyond_all_bounds_is_refused(sizes: dict[str, int], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B | sizes))
    _refuses(["plan", "--model", str(file)], f"model: expected at most {MOST_ELEMENTS:.0e} elements in a unit, got")


def test_a_cluster_beyond_all_bounds_is_refused(tmp_path: Path) -> None:
    model, cluster = tmp_path / "config.json", tmp_path / "cluster.yaml"
    model.write_text(json.dumps(LLAMA_8B))
    cluster.write_text("nodes: 1000000000")
    message = f"nodes: expected at most {MOST_RANKS} ranks, got 1000000000 x 8"
    _refuses(["plan", "--model", str(model), "--cluster", str(cluster)], message)
    cluster.write_text(DEEP["YAML"])
    _refuses(
        ["plan", "--model", str(model), "--cluster", str(cluster)],
        "expected a YAML file: depth: expected at most 50 levels",
    )


def test_no_reader_of_json_ends_in_a_recursion(tmp_path: Path) -> None:
    model, file = tmp_path / "config.json", tmp_path / "deep.json"
    model.write_text(json.dumps(LLAMA_8B))
    file.write_text(DEEP["JSON"])
    _refuses(["plan", "--model", str(file)], "model: ")
    _refuses(
        ["plan", "--model", str(model), "--calibration", str(file)],
        "expected a calibration: depth: expected at most 50",
    )
    _refuses(["prove", "--verify", str(file)], "refused: ")
    with pytest.raises(ValueError, match="depth: expected at most 50 levels"):
        report_file.load(file)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bits_elements", 10**9, "bits_elements: expected at most 20003"),
        ("bits_elements", -1, "bits_elements: expected at most 20003"),
        ("sizes", [2**60], "sizes: expected at most"),
    ],
)
def test_a_report_that_asks_for_much_is_refused(name: str, value: Any, message: str) -> None:
    made = copy.deepcopy(proof.judged())
    made["scale"][name] = value
    with pytest.raises(verify.NotTrue, match=message):
        verify.check(made)
