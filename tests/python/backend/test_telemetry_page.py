"""docs/telemetry.md names the hops, columns and fields of a report."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch
import torch.distributed as dist
from support.worlds import options, run, sampling

import zcomm
from zcomm.distributed import report

PAGE = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text()


def column(header: str, number: int) -> list[str]:
    """The cells of a column of the table whose header line begins with ``header``."""
    table = PAGE[PAGE.index(f"\n{header}") + 1 :].split("\n\n")[0].splitlines()
    return [line.split("|")[number].strip() for line in table[2:]]


def test_hops_are_those_of_a_report() -> None:
    def body() -> set[str]:
        whole = torch.ones(8192)
        own = whole.view(4, -1)[dist.get_rank()]
        dist.all_gather_into_tensor(whole, own.clone())
        dist.reduce_scatter_tensor(own, whole)
        made = zcomm.report()
        return {site.hop for site in made.all_gather + made.reduce_scatter}

    hops = {hop for cell in column("| hop |", 1) for hop in re.findall("`(.+?)`", cell)}
    assert set(column("| site |", 2)) == hops
    opted = options(forms=("out_of_place", "single"))
    assert run(body, 4, nodes=[0, 0, 1, 1], options=opted, env=sampling()) == [hops] * 4


def test_columns_and_fields_are_those_of_a_report() -> None:
    fields = {field.name for field in dataclasses.fields(report.SiteReport)}
    assert {field for cell in column("| column |", 2) for field in re.findall(r"`(\w+)`", cell)} < fields
    source = Path(report.__file__).read_text()
    header = next(line for line in PAGE.splitlines() if line.startswith("| site |"))
    assert all(f'"{name.strip()}"' in source for name in header.strip("|").split("|"))
