"""The counters as a dictionary and as a file for Prometheus are those of zcomm.stats()."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.calls import gather_in_place
from support.worlds import run

import zcomm

NUM = 32768
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "zcomm.json"


def counted(folder: str) -> dict[str, float]:
    whole = torch.zeros(2 * NUM)
    gather_in_place(whole)
    with zcomm.override(forms="single"):
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8))
    stats = zcomm.stats()
    found = stats.to_dict()
    assert found["zcomm/all_gather/calls"] == stats.all_gather.calls == 1
    assert found["zcomm/all_gather/bytes"] == 8 * NUM
    assert found["zcomm/all_gather/wire_bytes"] == stats.all_gather.wire_bytes
    assert found["zcomm/reduce_scatter/exact/min_bytes/calls"] == 1
    assert found["zcomm/reduce_scatter/exact/min_bytes/bytes"] == 32
    assert found["zcomm/all_gather/hops/0/intra_node_bytes"] == found["zcomm/all_gather/intra_node_bytes"] > 0
    assert "corrupted" not in f"{stats}{stats.summary()}"
    corrupted = dataclasses.replace(stats, corrupted_messages=2)
    assert "\ncorrupted messages: 2" in str(corrupted) and "; corrupted messages: 2" in corrupted.summary()
    assert all(type(value) is float for value in found.values())
    stats.write_prometheus(Path(folder) / f"rank{dist.get_rank()}.prom")
    zcomm.stats(dist.new_group()).write_prometheus(Path(folder) / f"group{dist.get_rank()}.prom")
    with pytest.raises(ValueError, match=r"path: expected a name that ends in .prom, got 'zcomm.txt'"):
        stats.write_prometheus("zcomm.txt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ImportError, match=r"needs prometheus_client: pip install prometheus_client"):
            stats.write_prometheus(Path(folder) / "none.prom")
    return found


def test_counters_are_those_of_stats(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    found = run(lambda: counted(str(tmp_path)))
    names = [f"{kind}{rank}" for kind in ("group", "rank") for rank in range(2)]
    assert sorted(file.stem for file in tmp_path.iterdir()) == names
    series = [set(re.findall(r"^\w+{.*}", (tmp_path / f"{name}.prom").read_text(), re.MULTILINE)) for name in names]
    assert all(series) and len(set.union(*series)) == sum(map(len, series)), "a scrape of all has no series twice"
    for rank, metrics in enumerate(found):
        families = parser.text_string_to_metric_families((tmp_path / f"rank{rank}.prom").read_text())
        samples = {
            (sample.name, sample.labels.get("collective"), sample.labels.get("reason")): sample
            for family in families
            for sample in family.samples
        }
        assert {sample.labels["rank"] for sample in samples.values()} == {str(rank)}
        calls = samples["zcomm_calls_total", "all_gather", None]
        assert calls.value == 1
        sent = samples["zcomm_wire_bytes_total", "all_gather", None]
        assert 0 < sent.value < metrics["zcomm/all_gather/bytes"]
        assert samples["zcomm_corrupted_messages_total", None, None].value == metrics["zcomm/corrupted_messages"] == 0
        left = samples["zcomm_uncompressed_bytes_total", "reduce_scatter", "min_bytes"]
        assert left.value == 32


def test_the_dashboard_draws_what_the_file_has(tmp_path: Path) -> None:
    run(lambda: counted(str(tmp_path)))
    written = set(re.findall(r"^# TYPE (\w+) counter$", (tmp_path / "rank0.prom").read_text(), re.MULTILINE))
    assert set(re.findall(r"zcomm_\w+", DASHBOARD.read_text())) == written
