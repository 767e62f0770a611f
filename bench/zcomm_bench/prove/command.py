"""The command ``python -m zcomm_bench prove``."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from zcomm._units import parse_rate
from zcomm_bench.lab import network
from zcomm_bench.lab.usage import checked, source_of
from zcomm_bench.prove import facts, keep, report, verify

REHEARSED_NODES, REHEARSED_RATE = "2x2", "100mbit"
NOT_ALL_PASS, REFUSED = 1, 2
LATER_SECONDS = 2.0  # after rank 0: a launcher shows the rank that ends first, and rank 0 has the reason

Link = Annotated[
    str | None,
    typer.Option(
        callback=checked(parse_rate),
        help="What a node's link to the others should carry, \"3.2tbit\"; of one node, a rank's. "
        "By default what the network cards say.",
    ),
]


def prove(
    context: typer.Context,
    output: Annotated[Path, typer.Option("-o", "--output", file_okay=False, help="The folder of the report.")] = Path(
        "zcomm-prove"
    ),
    link: Link = None,
    rehearse: Annotated[
        bool, typer.Option(help="Without a launcher: in the network lab, 2 nodes of 2 ranks. Ranks may share a GPU.")
    ] = False,
    drill: Annotated[
        bool, typer.Option(help="At the end kill a rank (of a job of its own), and see who says so.")
    ] = False,
    verify_file: Annotated[Path | None, typer.Option("--verify", help="Check a report.json, and print it.")] = None,
    add: Annotated[Path | None, typer.Option(help="Check a report.json, and keep it in bench/results.")] = None,
    by: Annotated[str, typer.Option(help="Who has measured what --add keeps.")] = "not named",
) -> None:
    """Confirm or refute every claim on this cluster, in 15 minutes: torchrun --nnodes N --nproc-per-node G -m
    zcomm_bench prove. The exit status is 0 if all claims pass."""
    if verify_file is not None and add is not None:
        raise typer.BadParameter("expected --verify or --add, got both: --add checks it, too")
    if (file := verify_file or add) is not None:
        for name in ("rehearse", "drill", "link", "output"):
            if source_of(context, name) == "given":
                raise typer.BadParameter(f"--{name}: expected a run that measures, got --verify or --add")
    if add is None and source_of(context, "by") == "given":
        raise typer.BadParameter("--by: expected --add, whose report it names")
    if file is not None:
        check(file, add is not None, by)
        return
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("prove: expected torch, which is not installed: pip install torch")
    if "RANK" in os.environ:
        as_rank(output, link, rehearse, drill)
    elif rehearse:
        try:
            rate = checked(network.parse_limit)(link) or REHEARSED_RATE
        except typer.BadParameter as error:
            raise typer.BadParameter(error.message, param_hint="--link") from None
        in_lab(output, rate, drill)
    else:
        raise typer.BadParameter(
            "expected a launcher, got none: torchrun --nnodes N --nproc-per-node G -m zcomm_bench prove; "
            "--rehearse needs none"
        )


def check(path: Path, is_kept: bool, by: str) -> None:
    """Verify a report and show its verdicts; exit status 1 where it is refused."""
    try:
        found = verify.read(path)
        notes = verify.check(found)
        report.show(found)
        print("verified:", "; ".join(notes))
        if is_kept:
            print(f"kept in {keep.add(found, by)}")
    except ValueError as error:
        raise SystemExit(f"refused: {error}") from None


def as_rank(output: Path, link: str | None, rehearse: bool, drill: bool) -> None:
    """One rank of a job; it does not return. Interpreters that end with torch's threads abort now and then."""
    from zcomm_bench.prove.stages import run

    rate = None if link is None else parse_rate(link)
    try:
        status = 0 if run.run(output, rate, rehearse=rehearse, with_drill=drill) else NOT_ALL_PASS
    except ValueError as error:
        if not isinstance(error, facts.Refused) and not str(error).startswith("nodes:"):
            raise
        if os.environ["RANK"] == "0":
            print(f"refused: {error}", file=sys.stderr)
        else:
            time.sleep(LATER_SECONDS)
        status = REFUSED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def in_lab(output: Path, rate: str, drill: bool) -> None:
    """A rehearsal: nodes are hosts of a network lab, ranks are processes of this machine."""
    path = output / "report.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "zcomm_bench", "prove", "--rehearse", "--link", rate, "-o", str(output)]
    try:
        launched = network.launch(
            [*command, *(["--drill"] if drill else [])],
            nodes=REHEARSED_NODES,
            rate=rate,
            env={"CUDA_VISIBLE_DEVICES": ""},
            on_line=lambda line: print(line, flush=True),
        )
    except network.RankFailed as error:
        # A rank ends so, too, if a claim does not pass; then the report is there.
        if not path.exists():
            raise SystemExit(str(error)) from None
        raise typer.Exit(NOT_ALL_PASS) from None
    if launched.note:
        print(f"warning: {launched.note}", file=sys.stderr)
