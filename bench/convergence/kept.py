"""The study's file: what is kept of a run, and the runs of a file. Needs no torch, unlike the runs themselves."""

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import results_file
from bench.convergence.cases import Configuration, Setting
from bench.results_file import Measurement

PATH = results_file.RESULTS / "study.jsonl"
COLUMNS = [
    *("case", "weights", "gradients", "words", "setting", "seed", "intra_node_bytes", "inter_node_bytes"),
    *("validation_loss", "bits", "gradient_snr_db", "weight_snr_db"),
    "gradient_snr_along_db",
]
# Of two runs that are the same, on CPUs that compute alike.
BITS = ("losses", "validation_loss", "gathered_validation_loss", "shards_sha256")

Key = tuple[Configuration, Setting, int]
Records = dict[Key, dict[str, Any]]


def _median(values: Iterable[float | None]) -> float | None:
    lossy = [value for value in values if value is not None]
    return round(statistics.median(lossy), 1) if lossy else None


def measurement(record: Mapping[str, Any], commit: str) -> Measurement:
    """What is kept of what ``train`` returns. Signal-to-noise ratios become medians: of every parameter over the
    training, and of every step over the parameters. Parameters that are sent exactly have no entry."""
    configuration, setting = Configuration(**record["configuration"]), record["setting"]
    default = asdict(Setting())
    gradients = record["gradient_snr_db"] if configuration.gradients != "exact" else []
    weights = record["weight_snr_db"] if configuration.weights != "exact" else []
    bits = json.dumps([record.get(name) for name in BITS]).encode()
    row = [
        *(configuration.case, configuration.weights, configuration.gradients, configuration.words),
        {name: value for name, value in setting.items() if value != default[name]},
        *(record["seed"], record["intra_node_bytes"], record["inter_node_bytes"]),
        round(record["validation_loss"], 6),
        hashlib.sha256(bits).hexdigest()[:12],
        [_median(values) for values in zip(*gradients, strict=True)],
        [_median(values) for values in zip(*weights, strict=True)],
        # What the plot shows, a third of it: the gradients of runs with exact weights.
        [_median(step) for step in gradients[::3]] if configuration.weights == "exact" else [],
    ]
    facts = {"python": record["python"]}  # whose sources are the text
    return Measurement("study", commit, record["cpu"], COLUMNS, facts, [row])


def read(path: Path, python: str = "") -> Records:
    """The runs of a file by what was run: those of one release of Python, by default of the last one in the file."""
    every = results_file.read(path) if path.exists() else []
    python = python or (every[-1].facts["python"] if every else "")
    found = {}
    for one in every:
        for record in one.records if one.facts["python"] == python else []:
            named = (word.partition("=") for word in record["words"].split())
            words: dict[str, Any] = {name: value or True for name, _, value in named}
            formats = {name: record[name] for name in ("weights", "gradients", "case")}
            key = (Configuration(**formats, **words), Setting(**record["setting"]), record["seed"])
            found[key] = {**record, "configuration": asdict(key[0]), "commit": one.commit, "cpu": one.machine}
    return found


def in_order(
    done: Records, configurations: Sequence[Configuration], settings: Mapping[str, Setting]
) -> list[dict[str, Any]]:
    """The runs of some configurations, one configuration after the other, each seed by seed."""
    by_seed = sorted(done, key=lambda key: key[2])
    return [done[key] for one in configurations for key in by_seed if key[:2] == (one, settings[one.case])]
