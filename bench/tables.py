"""The tables of docs/performance.md and docs/prove.md, and the study's of docs/numerics.md, from bench/results.

`python -m bench.tables`, or `make tables`, writes them into the pages.

Every table names the commits and the machines of its figures. A table of a page stands between `<!-- table: NAME -->`
and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

from bench import results_file
from bench.convergence import kept, report
from bench.convergence.cases import CASES, CONFIGURATIONS
from bench.results_file import ROOT, Measurement
from bench.table_text import Source, label, lines_of, markdown, milliseconds, size_text

PAGES = (ROOT / "docs" / "performance.md", ROOT / "docs" / "prove.md")
NUMERICS = ROOT / "docs" / "numerics.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
RATES = {"100mbit": 1e8, "300mbit": 3e8, "1gbit": 1e9}


def busy(measurement: Measurement | None, row: dict[str, Any] | None) -> str:
    """The part of a call's time that its bytes take at the link's rate."""
    rate = RATES.get(measurement.facts["link"]) if measurement else None
    if rate is None or row is None or row["link_bytes"] is None:
        return ""
    return f"{row['link_bytes'] * 8 / rate / row['median_us'] * 1e6:.0%}".replace("%", " %")


def links(name: str, baselines: Sequence[str]) -> Callable[[], list[str]]:
    """The collective `name` over sizes."""

    def make() -> list[str]:
        source, kind = Source("collectives"), "avx512"
        rows = []
        for size in SIZES:
            own = source.row(kind, name, size=size, backend="zcomm")
            cells = [size_text(size), milliseconds(source.row(kind, name, size=size, backend="gloo"), False)]
            cells += [milliseconds(own), busy(source.get(kind, name), own)]
            cells += [milliseconds(source.row(kind, name, size=size, backend=other)) for other in baselines]
            rows.append(cells)
        header = ["size", "gloo, ms", "zcomm", "link busy", *(other.replace("_", "-") for other in baselines)]
        return lines_of(header, rows, source)

    return make


FLOAT = {"float": "float32"}


def layouts(names: Callable[[str], bool]) -> Callable[[], list[str]]:
    """The largest size of each collective, dtype, link and layout with such a name."""

    def make() -> list[str]:
        source, kind, rows = Source("collectives"), "avx512", []
        for name in filter(names, source.names(kind)):
            found = source.get(kind, name)
            assert found is not None
            facts, size = found.facts, max(row["size"] for row in found.records)
            gloo = source.row(kind, name, size=size, backend="gloo")
            what = f"{facts['collective'].replace('_', '-')} {FLOAT.get(facts['dtype'], facts['dtype'])}"
            where = f"{facts['nodes']}, {facts['link']}"
            for own in (row for row in found.records if row["size"] == size and row["backend"].startswith("zcomm")):
                label = ", ".join(filter(None, (what, own["backend"].partition("=")[2])))
                times = [milliseconds(gloo, False), milliseconds(own)]
                rows.append([label, where, f"{size >> 20}", *times, busy(found, own)])
        header = ["collective", "ranks, link", "MiB", "gloo, ms", "zcomm", "link busy"]
        return lines_of(header, rows, source)

    return make


def in_node() -> list[str]:
    """Sizes of both collectives of four ranks on one host."""
    source, kind, rows = Source("collectives"), "avx512", []
    for collective in ("all_gather", "reduce_scatter"):
        name = f"{collective}_float_1x4"
        for size in (1 << 10, 1 << 16, 1 << 24):
            gloo, own = (source.row(kind, name, size=size, backend=backend) for backend in ("gloo", "zcomm"))
            rows.append([collective.replace("_", "-"), size_text(size), milliseconds(gloo, False), milliseconds(own)])
    return lines_of(["float32", "size", "gloo, ms", "zcomm"], rows, source)


def is_exchange(name: str) -> bool:
    return name.startswith(("all_to_all", "broadcast"))


def is_other_layout(name: str) -> bool:
    shown = name in ("all_gather_bfloat16_4x1_1gbit", "reduce_scatter_float_4x1_1gbit") or "300mbit" in name
    return not shown and not is_exchange(name) and "1x4" not in name


def demo(*names: str) -> Callable[[], list[str]]:
    """Runs of `make demo`. Processor and arguments are columns where they differ."""

    def make() -> list[str]:
        source, rows = Source("demo"), []
        for kind in source.kinds(names):
            for name in names:
                found = source.get(kind, name)
                if found is None:
                    continue
                gloo, own = (source.row(kind, name, backend=backend) for backend in ("gloo", "zcomm"))
                assert gloo is not None and own is not None
                speeds = [each["steps_per_second"] for each in (gloo, own)]
                sent = [f"{each['inter_node_bytes_per_step'] / 1e6:.2f}" for each in (gloo, own)]
                losses = [f"{each['validation_loss']:.4f}" for each in (gloo, own)]
                arguments = f"`{found.facts['arguments']}`" if found.facts["arguments"] else ""
                steps = [f"{speed:.3f}" for speed in speeds]
                pairs = [" / ".join(sent), " / ".join(losses)]
                rows.append([label(kind), arguments, *steps, f"{speeds[1] / speeds[0]:.2f}x", *pairs])
        header = [
            "processor",
            "arguments",
            "gloo, steps/s",
            "zcomm, steps/s",
            "",
            "MB between nodes",
            "validation loss",
        ]
        named = [len({row[column] for row in rows}) > 1 for column in (0, 1)]
        kept = [*named, *(True for _ in header[2:])]
        return lines_of(list(compress(header, kept)), [list(compress(row, kept)) for row in rows], source)

    return make


WAYS = {
    "uncompressed": "exact / exact",
    "exact": "exact / compressed",
    "int8": "int8 / compressed",
    "lossless": "lossless / compressed",
}


def ways_cpu() -> list[str]:
    """How weights are sent, at 100 Mbit/s."""
    source, rows = Source("training_step"), []
    for name in source.names("avx512"):
        if not name.startswith("2x2_100mbit_"):
            continue
        found = source.get("avx512", name)
        assert found is not None
        for row in found.records:
            is_int8, is_lossless = row["way"] == "int8", row["way"] == "lossless"
            ratio = "" if is_int8 else f"{row['over_int8']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            bits = f"{row['bits_per_weight']:.2f}" if is_lossless else ""
            sent = f"{row['inter_node_bytes'] / 1e6:.2f}"
            learning_rate = f"{found.facts['learning_rate']:g}"
            rows.append([learning_rate, WAYS[row["way"]], f"{row['seconds']:.3f}", ratio, sent, bits])
    header = ["learning rate", "weights / gradients", "s", "over int8's (quartiles)", "MB", "bits per weight"]
    return lines_of(header, rows, source)


def ways_gpu() -> list[str]:
    source, name = Source("training_step"), "2x1_1gbit_0.001"
    kinds = source.kinds([name])
    header = ["weights / gradients", *(f"{label(kind)}, s" for kind in kinds), "MB between nodes"]
    rows = []
    for way, text in WAYS.items():
        cells, sent = [text], []
        for kind in kinds:
            first, row = source.row(kind, name, way="uncompressed"), source.row(kind, name, way=way)
            assert first is not None and row is not None
            cells += [f"{row['seconds']:.3f} ({first['seconds'] / row['seconds']:.2f}x)"]
            sent += [f"{row['inter_node_bytes'] / 1e6:.1f}"]
        rows.append([*cells, " / ".join(dict.fromkeys(sent))])  # GPUs mostly send the same
    return lines_of(header, rows, source)


def generation() -> list[str]:
    source, rows = Source("generation"), []
    for kind in source.kinds(["2x2_100mbit"]):
        for row in source.rows(kind, "2x2_100mbit"):
            kilobytes = [f"{row[name] / 1e3:.2f}" for name in ("bytes_per_token", "first_token_bytes")]
            rows.append([row["run"], f"{row['tokens_per_second']:.1f}", *kilobytes, f"{row['step_bytes'] / 1e6:.2f}"])
    header = ["", "tokens/s", "kB between nodes per token", "first token, kB", "training step, MB"]
    return lines_of(header, rows, source)


OPERATIONS = {
    "encode": "of_read",
    "decode": "of_copy",
    "decode_sum of 4": "of_read",
    "decode_sum_encode of 4": "of_read",
}


def codec_cpu() -> list[str]:
    source, rows = Source("codec"), []
    kinds = [kind for kind in source.kinds(["codec"]) if kind in results_file.CPUS]
    for dtype in ("float32", "bfloat16"):
        for operation, part in OPERATIONS.items():
            cells = [dtype, operation, part.removeprefix("of_")]
            for kind in kinds:
                wanted: dict[str, Any] = {"operation": operation, "dtype": dtype, "threads": 1}
                pair = [source.row(kind, "codec", format=f, **wanted) for f in ("int8:128", "int4:128")]
                cells.append(" / ".join(f"{row[part]:.2f}" for row in pair if row))
            rows.append(cells)
    return lines_of(["values", "operation", "part of", *map(label, kinds)], rows, source)


def of_other_formats() -> list[str]:
    """Cost of formats that have no loops of their own: times as long as int4."""
    source, rows = Source("codec"), []
    kinds = [kind for kind in source.kinds(["other_formats"]) if kind in results_file.CPUS]
    for form, operation in (("eden2:128", "encode"), ("eden2:128", "decode"), ("int4:128:stochastic", "encode")):
        cells = [f"`{form}`", operation]
        for kind in kinds:
            times = []
            for dtype in ("float32", "bfloat16"):
                wanted = {"operation": operation, "dtype": dtype, "threads": 1}
                plain, own = (source.row(kind, "other_formats", format=each, **wanted) for each in ("int4:128", form))
                times += [f"{plain['gbps'] / own['gbps']:.2f}x"] if plain and own else []
            cells.append(" / ".join(times))
        rows.append(cells)
    return lines_of(["format", "operation", *map(label, kinds)], rows, source)


GPU_PASSES = (
    ("encode float32", "encode", "float32"),
    ("decode to float32", "decode", "float32"),
    ("decode to bfloat16", "decode", "bfloat16"),
    ("sum of 4 wires to float32", "decode_sum of 4", "float32"),
    ("sum of 4 wires to bfloat16", "decode_sum of 4", "bfloat16"),
    ("sum of 4 wires, encoded again", "decode_sum_encode of 4", "bfloat16"),
)


def codec_gpu() -> list[str]:
    source, rows = Source("codec"), []
    kinds = [kind for kind in source.kinds(["codec"]) if kind not in results_file.CPUS]
    header = ["operation"] + [f"{label(kind)}, {form}" for kind in kinds for form in ("int8:256", "int4:128")]
    for title, operation, dtype in GPU_PASSES:
        cells = [title]
        for kind in kinds:
            for form in ("int8:256", "int4:128"):
                found = source.rows(kind, "codec", operation=operation, dtype=dtype, format=form)
                largest = max(found, key=lambda row: row["values_bytes"])
                cells.append(f"{largest['gbps']:.0f} ({largest['of_copy']:.2f})")
        rows.append(cells)
    return lines_of(header, rows, source)


def lossless_gpu() -> list[str]:
    source, rows = Source("lossless"), []
    kinds = source.kinds(["lossless"])
    header = ["learning rate", "bits per weight"]
    header += [f"{label(kind)}, {operation}" for kind in kinds for operation in ("encode", "decode")]
    for rate in (1e-3, 1e-4, 0.0):
        cells = [f"{rate:g}" if rate else "0 (frozen)"]
        for kind in kinds:
            for operation in ("encode", "decode"):
                found = source.rows(kind, "lossless", learning_rate=rate, operation=operation)
                largest = max(found, key=lambda row: row["values_bytes"])
                cells += [f"{largest['bits_per_weight']:.2f}"] * (len(cells) == 1)
                cells.append(f"{largest['values_gbps']:.0f} ({largest['of_copy']:.2f})")
        rows.append(cells)
    return lines_of(header, rows, source)


FUSED_GPU = (
    ("gathered as bfloat16", "split_with_sizes_copy", "decode", "decode into parameters"),
    ("reduced as float32", "chunk_cat", "encode", "encode of gradients"),
)


def copies_gpu() -> list[str]:
    """A layer of Llama 70B on 64 ranks: FSDP2's copies with the codec, and the codec in their place."""
    source, rows = Source("fsdp_copies"), []
    kinds = source.kinds(["fsdp_copies"])
    header = ["a layer of Llama 70B, of 64 ranks"]
    header += [f"{label(kind)}, {what}" for kind in kinds for what in ("FSDP2's copy + codec, ms", "fused")]
    for title, *passes in FUSED_GPU:
        cells = [title]
        for kind in kinds:
            found = [source.row(kind, "fsdp_copies", ranks=64, **{"pass": each}) for each in passes]
            copy, codec, fused = (row["ms"] for row in found if row)
            cells += [f"{copy:.2f} + {codec:.2f}", f"{fused:.2f} ({(copy + codec) / fused:.1f}x)"]
        rows.append(cells)
    return lines_of(header, rows, source)


GPU_CALLS = (
    ("all_gather_bfloat16_2x1_1gbit", "all-gather bfloat16, 1 Gbit/s"),
    ("reduce_scatter_float_2x1_1gbit", "reduce-scatter float32, 1 Gbit/s"),
    ("all_gather_bfloat16_2x1", "all-gather bfloat16, loopback"),
    ("reduce_scatter_float_2x1", "reduce-scatter float32, loopback"),
    ("all_reduce_float_2x1", "all-reduce float32, loopback"),
)


def calls_gpu() -> list[str]:
    """Each call at its largest size, and over loopback also at 2 MiB, where it gains nothing. Times of four ranks
    differ by half from run to run, as they wait for their turns."""
    source = Source("collectives")
    kinds = [kind for kind in source.kinds(name for name, _ in GPU_CALLS) if kind not in results_file.CPUS]
    header = ["two ranks", "size", *(f"{label(kind)}, {what}" for kind in kinds for what in ("NCCL, ms", "zcomm"))]
    rows = []
    for name, title in GPU_CALLS:
        largest = max(row["size"] for row in source.rows(kinds[0], name))
        for size in (largest,) if name.endswith("gbit") else (2 << 20, largest):
            cells = [title, size_text(size)]
            for kind in kinds:
                nccl, own = (source.row(kind, name, size=size, backend=backend) for backend in ("nccl", "zcomm"))
                cells += [milliseconds(nccl, False), milliseconds(own)]
            rows.append(cells)
    return lines_of(header, rows, source)


def verdict(row: dict[str, Any]) -> str:
    return "PASS" if row["verdict"] == "PASS" else f"{row['verdict']}: {row['why']}"


def claims() -> list[str]:
    """What `python -m zcomm_bench prove` said of each claim, of clusters first; a report has a commit of its own."""
    kinds = results_file.load("prove").values()
    found = [one for kind in kinds for one in kind.values() if one.name.startswith("claims")]
    found.sort(key=lambda one: one.facts["rehearsal"])
    clusters = [] if any(not one.facts["rehearsal"] for one in found) else ["clusters of GPUs"]
    header, origins, verdicts = ["claim", *clusters], [], []
    for one in found:
        what = "REHEARSAL" if one.facts["rehearsal"] else "cluster"
        header.append(f"{what}: {one.machine}, {one.facts['ranks']}, {one.facts['link_gbit']} Gbit/s")
        origins.append(f"{header[-1]}: by {one.facts['by']}, {one.facts['date']}, commit `{one.commit}`")
        verdicts.append({row["claim"]: verdict(row) for row in one.records})
    rows = [
        [name, *("not known" for _ in clusters), *(each.get(name, "not run") for each in verdicts)]
        for name in dict.fromkeys(name for each in verdicts for name in each)
    ]
    return [*markdown(header, rows), "", f"{'; '.join(origins)}."]


TABLES: dict[str, Callable[[], list[str]]] = {
    "claims": claims,
    "reduce_scatter": links("reduce_scatter_float_4x1_1gbit", ["exact_all_to_all", "naive"]),
    "all_gather": links("all_gather_bfloat16_4x1_1gbit", ["naive"]),
    "in_node": in_node,
    "layouts": layouts(is_other_layout),
    "exchanges": layouts(is_exchange),
    "demo": demo("default"),
    "demo_links": demo("batch_8_100mbit", "batch_8_1gbit", "batch_8_unlimited"),
    "secondary": demo("secondary", "secondary_4_micro_batches"),
    "ways_cpu": ways_cpu,
    "generation": generation,
    "codec_cpu": codec_cpu,
    "other_formats": of_other_formats,
    "codec_gpu": codec_gpu,
    "lossless_gpu": lossless_gpu,
    "copies_gpu": copies_gpu,
    "calls_gpu": calls_gpu,
    "ways_gpu": ways_gpu,
}


def fill(page: str) -> str:
    """A page with its tables made anew. Raises ValueError for a table that nothing makes."""

    def replace(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"table: expected one of {', '.join(TABLES)}, got {match[2]}")
        return "\n".join([match[1], *TABLES[match[2]](), "", match[3]])

    return _TABLE.sub(replace, page)


def study_rows() -> list[report.Row]:
    return report.summarize(kept.in_order(kept.read(kept.PATH), CONFIGURATIONS, CASES))


def main() -> None:
    for page in PAGES:
        page.write_text(fill(page.read_text()))
    report.write_markdown(study_rows(), NUMERICS)


if __name__ == "__main__":
    main()
