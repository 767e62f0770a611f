"""The files of bench/results, and the pages' tables that are made from them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.benchmarks import load
from support.validation.lab_calls import collective_reports

from bench import results_file, table_text, tables
from bench.convergence import report
from bench.results_file import Measurement

MOST_BYTES = 300_000


def test_the_tables_of_the_pages_are_those_of_the_results(tmp_path: Path) -> None:
    """`make tables` writes them."""
    pages = [page.read_text() for page in tables.PAGES]
    assert [tables.fill(page) for page in pages] == pages
    assert all(f"<!-- table: {name} -->" in "".join(pages) for name in tables.TABLES)
    copy = tmp_path / "numerics.md"
    copy.write_text(tables.NUMERICS.read_text())
    report.write_markdown(tables.study_rows(), copy)
    assert copy.read_text() == tables.NUMERICS.read_text()


def test_what_git_keeps_is_small_and_says_where_it_comes_from() -> None:
    files = sorted(results_file.RESULTS.iterdir())
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    for file in files:
        for one in results_file.read(file):
            assert len(one.commit) == 7 and int(one.commit, 16) > 0, f"{file.name}: {one.name}: commit {one.commit}"
            assert one.machine and one.rows, f"{file.name}: {one.name}"


def test_a_measurement_replaces_that_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "new" / "codec-avx2.jsonl"
    first, other = (
        Measurement(name, "0123456", "AVX2", ["size", "gbps"], {"launches": 3}, [[8, 1.5]]) for name in ("one", "two")
    )
    results_file.keep(path, [first, other])
    again = Measurement("one", "89abcde", "AVX2", ["size"], {}, [[8], [16]])
    results_file.keep(path, [again])
    assert results_file.read(path) == [again, other]
    assert results_file.load("codec", path.parent) == {"avx2": {"one": again, "two": other}}
    assert other.records == [{"size": 8, "gbps": 1.5}]


def test_rows_are_appended_below_their_head(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    for commit, row in (("0123456", 1), ("0123456", 2), ("89abcde", 3)):
        results_file.append(path, Measurement("study", commit, "AVX2", ["seed"], {}, [[row]]))
    assert [(one.commit, one.rows) for one in results_file.read(path)] == [("0123456", [[1], [2]]), ("89abcde", [[3]])]


def test_a_measurement_names_the_commit_and_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = results_file.measured(
        "a", "AVX2", ["x", "y"], [{"x": 1.23456789, "y": None, "z": 1}, {"x": 2.0, "y": 123456}]
    )
    assert one.rows == [[1.2346, None], [2, 123456]]
    assert one.commit == results_file.commit()

    def no_git(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert results_file.commit() == results_file.UNKNOWN


@pytest.mark.parametrize(("text", "message"), [("[1]\n", "expected an object"), ("HEAD[1,2]\n", "expected 1 values")])
def test_a_line_that_fits_no_head_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "codec-avx2.jsonl"
    path.write_text(text.replace("HEAD", '{"name":"a","commit":"b","machine":"c","columns":["x"]}\n'))
    with pytest.raises(ValueError, match=message):
        results_file.read(path)


def test_a_table_is_of_one_commit_per_machine() -> None:
    source = table_text.Source("codec")
    source.used = [Measurement("a", commit, "AVX2", []) for commit in ("0123456", "89abcde")]
    with pytest.raises(ValueError, match="a: expected commit 0123456 as in its table, got 89abcde"):
        table_text.origins(source)


def test_a_collective_is_kept_as_the_planner_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    collectives = load("collectives")
    name = "reduce_scatter_float_4x1_1gbit"
    spec = collectives.Spec(**collectives.STANDARD[name], launches=3)
    row = {"size": 64, "backend": "zcomm", "format": "int4:128", "median_us": 1.5, "speedup": 2.0}
    row |= {"link_bytes": None, "codec_us": 0.5, "algbw": 1.0}
    collectives.keep(name, spec, {"results": [row]}, "avx2", "AVX2 (2 cores)", tmp_path)
    ((read, report),) = collective_reports(tmp_path).items()
    assert read == f"{name}-avx2"
    config = {"collective": "reduce_scatter", "dtype": "float", "nodes": "4x1", "link": "1gbit", "options": {}}
    assert config.items() <= report["config"].items()
    assert report["results"] == [{key: row[key] for key in collectives.KEPT} | {"type": "float"}]


def test_figures_of_generation_are_of_a_token() -> None:
    pytest.importorskip("typer")
    parts = {"first token": {"seconds": 1.0, "bytes": 800.0}, "further tokens": {"seconds": 0.5, "bytes": 80.0}}
    runs = {"gloo": {"sequences": 8, "parts": {**parts, "step": {"seconds": 1.0, "bytes": 7.0}}}}
    (row,) = load("example_runs").generation_rows(runs)
    assert list(row.values()) == ["gloo", 16.0, 10.0, 100.0, 7.0]
