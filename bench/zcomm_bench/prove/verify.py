"""Whether a report is what its samples say: it is complete, its figures are computed again, calls take the time of
their bytes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zcomm
import zcomm_bench
from zcomm_bench import files
from zcomm_bench.prove import bits, facts, figures, prediction, report
from zcomm_bench.prove.scale import CALLS, CLUSTER, LARGEST, NOISE_CALLS

STAGES = ("sanity", "noise", "bits", "sweep", "beside", "steps", "networks", "drill")
SAMPLES = ("samples", "local", "compute", "update", "exact_steps")  # the keys that they stand under
BURST_BYTES = 1 << 18  # that links with a limit let through at once, at both ends
CLOSE = 1e-6
MOST_VALUES = 1 << 29  # that the reference holds at once: enough for 160 ranks
RATE_SLACK = 1.25  # over the fastest exact call that the sanity stage saw


class NotTrue(ValueError):
    """A report contradicts itself; the message says where."""


def read(path: Path) -> report.Report:
    """Raises NotTrue for what is no report."""
    try:
        found = files.read(path, "a report")
    except ValueError as error:
        raise NotTrue(str(error)) from None
    if not isinstance(found, dict) or found.get("schema") != report.SCHEMA:
        raise NotTrue(f"{path}: expected the schema {report.SCHEMA}")
    return found


def check(found: report.Report) -> list[str]:
    """Raises NotTrue with the reason; returns notes for a reader of a report that holds."""
    try:
        for own in (complete, samples, rehearsal, results):
            own(found)
        again = report.judged({name: found[name] for name in found if name not in ("figures", "verdicts")})
        for name in ("figures", "verdicts"):
            where = difference(again[name], found[name], name)
            if where:
                raise NotTrue(f"{where}: not what the samples say")
        return sources(found)
    except NotTrue:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration) as error:
        raise NotTrue(f"a part is missing or of another kind: {type(error).__name__} {error}") from None


def complete(found: report.Report) -> None:
    """All that was to be measured was, on all ranks: what is missing may be what fails."""
    scale, environment = found["scale"], found["environment"]
    nodes, per_node = shape = environment["nodes"], environment["ranks_per_node"]
    ranks, per_found = nodes * per_node, Counter(environment["node_of"])
    # What is computed again takes memory and time by these.
    if not 0 < scale["bits_elements"] <= CLUSTER.bits_elements or scale["bits_elements"] * ranks**2 > MOST_VALUES:
        raise NotTrue(f"bits_elements: expected at most {CLUSTER.bits_elements}, and {MOST_VALUES} of all ranks")
    if max(scale["sizes"]) > max(CLUSTER.sizes):
        raise NotTrue(f"sizes: expected at most {max(CLUSTER.sizes)} bytes, got {max(scale['sizes'])}")
    if len(environment["ranks"]) != ranks or [*per_found.values()] != [per_node] * nodes:
        raise NotTrue(f"environment: expected {nodes}x{per_node} ranks, and the node of each")
    for number, network in enumerate(figures.networks_of(found)):
        sizes, measured = scale["sizes"][-LARGEST if number else 0 :], network["sanity"]
        if (measured["rates"]["nodes"], measured["rates"]["ranks_per_node"]) != shape:
            raise NotTrue(f"environment: expected {nodes}x{per_node} ranks, as the sanity stage")
        if {name: len(rows) for name, rows in measured["local"].items()} != {"matrix": ranks, "codec": ranks}:
            raise NotTrue(f"sanity: expected matrix and codec of {ranks} ranks")
        all_cells("sanity", measured, CALLS, [max(sizes)], ranks)
        all_cells("sweep", network["sweep"], CALLS, sizes, ranks)
    all_cells("noise", found["noise"], NOISE_CALLS, scale["noise_sizes"], ranks)
    if "steps" in found and [run["model"] for run in found["steps"]["runs"]] != scale["models"]:
        raise NotTrue("steps: expected each model of the scale")
    if "drill" in found and len(found["drill"]["ends"]) != ranks:
        raise NotTrue(f"drill: expected the ends of {ranks} ranks")


def all_cells(name: str, stage: Mapping[str, Any], calls: Iterable[str], sizes: Sequence[int], ranks: int) -> None:
    """A stage has one cell of each call in each size."""
    expected = sorted((call, prediction.whole_bytes(call, size, ranks)) for call in calls for size in sizes)
    if sorted((cell["collective"], cell["bytes"]) for cell in stage["cells"]) != expected:
        raise NotTrue(f"{name}: expected a cell for each call and size, {len(expected)} in all")


def samples(found: report.Report) -> None:
    """All are positive numbers, and bytes fit through the link."""
    for name in STAGES:
        for where, values in lists_of_samples(found.get(name, {}), name):
            for value in values:
                if not (isinstance(value, float) and math.isfinite(value) and value > 0):
                    raise NotTrue(f"{where}: expected seconds above 0, got {value}")
    for network in figures.networks_of(found):
        faster_than_bytes(network)


def lists_of_samples(value: Any, where: str) -> Iterator[tuple[str, list[Any]]]:
    """Every list of numbers that stands under a key of `SAMPLES`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in SAMPLES:
                yield from leaves(inner, f"{where}.{name}")
            elif name != "predictions":
                yield from lists_of_samples(inner, f"{where}.{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from lists_of_samples(inner, f"{where}.{number}")


def leaves(value: Any, where: str) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{where}.{name}")
    elif value and isinstance(value[0], list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{where}.{number}")
    else:
        yield where, value


def faster_than_bytes(network: Mapping[str, Any]) -> None:
    """No call may be faster than its bytes through the link as it was named, or as the fastest exact calls showed it.
    Where no link was named, such as on loopback, other programs may have slowed these down."""
    rates, named = network["sanity"]["rates"], network["link"]["bytes_per_second"]
    if named is None:
        return
    link = rates["inter" if rates["nodes"] > 1 else "intra"]["bytes_per_second"]
    cells = network["sanity"]["cells"]
    seen = [prediction.reached(cell, rates, min(cell["samples"]["exact"])) for cell in cells]
    fastest = RATE_SLACK * max(named, link, *seen)
    predicted = {(row["collective"], row["bytes"]): row for row in network["predictions"]["calls"]}
    for cell in network["sweep"]["cells"]:
        row = predicted[cell["collective"], cell["bytes"]]
        exact, compressed = row["exact_link_bytes"], row["compressed_link_bytes"]
        needed = {"exact": exact, "compressed": compressed, "auto": min(exact, compressed)}
        for way, values in cell["samples"].items():
            calls = cell["calls"][way]
            least = (calls * needed[way] - BURST_BYTES) / fastest / calls
            if min(values) < least:
                raise NotTrue(
                    f"sweep: {cell['collective']} of {cell['bytes']} bytes, {way}: {min(values):.3g} s, faster than "
                    f"its bytes permit, {least:.3g} s"
                )


def rehearsal(found: report.Report) -> None:
    """A rehearsal says that it is one, and ranks are alike."""
    asked = found["rehearsal"] == "as was asked for"
    try:
        expected = facts.rehearsal_of(found["environment"]["ranks"], asked)
    except facts.Refused as error:
        raise NotTrue(str(error)) from None
    if expected != found["rehearsal"]:
        raise NotTrue(f"rehearsal: expected {expected!r} of these ranks, got {found['rehearsal']!r}")


def results(found: report.Report) -> None:
    """Every case was run, and what results should be is what the reference here says. What weights should be is known
    to the ranks alone."""
    elements, nodes = found["scale"]["bits_elements"], found["environment"]["node_of"]
    rows = {(row["collective"], row["dtype"], row["format"]): row for row in found["bits"]["rows"]}
    if len(rows) != len(found["bits"]["rows"]):
        raise NotTrue("bits: expected one row of each case")
    if len(set(nodes)) > 1 and not any(name == "weights" for name, _, _ in rows):
        raise NotTrue("bits: weights by lossless differences are missing")
    for case in bits.cases(elements):
        row = rows.get((case.collective, case.dtype, case.format))
        if row is None:
            raise NotTrue(f"bits: {case.collective} of {case.dtype} in {case.format} is missing")
        if row["expected"] != [case.crc(rank, nodes) for rank in range(len(nodes))]:
            raise NotTrue(f"bits: {case.collective} of {case.dtype} in {case.format}: not the CRC of the reference")


def sources(found: report.Report) -> list[str]:
    """Predictions are computed again where the report comes from the sources that are here."""
    own = found["environment"]["ranks"][0]
    here = {"zcomm_sources": facts.sources(zcomm), "zcomm_bench_sources": facts.sources(zcomm_bench)}
    other = [name.removesuffix("_sources") for name, digest in here.items() if own[name] != digest]
    if other:
        return [
            f"made by other sources of {' and '.join(other)} than those here: its predictions were not computed again"
        ]
    for network in figures.networks_of(found):
        if max(sizes_of(network)) > 2 * max(CLUSTER.sizes):
            raise NotTrue("predictions: expected calls of the sweep's sizes")
        made = json.loads(json.dumps(prediction.make(network["sanity"], sizes_of(network))))
        for name, value in made.items():
            where = difference(value, network["predictions"][name], f"predictions.{name}")
            if where:
                raise NotTrue(f"{where}: not what the model says of the sanity stage")
    return ["made by the sources that are here"]


def sizes_of(network: Mapping[str, Any]) -> list[int]:
    first = network["predictions"]["calls"][0]["collective"]
    return [row["bytes"] for row in network["predictions"]["calls"] if row["collective"] == first]


def difference(wanted: Any, found: Any, where: str) -> str:
    """Where two values of JSON differ; empty if they do not. Numbers may be off by rounding."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        if wanted.keys() != found.keys():
            return where
        return next(filter(None, (difference(wanted[name], found[name], f"{where}.{name}") for name in wanted)), "")
    if isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found):
            return where
        pairs = enumerate(zip(wanted, found, strict=True))
        return next(filter(None, (difference(one, other, f"{where}.{number}") for number, (one, other) in pairs)), "")
    if isinstance(wanted, float) and isinstance(found, float):
        alike = math.isclose(wanted, found, rel_tol=CLOSE, abs_tol=1e-12) or (math.isnan(wanted) and math.isnan(found))
        return "" if alike else where
    return "" if wanted == found else where
