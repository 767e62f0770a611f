"""The programs in docs/trainers run as they are printed, and compress what their pages say."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from support.worlds import run

import zcomm

PAGES = Path(__file__).parents[3] / "docs" / "trainers"
COMPRESSED = {
    "fsdp2": ("all_gather", "reduce_scatter"),
    "fsdp1": ("all_gather", "reduce_scatter"),
    "ddp": ("all_reduce",),
    "zero-redundancy-optimizer": ("all_reduce",),
    "tensor-parallel": ("all_gather", "reduce_scatter"),
}


@pytest.mark.parametrize("page", COMPRESSED)
def test_the_program_of_a_page(page: str, tmp_path: Path) -> None:
    text = (PAGES / f"{page}.md").read_text()
    size = int(re.search(r"--nproc-per-node (\d+)", text)[1])  # type: ignore[index]
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]

    def body() -> None:
        store = dist.FileStore(str(tmp_path / "store"), size)  # in place of torchrun's
        rank = store.add("ranks", 1) - 1
        dist.init_process_group = functools.partial(dist.init_process_group, store=store, rank=rank, world_size=size)
        dist.destroy_process_group, destroy = lambda: None, dist.destroy_process_group
        names: dict[str, object] = {}
        exec(compile(program, f"{page}.md", "exec"), names)
        group = names["mesh"].get_group("data") if page == "tensor-parallel" else None  # type: ignore[attr-defined]
        stats = zcomm.stats(group)
        for collective in ("all_gather", "reduce_scatter", "all_reduce"):
            assert (getattr(stats, collective).calls >= 3) == (collective in COMPRESSED[page]), stats
        destroy()

    run(body, size, backend=None)
