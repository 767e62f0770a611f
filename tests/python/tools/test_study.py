"""The convergence study, a few steps of it: exact is plain training, and the results say what they promise to say."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import torch
from rich.console import Console
from typer.testing import CliRunner

from bench import results_file
from bench.convergence import kept, outer, report
from bench.convergence import run as study
from bench.convergence.cases import Configuration, Setting
from bench.convergence.report import Row
from zcomm import _core

TINY = Setting(width=64, layers=1, sequence=16, batch=1, steps=3, warmup_steps=2, validation_sequences=8)
DEFAULT = Configuration("int8:256", "int8:128/int4:128")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the study's own processes."""
    torch_threads, zcomm_threads = torch.get_num_threads(), _core.num_threads()
    study.use_one_thread()
    yield
    torch.set_num_threads(torch_threads)
    _core.set_num_threads(zcomm_threads)


def plain_losses(setting: Setting, seed: int) -> list[float]:
    """The same training without ranks, shards or collectives. Gradients are added as the exact reduce-scatter adds
    them: over each node, then the nodes' sums, then the factor."""
    text, _ = study.corpus()
    torch.manual_seed(seed)
    model = study.GPT(setting.width, setting.layers, setting.sequence)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, setting.beta2))
    losses = []
    for step in range(setting.steps):
        for group in optimizer.param_groups:
            group["lr"] = study.learning_rate(setting, step)
        of_ranks = []
        loss_of_step = 0.0
        for rank in range(study.WORLD_SIZE):
            number = (seed * setting.steps + step) * study.WORLD_SIZE + rank
            loss = model(study.sample(text, setting.batch, setting.sequence, seed=number))
            of_ranks.append(torch.autograd.grad(loss, list(model.parameters())))
            loss_of_step += loss.item() / study.WORLD_SIZE
        losses.append(round(loss_of_step, 5))
        for parameter, *parts in zip(model.parameters(), *of_ranks, strict=True):
            nodes = [sum(parts[1:4], parts[0]), sum(parts[5:], parts[4])]
            parameter.grad = (nodes[0] + nodes[1]) / study.WORLD_SIZE
        optimizer.step()
    return losses


def test_exact_is_plain_training() -> None:
    record = study.train(Configuration(), TINY, seed=1)
    assert record["losses"] == plain_losses(TINY, seed=1)
    assert record["gathered_validation_loss"] == record["validation_loss"]
    assert all(value is None for step in record["weight_snr_db"] for value in step)
    # Eight float32 numbers are added: 7 roundings of 2^-24 each lie far below -100 dB.
    assert all(value is None or value > 100 for step in record["gradient_snr_db"] for value in step)


def test_what_is_compressed_is_compressed() -> None:
    record = study.train(DEFAULT, TINY, seed=1)
    again = study.train(DEFAULT, TINY, seed=1)
    assert record["losses"] == again["losses"]
    assert record["validation_loss"] == again["validation_loss"] != record["gathered_validation_loss"]
    # A block's error is at most half a scale: the noise of int8 is at least 42 dB below a block's largest value.
    for name, weight, gradient in zip(
        record["parameters"], record["weight_snr_db"][0], record["gradient_snr_db"][0], strict=True
    ):
        if "norm" in name:
            assert weight is None  # exact
            assert gradient is None or gradient > 100
        else:
            assert 20 < weight < 60
            # Rows of bytes and positions that this text does not have are zero, of all of them in some parameters.
            assert gradient is None or 5 < gradient < 60


def test_lossless_weights_change_nothing_but_the_bytes() -> None:
    setting = replace(TINY, gathered_as="bfloat16")
    for gradients in ("exact", "int8:128/int4:128"):
        exact, lossless = (
            study.train(Configuration(gradients=gradients, lossless=lossless), setting, seed=1)
            for lossless in (False, True)
        )
        assert all(lossless[name] == exact[name] for name in kept.BITS)
        # The first gather is of whole weights, the other two and that of the validation are not.
        assert 0 < lossless["inter_node_bytes"] < exact["inter_node_bytes"]
        assert lossless["intra_node_bytes"] == exact["intra_node_bytes"]
        assert exact["gathered_validation_loss"] != exact["validation_loss"]  # of bfloat16 weights


def losses_of_two_sites(setting: Setting, seed: int) -> list[float]:
    """Those of the first site, of sites that take turns in this process, with outer steps by their definition."""
    text, _ = study.corpus()
    models = [study.new_model(setting, seed) for _ in range(outer.SITES)]
    inner = [outer.inner_optimizers(model, setting) for model in models]
    values = [parameter.detach().clone() for parameter in models[0].parameters()]
    momenta = [torch.zeros_like(value) for value in values]
    losses = []
    for step in range(setting.steps):
        for site, model in enumerate(models):
            number = (seed * setting.steps + step) * outer.SITES + site
            loss = model(study.sample(text, setting.batch, setting.sequence, seed=number))
            loss.backward()
            for optimizer in inner[site]:
                optimizer.param_groups[0]["lr"] = study.learning_rate(setting, step)
                optimizer.step()
                optimizer.zero_grad()
            if site == 0:
                losses.append(round(loss.item(), 5))
        if (step + 1) % setting.outer_every == 0:
            for value, momentum, *parameters in zip(values, momenta, *(m.parameters() for m in models), strict=True):
                mean = sum(value - parameter.detach() for parameter in parameters) / outer.SITES
                momentum.mul_(outer.OUTER_MOMENTUM).add_(mean)
                value.sub_(outer.OUTER_LEARNING_RATE * (mean + outer.OUTER_MOMENTUM * momentum))
                for parameter in parameters:
                    parameter.data.copy_(value)
    return losses


@pytest.mark.parametrize("muon", [False, True])
def test_outer_steps_of_two_sites(muon: bool) -> None:
    setting = replace(TINY, steps=6, outer_every=2, muon=muon)
    exact = study.train(Configuration(), setting, seed=1)
    assert exact["losses"] == pytest.approx(losses_of_two_sites(setting, seed=1), abs=2e-5)
    lossy = study.train(Configuration(gradients="int4:64", feedback=True), setting, seed=1)
    assert lossy["losses"][:2] == exact["losses"][:2]
    assert lossy["losses"][2:] != exact["losses"][2:]
    assert 7 * lossy["inter_node_bytes"] <= exact["inter_node_bytes"]


def test_flat_blocks_mix_norms_and_matrices() -> None:
    record = study.train(Configuration(weights="int8:256", flat=True), TINY, seed=1)
    own = study.train(Configuration(weights="int8:256"), TINY, seed=1)
    flat_snr, own_snr = (dict(zip(r["parameters"], r["weight_snr_db"][0], strict=True)) for r in (record, own))
    # 8 ones of a rank's norm set the scale of values of 0.02 beside them.
    assert flat_snr["blocks.0.qkv.weight"] < own_snr["blocks.0.qkv.weight"] - 3
    assert record["inter_node_bytes"] < own["inter_node_bytes"]


def test_feedback_makes_up_for_what_was_lost() -> None:
    parameters = list(study.new_model(TINY, seed=1).parameters())
    shape = (study.WORLD_SIZE, *study.pack(parameters).shape)
    gradients = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    errors = []
    for feedback in (False, True):
        collectives = study.Collectives(
            Configuration(gradients="exact/int4:128", feedback=feedback), parameters, seed=1
        )
        means = [collectives.reduce_scatter(gradients).clone() for _ in range(8)]
        errors.append((sum(means) / 8 - gradients.mean(dim=0)).abs().max())
    # The same error each time stays in the mean of 8 calls; with feedback only that of the last does, an eighth.
    assert errors[1] < errors[0] / 4


def test_the_seed_of_a_run_is_that_of_stochastic_rounding() -> None:
    parameters = list(study.new_model(TINY, seed=1).parameters())
    shape = (study.WORLD_SIZE, *study.pack(parameters).shape)
    gradients = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    stochastic = Configuration(gradients="int8:128/int4:128:stochastic")
    first, again, other = (
        study.Collectives(stochastic, parameters, seed).reduce_scatter(gradients) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_shards_are_those_of_fsdp2() -> None:
    parameters = [torch.nn.Parameter(torch.arange(16.0).view(8, 2)), torch.nn.Parameter(100 + torch.arange(16.0))]
    shards = study.pack(parameters)
    assert shards.shape == (8, 4)
    assert shards[3].tolist() == [6, 7, 106, 107]
    copies = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    study.unpack(shards, copies)
    for copy, parameter in zip(copies, parameters, strict=True):
        assert torch.equal(copy, parameter)


def test_each_matrix_has_its_segment_and_norms_are_exact() -> None:
    parameters = list(study.new_model(TINY, seed=1).parameters())
    cut = study.segments("int4:128", parameters, flat=False)
    assert [elements * study.WORLD_SIZE for elements, _ in cut] == [p.numel() for p in parameters]
    assert {format for (_, format), p in zip(cut, parameters, strict=True) if p.dim() == 1} == {"exact"}
    assert {format for (_, format), p in zip(cut, parameters, strict=True) if p.dim() == 2} == {"int4:128"}
    total = sum(elements for elements, _ in cut)
    assert study.segments("int4:128", parameters, flat=True) == [(total, "int4:128")]
    assert study.segments("exact", parameters, flat=False) == [(total, "exact")]


def test_bytes_are_those_of_the_wires() -> None:
    # 6 wires inside, 1 to the other node, of weights and of gradients; a wire of 1024 values has 4 or 8 scales.
    counted = study.bytes_per_step([(1024, "int8:256"), (8, "exact")], [(1024, "int8:128/int4:128"), (8, "exact")])
    assert counted == {
        "intra_node_bytes": 6 * ((16 + 1024 + 32) + (16 + 1024 + 32)),
        "inter_node_bytes": (16 + 1024 + 32) + (16 + 512 + 32),
    }


def test_a_study_resumes_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process of its own would import torch once more, for longer than all runs here take.
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda processes, *_, **__: ThreadPoolExecutor(processes))
    results, page, picture = (tmp_path / name for name in ("study.jsonl", "page.md", "study.png"))
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    quick = replace(Setting(), steps=2, batch=1, validation_sequences=16)
    record = study.train(Configuration(), quick, seed=1)
    results_file.append(results, kept.measurement(record, results_file.commit()))
    first = results.read_text()
    options = ["--quick", "--seeds", "2", "--processes", "1", "--only", "int8:128/int4:64"]
    options += ["--results", str(results), "--docs", str(page)]
    run = CliRunner().invoke(study.app, options, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert results.read_text().startswith(first)  # existing results are not run again
    (measurement,) = results_file.read(results)  # of one commit and one machine
    assert len(measurement.rows) == 4
    done = kept.read(results)
    runs = [(configuration.gradients, seed) for configuration, _, seed in done]
    assert sorted(runs) == [(formats, seed) for formats in ("exact", "int8:128/int4:64") for seed in (0, 1)]
    assert all(setting == quick for _, setting, _ in done)
    assert all(math.isfinite(record["validation_loss"]) for record in done.values())
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "\n| int8:128/int4:64 | " in text
    report.plot(report.summarize(list(done.values())), picture)
    assert picture.stat().st_size > 0


def record_of(weights: str, gradients: str, seed: int, loss: float, between: int) -> dict:
    return {
        "commit": "0123456",
        "cpu": "AVX2",
        "configuration": {"case": "usual", "weights": weights, "gradients": gradients},
        "seed": seed,
        "validation_loss": loss,
        "inter_node_bytes": between,
        "intra_node_bytes": between,
        "bits": "",
        "gradient_snr_db": [21.0, None, 30.0],  # three parameters
        "weight_snr_db": [None, None, None],
        "gradient_snr_along_db": [25.0, 26.0],  # two steps
    }


def test_a_run_that_fails_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that were under way are kept, those that were not begun are not."""
    failed = threading.Event()
    finished = study.train(Configuration(), TINY, seed=0)

    def train(configuration: Configuration, setting: Setting, seed: int) -> dict[str, object]:
        if seed == 1:
            raise ValueError("a bad run")
        assert seed == 0 or failed.wait(60)
        return {**finished, "configuration": asdict(configuration), "setting": asdict(setting), "seed": seed}

    def cancel(run: Future) -> bool:
        failed.set()
        return Future.cancel(run)

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any) -> Future:
            run = super().submit(*args)
            run.cancel = partial(cancel, run)
            return run

    monkeypatch.setattr(study, "train", train)
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda processes, *_, **__: Pool(processes))
    results = tmp_path / "results.jsonl"
    keys = [(Configuration(), TINY, seed) for seed in range(100)]
    with pytest.raises(ValueError, match="a bad run"):
        study.run_missing(keys, results, 1, Console(file=io.StringIO()))
    seeds = [seed for _, _, seed in kept.read(results)]
    assert {0, 2} <= set(seeds) and len(seeds) < 99


def test_gaps_are_paired_and_the_rule_takes_the_cheapest_that_passes() -> None:
    exact = [2.0, 3.0, 4.0]
    records = [record_of("exact", "exact", seed, loss, 400) for seed, loss in enumerate(exact)]
    gaps = {"int8:128": [0.0, 0.01, 0.02], "int4:128": [0.01, 0.02, 0.03], "int4:64": [0.1, 0.6, 0.0]}
    cost = {"int8:128": 100, "int4:128": 60, "int4:64": 50}
    for formats, percents in gaps.items():
        for seed, percent in enumerate(percents):
            records.append(record_of("exact", formats, seed, exact[seed] * (1 + percent / 100), cost[formats]))
    records.append(record_of("exact", "int4:32", 9, 1.0, 1))  # of a seed that has no exact run
    rows = {row.name: row for row in report.summarize(records)}
    assert list(rows) == ["exact", *(f"gradients {formats}" for formats in gaps)]
    row = rows["gradients int4:128"]
    assert row.gaps == pytest.approx([0.01, 0.02, 0.03])
    # mean 0.02, standard deviation 0.01: 4.303 * 0.01 / sqrt(3) on either side
    assert row.half_interval == pytest.approx(0.0248434, rel=1e-5)
    assert report.median_and_worst(row.gradient_snr) == (25.5, 21.0)
    assert report.median_and_worst(row.weight_snr) is None
    assert [name for name, row in rows.items() if row.is_choice] == ["gradients int4:128"]
    assert not rows["gradients int4:64"].passes  # cheaper, but 0.23 % on average


def test_a_choice_passes_in_every_case() -> None:
    records = []
    for case, percents in {"usual": 0.1, "outliers": 0.3}.items():
        for seed in range(2):
            for formats, percent, cost in [
                *[("exact", 0.0, 400), ("int8:128", 0.0, 100), ("int4:128", percents, 60)],
                ("int4:128/eden2:128", 0.0, 30),  # untested in large models
            ]:
                record = record_of("exact", formats, seed, 2 + 0.02 * percent, cost)
                record["configuration"]["case"] = case
                records.append(record)
    rows = report.summarize(records)
    assert [(row.case, row.name) for row in rows if row.is_choice] == [("usual", "gradients int8:128")]


def test_lossless_rows_say_whether_they_are_the_runs_with_exact_weights() -> None:
    records = []
    for seed, cpu in enumerate(("AVX2", "AVX512")):
        for lossless in (False, True):
            record = record_of("exact", "int8:128", seed, 2.0, 100) | {"cpu": cpu}
            record["configuration"]["lossless"] = lossless
            records.append(record)
    records += [record_of("exact", "exact", seed, 2.0, 400) for seed in range(2)]

    def verdict() -> str:
        (row,) = [row for row in report.summarize(records) if row.words == "lossless"]
        return report.cells(row)[-1]

    assert verdict() == "same bits"
    records[3]["bits"] = "other"
    assert verdict() == "other bits"
    records[3]["cpu"] = "AVX2"  # may add in another order than its twin
    assert verdict() == "same bits"


def test_the_noise_floor_is_that_of_bf16() -> None:
    records = [record_of("exact", "exact", seed, 2.0, 400) for seed in range(3)]
    for formats, percents in {"bf16": [-0.1, 0.0, 0.1], "int4:128": [0.3, 0.0, 0.6]}.items():
        for seed, percent in enumerate(percents):
            records.append(record_of("exact", formats, seed, 2 * (1 + percent / 100), 100))
    text = report.noise(report.summarize(records))
    # Standard deviations of 0.1 and 0.3, and the root of (0.01 + 0.09) / 2.
    assert "seeds: 0.10 % with gradients in bf16, 0.22 % as the root mean square of the 2 compressed rows." in text
    assert report.noise(report.summarize(records[:3])) == ""


def test_a_row_of_one_seed_has_no_verdict() -> None:
    row = Row("usual", "exact", "int8:128", "", 1, 1, gaps=[-1.0])
    assert row.half_interval is None and not row.passes
