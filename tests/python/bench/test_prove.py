"""The verdicts of ``zcomm_bench prove`` and what its --verify refuses, on given samples: no time is measured here."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from support import proof
from support.proof import Raw, slower
from typer.testing import CliRunner

from zcomm_bench.cli import app
from zcomm_bench.prove import claims, command, facts, figures, plots, prediction, report, verify
from zcomm_bench.prove.claims import FAIL, INVALID, PASS
from zcomm_bench.prove.intervals import of_median, of_ratios

AUTO, BYTES, MODEL = (
    'never more than 2 % slower under compress="auto"',
    "95 % of the byte ratio on slow links",
    "the model's error",
)
SPEED = (AUTO, BYTES, "step")


@pytest.fixture(scope="module")
def sound() -> Raw:
    return proof.judged()


def test_sound_samples_pass(sound: Raw) -> None:
    assert set(proof.verdicts(sound).values()) == {PASS}
    assert report.passes(sound)
    assert verify.check(copy.deepcopy(sound)) == ["made by the sources that are here"]


def test_a_wrong_bit_fails() -> None:
    def fault(made: Raw) -> None:
        row = next(row for row in made["bits"]["rows"] if row["collective"] == "reduce_scatter")
        row["crc"][2] ^= 1
        row["first_wrong"][2] = "1 of 515 elements, first 7: expected 1.0, got 1.5"

    made = proof.judged(fault)
    assert proof.verdicts(made)["bits"] == FAIL
    assert "rank 2: 1 of 515 elements, first 7" in proof.why(made, "bits")
    assert all(proof.verdicts(made)[claim] == PASS for claim in (*SPEED, MODEL))


def test_ranks_with_other_bits_fail_though_each_has_what_it_expects() -> None:
    def fault(made: Raw) -> None:
        row = next(row for row in made["bits"]["rows"] if row["collective"] == "broadcast")
        row["crc"][3] = row["expected"][3] = row["crc"][3] ^ 1

    made = proof.judged(fault)
    assert proof.verdicts(made)["bits"] == FAIL
    assert "ranks have different bits" in proof.why(made, "bits")


def test_bits_of_exact_calls_prove_nothing() -> None:
    made = proof.judged(lambda made: made["bits"]["compressed_calls"].update(scatter=0))
    assert proof.verdicts(made)["bits"] == INVALID
    assert proof.why(made, "bits") == "not compressed at all: scatter"


def test_a_slow_exact_baseline_makes_speed_invalid() -> None:
    def fault(made: Raw) -> None:
        for cell in (*made["sanity"]["cells"], *made["sweep"]["cells"]):
            cell["samples"]["exact"] = slower(cell["samples"]["exact"], 2.0)

    made = proof.judged(fault)
    assert all(proof.verdicts(made)[claim] == INVALID for claim in SPEED)
    assert "the exact baseline is slow: all_gather reaches 0.0" in proof.why(made, "step")
    assert "of 0.1 Gbit/s, expected 80%" in proof.why(made, "step")
    assert proof.verdicts(made)["bits"] == proof.verdicts(made)[MODEL] == PASS


def test_an_unknown_link_makes_speed_invalid() -> None:
    made = proof.judged(lambda made: made["link"].update(bytes_per_second=None))
    assert all(proof.verdicts(made)[claim] == INVALID for claim in SPEED)
    assert "--link RATE" in proof.why(made, "step")


def test_a_slow_rank_is_named() -> None:
    def fault(made: Raw) -> None:
        made["sanity"]["local"]["codec"][3] = slower(made["sanity"]["local"]["codec"][3], 1.5)

    made = proof.judged(fault)
    assert all(proof.verdicts(made)[claim] == INVALID for claim in (*SPEED, MODEL))
    assert "rank 3 is slow: its codec takes 1.5" in proof.why(made, "step")
    assert proof.verdicts(made)["bits"] == PASS


def test_a_model_that_is_off_by_30_percent_fails() -> None:
    def fault(made: Raw) -> None:
        for row in made["predictions"]["calls"]:
            row["compressed"]["seconds"] *= 1.3

    made = proof.judged(fault)
    verdicts = proof.verdicts(made)
    assert verdicts.pop(MODEL) == FAIL
    assert set(verdicts.values()) == {PASS}
    assert "expected at most 20" in proof.why(made, MODEL)


def test_a_model_that_is_off_by_12_percent_everywhere_fails_on_average() -> None:
    def fault(made: Raw) -> None:
        for row in made["predictions"]["calls"]:
            row["compressed"]["seconds"] *= 1.12

    made = proof.judged(fault)
    assert proof.verdicts(made)[MODEL] == FAIL and "on average, limit 10%" in proof.why(made, MODEL)


def test_a_model_that_is_off_in_the_step_fails() -> None:
    made = proof.judged(lambda made: made["predictions"]["steps"][0].update(compressed=1.0))
    assert proof.verdicts(made)[MODEL] == FAIL
    assert "the step" in proof.why(made, MODEL)


@pytest.mark.parametrize("factor", [1.05, 1 / 1.05])
def test_noise_beyond_the_claims_makes_speed_invalid(factor: float) -> None:
    def fault(made: Raw) -> None:
        samples = made["noise"]["cells"][1]["samples"]
        samples["again"] = slower(samples["exact"], factor)

    made = proof.judged(fault)
    assert all(proof.verdicts(made)[claim] == INVALID for claim in SPEED)
    assert f"exact differs from itself by {factor:.3f}" in proof.why(made, AUTO)


@pytest.mark.parametrize(("factor", "verdict"), [(1.10, FAIL), (1.021, INVALID), (1.0, PASS)])
def test_auto_that_is_slower_than_exact(factor: float, verdict: str) -> None:
    def fault(made: Raw) -> None:
        samples = made["sweep"]["cells"][0]["samples"]
        # Pairs that differ by 3 %, so that intervals are as wide.
        samples["auto"] = [factor * each * (1 + 0.015 * (-1) ** (n // 2)) for n, each in enumerate(samples["exact"])]

    made = proof.judged(fault)
    assert proof.verdicts(made)[AUTO] == verdict
    assert "all_gather of 64 KiB" in proof.why(made, AUTO)


def test_less_than_the_byte_ratio_fails() -> None:
    def fault(made: Raw) -> None:
        samples = made["sweep"]["cells"][1]["samples"]
        samples["compressed"] = slower(samples["compressed"], 1.1)

    made = proof.judged(fault)
    assert proof.verdicts(made)[BYTES] == FAIL
    assert "all_gather of 4 MiB: 0.9" in proof.why(made, BYTES)


def test_errors_of_either_sign_may_be_0() -> None:
    assert claims.magnitude({"low": -0.3, "high": 0.25}) == (0.0, 0.3)


def test_a_network_with_one_slow_baseline_is_not_sound(sound: Raw) -> None:
    found = copy.deepcopy(sound["figures"])
    other = copy.deepcopy(found["networks"][0])
    other["name"], other["baseline"][0]["share"] = "half", 0.5
    found["networks"].append(other)
    assert not [what for what, _ in claims.sound_cells(found) if "half" in what]


def test_an_all_reduce_of_nccl_may_be_a_tree() -> None:
    """It sends a tensor once between two nodes, so that a ring's bytes would make the link nearly twice as fast."""
    found = [prediction.exact_bytes("all_reduce", 100, nodes, ranks, "nccl") for nodes, ranks in ((2, 16), (4, 4))]
    assert found == [100, 150]
    assert prediction.exact_bytes("all_reduce", 100, 1, 4, "nccl") == 75
    assert prediction.exact_bytes("all_reduce", 100, 2, 4, "gloo") == 150
    assert prediction.exact_bytes("reduce_scatter", 100, 2, 4, "nccl") == 75


def test_an_all_reduce_of_nccl_is_no_baseline(sound: Raw) -> None:
    """A ring that fills the link would count as half of it."""
    network = copy.deepcopy(figures.networks_of(sound)[0])
    assert "all_reduce" in {row["collective"] for row in figures.baseline(network)}
    network["sanity"]["rates"]["backend"] = "nccl"
    assert {row["collective"] for row in figures.baseline(network)} == {"all_gather", "reduce_scatter"}


def test_a_fast_link_says_nothing_of_slow_ones() -> None:
    def fault(made: Raw) -> None:
        for row in made["predictions"]["calls"]:
            row["other_seconds"] = row["compressed"]["seconds"]

    made = proof.judged(fault)
    assert proof.verdicts(made)[BYTES] == INVALID
    assert "no link here is slow" in proof.why(made, BYTES)


def test_exact_calls_say_nothing_of_compressed_ones() -> None:
    made = proof.judged(lambda made: made["sweep"]["cells"][3].update(compressed_calls=0))
    assert [claim for claim, verdict in proof.verdicts(made).items() if verdict == INVALID] == [BYTES, MODEL]
    assert proof.why(made, BYTES) == "not compressed at all: reduce_scatter of 4 MiB"


@pytest.mark.parametrize(
    ("change", "verdict", "why"),
    [
        ({"samples": 4.5}, FAIL, "expected at most 1.020"),
        ({"losses": 1.03}, FAIL, "the loss is +3"),
        ({"losses": float("nan")}, FAIL, "the loss is +nan%"),
        ({"compressed_calls": {"all_gather": 0, "reduce_scatter": 4}}, INVALID, "not compressed"),
    ],
    ids=str,
)
def test_steps(change: dict[str, Any], verdict: str, why: str) -> None:
    def fault(made: Raw) -> None:
        run = made["steps"]["runs"][0]
        for name, value in change.items():
            if isinstance(value, float):
                run[name]["compressed"] = slower(run[name]["compressed"], value)
            else:
                run[name] = value

    made = proof.judged(fault)
    assert proof.verdicts(made)["step"] == verdict
    assert why in proof.why(made, "step")


def test_stages_that_were_not_run_pass_nothing() -> None:
    def fault(made: Raw) -> None:
        for name in ("noise", "bits", "sweep", "steps"):
            del made[name]

    assert set(proof.verdicts(proof.judged(fault)).values()) == {INVALID}


@pytest.mark.parametrize(
    ("end", "verdict", "why"),
    [
        ({"error": "Error: lost rank 3 (closed)", "seconds": 0.5}, PASS, "within 0.5 s"),
        ({"error": "Error: lost rank 30", "seconds": 0.5}, FAIL, "rank 1 does not name rank 3"),
        ({"error": "Error: lost rank 2", "seconds": 0.5}, FAIL, "rank 1 does not name rank 3"),
        ({"error": "Error: lost rank 3", "seconds": 21.0}, FAIL, "rank 1 took 21.0 s"),
        ({"error": None, "seconds": 0.0}, FAIL, "rank 1 ended without an error"),
    ],
    ids=str,
)
def test_a_drill(end: dict[str, Any], verdict: str, why: str) -> None:
    good = {"error": "Error: lost rank 3 (closed)", "seconds": 0.4}
    ends = [good, end, good, {"error": None, "seconds": 0.0}]
    stage = {"victim": 3, "limit_seconds": 20.0, "ends": ends}
    made = proof.judged(lambda made: made.update(drill=stage))
    assert proof.verdicts(made)["drill"] == verdict
    assert why in proof.why(made, "drill")


def test_other_networks_count_where_their_baseline_is_sound() -> None:
    def fault(made: Raw) -> None:
        other = {name: copy.deepcopy(made[name]) for name in ("sanity", "predictions", "sweep")}
        other |= {"name": "sockets", "link": {"bytes_per_second": proof.LINK, "source": "the card"}}
        samples = other["sweep"]["cells"][0]["samples"]
        samples["auto"] = slower(samples["exact"], 1.5)
        slow = copy.deepcopy(other)
        slow |= {"name": "one card", "link": {"bytes_per_second": 2 * proof.LINK, "source": "the card"}}
        made["networks"]["measured"] = [other, slow]

    made = proof.judged(fault)
    assert proof.verdicts(made)[AUTO] == FAIL
    assert "all_gather of 64 KiB, sockets" in proof.why(made, AUTO)
    first, *others = proof.judged()["figures"]["networks"]
    assert others == [] and first["name"] == "as it is"
    del made["networks"]["measured"][0]
    assert proof.verdicts(report.judged({k: made[k] for k in made if k not in ("figures", "verdicts")}))[AUTO] == PASS


def test_pictures_and_pages_are_drawn(sound: Raw, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.draw(sound, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"speed_up.png", "model.png"}
    text = report.markdown(sound)
    assert text.startswith("# REHEARSAL (on CPUs): 2x2 ranks on ")
    assert "The link should carry: 0.1 Gbit/s (given by --link). The predictions rest on 0.1" in text
    assert all(claim in text for claim in (*SPEED, MODEL, "bits"))


def ranks_of(**changes: Any) -> list[dict[str, Any]]:
    alike = dict.fromkeys(facts.ALIKE, "x") | {"device": "cuda", "variables": {}}
    return [
        {**alike, "uuid": f"gpu{rank}", **{name: each[rank] for name, each in changes.items()}} for rank in range(3)
    ]


def test_ranks_that_mean_nothing_are_refused() -> None:
    for ranks, message in (
        (ranks_of()[:1], "ranks: expected at least 2, got 1"),
        (
            ranks_of(torch=("2.13", "2.13", "2.12")),
            "torch: expected the same on all ranks, got 2.13 on rank 0 and 2.12 on",
        ),
        (ranks_of(zcomm_sources=("a", "b", "a")), "zcomm_sources: .* rank 1"),
        (ranks_of(uuid=("a", "b", "a")), "gpus: expected one for each rank, got ranks 0 and 2 on one"),
        (
            ranks_of(variables=({}, {"ZCOMM_MIN_BYTES": "1"}, {})),
            "ZCOMM_MIN_BYTES: expected it unset, got it on rank 1",
        ),
    ):
        with pytest.raises(facts.Refused, match=message):
            facts.rehearsal_of(ranks, asked=False)
    assert facts.rehearsal_of(ranks_of(), asked=False) == ""
    assert facts.rehearsal_of(ranks_of(uuid=("a", "b", "a")), asked=True) == "as was asked for"
    assert facts.rehearsal_of(ranks_of(uuid=("a", "a", "a")), asked=False) == "on one GPU"
    assert facts.rehearsal_of(ranks_of(device=("cpu",) * 3), asked=False) == "on CPUs"


def test_intervals_hold_the_median_and_repeat() -> None:
    samples = [1.0, 2.0, 3.0, 4.0, 5.0, 100.0]
    found = of_median(samples)
    assert (found.value, found.low, found.high) == (3.5, 1.0, 100.0)
    assert of_median(samples[::-1]) == found
    assert of_ratios([2 * one for one in samples], [2.0] * 6) == found
    with pytest.raises(ValueError, match="samples: expected at least 6, got 5"):
        of_median(samples[1:])


@pytest.mark.parametrize("count", [6, 7, 8, 9, 12, 40, 60])
def test_intervals_hold_the_true_median_as_often_as_they_say(count: int) -> None:
    """Of `count` samples k lie below the true median with probability binomial(count, k) / 2 ** count."""
    found = of_median([float(number) for number in range(count)])
    inside = sum(math.comb(count, below) for below in range(count + 1) if found.low < below <= found.high)
    assert inside / 2**count >= 0.95
    narrower = sum(math.comb(count, below) for below in range(count + 1) if found.low + 1 < below <= found.high - 1)
    assert narrower / 2**count < 0.95


def test_ends_of_intervals_decide() -> None:
    assert claims.judge([("a", 0.9, 1.0), ("b", 0.8, 1.02)], 1.02)[0] == PASS
    assert claims.judge([("a", 0.9, 1.1), ("b", 0.8, 1.0)], 1.02)[0] == INVALID
    assert claims.judge([("a", 0.9, 1.1), ("b", 1.03, 1.04)], 1.02)[0] == FAIL
    assert claims.judge([("a", 0.96, 1.1)], 0.95, at_least=True)[0] == PASS
    assert claims.judge([("a", 0.90, 1.1)], 0.95, at_least=True)[0] == INVALID
    assert claims.judge([("a", 0.90, 0.94)], 0.95, at_least=True)[0] == FAIL


def test_it_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(app, ["prove"])
    assert done.exit_code == 2 and "torchrun" in done.output


def test_a_rehearsal_has_the_link_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both the lab and the claims of its ranks."""
    monkeypatch.delenv("RANK", raising=False)
    seen = []

    def launch(argv: list[str], *, rate: str, **other: Any) -> SimpleNamespace:
        seen.append((rate, argv[argv.index("--link") + 1]))
        return SimpleNamespace(note="")

    monkeypatch.setattr(command.network, "launch", launch)
    for link in ([], ["--link", "1gbit"]):
        done = CliRunner().invoke(app, ["prove", "--rehearse", "-o", str(tmp_path), *link])
        assert done.exit_code == 0, done.output
    assert seen == [(command.REHEARSED_RATE,) * 2, ("1gbit", "1gbit")]
    done = CliRunner().invoke(app, ["prove", "--rehearse", "--link", "3.2tbit"])
    assert done.exit_code == 2 and "between 8kbit and 34gbit" in done.output
