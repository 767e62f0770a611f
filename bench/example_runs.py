"""The runs of examples/demo.py and examples/rlhf_generation.py that docs/performance.md has: a quarter of an hour.

python bench/example_runs.py [--only NAME] [--out FOLDER]
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import results_file

EXAMPLES = results_file.ROOT / "examples"
DEMO = {
    "default": "",
    "batch_8_100mbit": "--batch 8",
    "batch_8_1gbit": "--batch 8 --link 1gbit",
    "batch_8_unlimited": "--batch 8 --link unlimited",
    "secondary": "--batch 8 --steps 20 --secondary-shards",
    "secondary_4_micro_batches": "--batch 8 --steps 8 --micro-batches 4 --secondary-shards",
}
GENERATION = "2x2_100mbit"
KEPT_OF_DEMO = ("backend", "steps_per_second", "inter_node_bytes_per_step", "validation_loss")
KEPT_OF_GENERATION = ("run", "tokens_per_second", "bytes_per_token", "first_token_bytes", "step_bytes")


def run(program: str, arguments: str, out: Path) -> Any:
    """What an example writes as JSON."""
    subprocess.run([sys.executable, str(EXAMPLES / program), *arguments.split(), "--out", str(out)], check=True)
    return json.loads((out / "summary.json" if out.is_dir() else out).read_text())


def generation_rows(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens, and bytes between nodes, of each run."""
    rows = []
    for name, result in runs.items():
        parts, sequences = result["parts"], result["sequences"]
        rows.append(
            {
                "run": name,
                "tokens_per_second": sequences / parts["further tokens"]["seconds"],
                "bytes_per_token": parts["further tokens"]["bytes"] / sequences,
                "first_token_bytes": parts["first token"]["bytes"] / sequences,
                "step_bytes": parts["step"]["bytes"],
            }
        )
    return rows


def main(
    only: Annotated[str, typer.Option(help="Part of the names to run.")] = "",
    out: Annotated[Path, typer.Option(help="The folder that keeps the figures.")] = results_file.RESULTS,
) -> None:
    """Run them, and keep their figures."""
    isa = results_file.own_isa()
    machine = results_file.cpu_machine(isa)
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in DEMO.items():
            if only in name:
                rows = run("demo.py", arguments, Path(folder)).values()
                one = results_file.measured(name, machine, KEPT_OF_DEMO, rows, arguments=arguments)
                results_file.keep(out / f"demo-{isa}.jsonl", [one])
        if only in f"generation_{GENERATION}":
            rows = generation_rows(run("rlhf_generation.py", "", Path(folder, "generation.json"))["runs"])
            one = results_file.measured(GENERATION, machine, KEPT_OF_GENERATION, rows)
            results_file.keep(out / f"generation-{isa}.jsonl", [one])


if __name__ == "__main__":
    typer.run(main)
