"""DiLoCo of torchft with zcomm's compressed all-reduce: examples/diloco_torchft.py, and a site that is killed."""

from __future__ import annotations

import datetime
import importlib
import itertools
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import tiny_llama
from support.worlds import options, run

EXAMPLE = Path(__file__).parents[3] / "examples" / "diloco_torchft.py"


def events(site: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what a site prints after each outer step."""
    assert site.stdout is not None
    return (json.loads(line) for line in site.stdout if line.startswith("{"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_site_that_is_killed_is_survived(tmp_path: Path) -> None:
    """Two sites agree to the bit after each outer step, at a seventh of the bytes. One is killed; the other goes on."""
    tiny_llama.require("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30000, quorum_tick_ms=50)
    environment = {
        **os.environ,
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
    }
    sites = []
    try:
        for number in (0, 1):
            command = [sys.executable, str(EXAMPLE), "--site", str(number), "--outer-steps", "100000", "--every", "4"]
            with (tmp_path / f"{number}.log").open("w") as log:
                sites.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True))
        first, second = map(events, sites)
        # The one that starts first may make a few outer steps alone.
        of_second = list(itertools.islice((event for event in second if event["sites"] == 2), 3))
        sites[1].kill()
        of_first = {event["outer_step"]: event for event in itertools.islice(first, of_second[-1]["outer_step"])}
        alone = next((event for event in first if event["sites"] == 1), None)
        assert alone is not None, (tmp_path / "0.log").read_text()
        after = next(first)
    finally:
        for site in sites:
            site.kill()
            site.wait()
        lighthouse.shutdown()
    for event in of_second:
        assert event["hash"] == of_first[event["outer_step"]]["hash"]
        assert 0 < event["sent_bytes"] <= event["reduced_bytes"] / 7
    assert after["outer_step"] == alone["outer_step"] + 1


def test_the_group_needs_no_private_names_of_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of torchft differ in these."""

    class Wrapper:
        def __init__(self, timeout: datetime.timedelta) -> None:
            pass

    def body() -> None:
        for name, names in (
            ("torchft", {"Manager": object}),
            ("torchft.local_sgd", {"DiLoCo": object}),
            ("torchft.process_group", {"ProcessGroupWrapper": Wrapper}),
        ):
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**names))
        made = importlib.import_module("diloco_torchft").ProcessGroupZcomm(
            options(all_reduce="int4:64"), datetime.timedelta(seconds=20)
        )
        for quorum in range(2):
            group = made._create_pg(dist.PrefixStore(str(quorum), dist.HashStore()), 0, 1)
            values = torch.ones(4)
            group.allreduce([values]).wait()
            assert values.tolist() == [1.0] * 4

    run(body, 1, backend=None)
