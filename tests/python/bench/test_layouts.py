"""Exact layouts that the planner compares compression with, and the table of README that rests on them."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

import zcomm
from zcomm_bench.planner import Cluster, Figure, Workload, report, step
from zcomm_bench.planner.cluster import inter_link, intra_link, processor
from zcomm_bench.planner.workload import from_config

README = Path(__file__).parents[3] / "README.md"
PERFORMANCE = README.with_name("docs") / "performance.md"
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
OPTIONS = step.options_of(Cluster(2, 8, intra_link("nvlink3"), inter_link("100gbit"), processor("a100")))
DDP, COMPRESSED_DDP, NODE, HSDP, COMPRESSED = OPTIONS[len(step.OPTIONS) :]


def cluster(inter: str) -> Cluster:
    return Cluster(2, 8, intra_link("nvlink3"), inter_link(inter), processor("a100"))


def workload(reduce_dtype: str) -> Workload:
    return Workload(*from_config(LLAMA_8B, sequence=4096), 4096, reduce_dtype=reduce_dtype)


def plan(inter: str, reduce_dtype: str = "bfloat16") -> report.Plan:
    return report.make(workload(reduce_dtype), cluster(inter), OPTIONS, step.OVERLAP)


def test_hsdp_sends_every_gradient_twice_between_two_nodes_and_nothing_else() -> None:
    """Computed by hand: a ring of two sends half of what it reduces, and half of what it gathers."""
    work = workload("float32")
    sent = {name: cost.inter_bytes for name, cost in step.costs_of(HSDP, work, cluster("100gbit")).items()}
    assert sent.pop("all_reduce") == pytest.approx(4 * work.num_parameters, rel=1e-3)
    assert set(sent.values()) == {0}
    wires = step.costs_of(COMPRESSED, work, cluster("100gbit"))["all_reduce"].inter_bytes
    reduced, gathered = 4 + 16 / 128, 8 + 16 / 128  # bits: sums in int4, their mean in int8
    assert wires == pytest.approx((reduced + gathered) / 16 * work.num_parameters, rel=0.01)


def test_the_nodes_link_is_shared_by_its_ranks() -> None:
    work, machine = workload("bfloat16"), cluster("100gbit")
    cost = step.costs_of(HSDP, work, machine)["all_reduce"]
    assert cost.wire == pytest.approx(cost.inter_bytes / machine.inter.rate, rel=1e-3)


def test_weights_that_stay_in_the_node_cross_once() -> None:
    work, machine = workload("bfloat16"), cluster("100gbit")
    costs = step.costs_of(NODE, work, machine)
    gathered = sum(unit.num_elements * unit.count for unit in work.units)
    assert costs["all_gather"].inter_bytes == pytest.approx(2 * gathered * 15 / 16, rel=1e-3)
    assert costs["all_gather in nodes"].inter_bytes == 0


def test_ddp_is_the_baseline_of_models_that_fit() -> None:
    """Computed by hand for two ranks and values of 2 bytes: DDP sends 2 bytes for each, FSDP up to 3."""
    small = Workload(*from_config({**LLAMA_8B, "num_hidden_layers": 1}, sequence=4096), 4096)
    machine = Cluster(2, 1, intra_link("nvlink3"), inter_link("1gbit"), processor("a100"))
    assert step.options_of(machine) == (*step.OPTIONS, DDP, COMPRESSED_DDP)
    made = report.make(small, machine, step.options_of(machine), step.OVERLAP)
    assert made.exact.option is DDP
    assert made.exact.inter_bytes == pytest.approx(2 * small.num_parameters, rel=1e-3)
    gathered = sum(unit.num_elements * small.gathers(unit) for unit in small.units)  # the root once, layers twice
    assert made.predictions[0].inter_bytes == pytest.approx(small.num_parameters + gathered, rel=1e-3)
    wires = next(each.inter_bytes for each in made.predictions if each.option is COMPRESSED_DDP)
    assert made.exact.inter_bytes / wires == pytest.approx(32 / (4 + 8 + 2 * 16 / 128), rel=0.01)
    assert not plan("100gbit").predictions[len(step.OPTIONS)].fits  # 8 billion parameters do not


def test_what_a_user_pastes_runs_and_compresses_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zcomm.fsdp, "compress", lambda model, **fields: None)
    for option in OPTIONS:
        names = {"dist": MagicMock(), "model": MagicMock(), "zcomm": zcomm}
        exec(option.paste, names)
        names["dist"].init_process_group.assert_called_once()
        reduces_all = 'all_reduce="int8' in option.paste
        assert reduces_all == (option is COMPRESSED)
        hooks = [call.args for call in names["model"].register_comm_hook.call_args_list]
        expected = [(zcomm.ddp.CompressState("int8:128/int4:128"), zcomm.ddp.compress_hook)]
        assert hooks == (expected if option is COMPRESSED_DDP else [])


def test_memory_of_the_layouts() -> None:
    work, machine = workload("bfloat16"), cluster("100gbit")
    everywhere, node, hsdp = (step.memory_of(option, work, machine) for option in (step.OPTIONS[0], NODE, HSDP))
    assert node - everywhere == pytest.approx(2 * work.num_parameters / 8)
    assert step.memory_of(DDP, work, machine) == step.STATE_BYTES * work.num_parameters
    assert hsdp - everywhere == pytest.approx(step.STATE_BYTES * work.num_parameters / 16)


def test_compression_is_held_against_the_best_exact_layout() -> None:
    made = plan("100gbit")
    assert made.exact.option is HSDP and made.speedup(made.predictions[0]) < 1
    assert '1.5 times as fast as "exact, HSDP", predicted' in made.advice
    assert plan("3.2tbit").advice.startswith('Stay exact with "exact, reshard_after_forward')


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float32"])
def test_the_table_of_readme_is_what_the_planner_says(reduce_dtype: str) -> None:
    section = README.read_text().partition("## Is it for me?")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "bit/s" in line]
    rows = [row for row in rows if len(row) == 4]
    assert len(rows) == 6
    for link, *texts in rows:
        number, unit = re.search(r"([\d.]+) ([GT])bit/s", link).groups()
        made = plan(f"{number}{unit.lower()}bit", reduce_dtype)
        text = texts[["bfloat16", "float32"].index(reduce_dtype)]
        lossless = next(each for each in made.predictions if each.option.is_lossless)
        assert text == f"{made.speedup(lossless):.1f}x", link
        assert (texts[2] == "no") == (plan(f"{number}{unit.lower()}bit").best.option.is_exact), link


def test_the_page_of_performance_repeats_figures_of_readme() -> None:
    rows = re.findall(
        r"^\| ([\d.]+ [GT]bit/s) \| ([\d.x to]+) \| \*predicted\* \|$", PERFORMANCE.read_text(), re.MULTILINE
    )
    assert len(rows) == 4
    for link, text in rows:
        (pair,) = re.findall(rf"^\| {link} \| ([\d.]+x) \| ([\d.]+x) \|", README.read_text(), re.MULTILINE)
        assert text == " to ".join(dict.fromkeys(pair)), link


def test_a_figure_says_that_it_is_a_share() -> None:
    shared = cluster("100gbit").of_one_rank.inter.bandwidth
    assert shared == Figure(100e9 / 8 / 8, shared.source)
