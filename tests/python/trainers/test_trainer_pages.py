"""The programs in docs/trainers run as they are printed, and compress what their pages say."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from support import tiny_llama
from support.page_programs import PAGES, ROOT, Printed, assert_shown, free_port, sent, stated
from support.worlds import run

import zcomm

COMPRESSED = {
    "fsdp2": ("all_gather", "reduce_scatter"),
    "fsdp1": ("all_gather", "reduce_scatter"),
    "ddp": ("all_reduce",),
    "zero-redundancy-optimizer": ("all_reduce",),
    "tensor-parallel": ("all_gather", "reduce_scatter"),
    "accelerate": ("all_reduce",),
    "deepspeed": ("all_gather", "reduce_scatter"),
    "hugging-face": ("all_reduce",),
    "lightning": ("all_gather", "reduce_scatter"),
    "megatron": ("all_gather", "reduce_scatter"),
    "muon": ("gather", "scatter"),
    "ray": ("all_gather", "reduce_scatter"),
}


@pytest.mark.parametrize("page", ["fsdp2", "fsdp1", "ddp", "zero-redundancy-optimizer", "tensor-parallel"])
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


# Pages whose program is launched by the command that they print, and what it imports.
LAUNCHED = {
    "accelerate": ("accelerate", "transformers"),
    "deepspeed": ("deepspeed", "transformers"),
    "hugging-face": ("accelerate", "transformers"),
    "lightning": ("lightning", "transformers"),
    "megatron": (),
    "muon": ("muon_fsdp2",),
    "ray": ("ray",),
}


def printed(page: str) -> tuple[Printed, dict[str, str]]:
    """The page's program and command as they are printed, but for two words; and an environment."""
    tiny_llama.require(*LAUNCHED[page])
    one = Printed.of(page)
    if page == "deepspeed":  # its launcher takes one port for all jobs of a host
        launcher = f"deepspeed --master_port {free_port()} "
        return dataclasses.replace(one, command=one.command.replace("deepspeed ", launcher)), {}
    if page == "megatron":  # Megatron trains on GPUs: here its modules train a small model, with stand-ins for CUDA
        packages = os.environ.get("TESTS_MEGATRON")
        if not packages:
            pytest.skip("Megatron is not here: make test-slow downloads it")
        stand_in = "from support.megatron_core_job import SETTINGS, pretrain\n"
        program = stand_in + one.program.replace("pretrain(...)", "pretrain(SETTINGS)")
        path = os.pathsep.join([packages, str(ROOT / "tests")])
        return dataclasses.replace(one, program=program), {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    return one, {}


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", LAUNCHED)
def test_a_program_writes_what_its_page_shows(page: str, tmp_path: Path) -> None:
    """Also the bytes that it sends, where a table has them."""
    one, env = printed(page)
    assert one.compressed == COMPRESSED[page]
    written = one.run(tmp_path, **env)
    assert_shown(one, written)
    if page in ROWS:
        assert sent(written) == pytest.approx(stated(page, ROWS[page])[:2], abs=0.06)
    assert page != "deepspeed" or (tmp_path / "out").is_dir(), "a log line alone tells that it saves nothing"


ROWS = {
    "accelerate": "DDP",
    "deepspeed": "ZeRO-3",
    "hugging-face": "DDP",
    "lightning": "`ModelParallelStrategy` (FSDP2)",
}
LIGHTNING_DDP = {
    "    def configure_model(self)": "    def on_train_start(self):\n        HOOK\n\n    def unused(self)",
    "import ModelParallelStrategy": "import DDPStrategy",
    "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, ": "DDPStrategy(",
}
ZERO_2 = {'"stage": 3': '"stage": 2', "stats()": "stats(engine.optimizer.dp_process_group)"}
LOWER_THRESHOLD = {'"stage": 3': '"stage": 3, "stage3_param_persistence_threshold": 1000'}
TWO_NODES = {"ZCOMM_NODE_SIZE": "1"}
# Page, row of its table, place of the bytes that are sent, and what the setting changes: the program, the environment.
EFFECTS: list[tuple[str, str, int, dict[str, str], dict[str, str]]] = [
    ("accelerate", "DDP", 2, {}, TWO_NODES),
    ("hugging-face", "DDP", 2, {}, TWO_NODES),
    ("lightning", "`DDPStrategy`", 1, LIGHTNING_DDP, {}),
    ("deepspeed", "ZeRO-1, 2", 1, ZERO_2, {}),
    ("deepspeed", "ZeRO-3 with `stage3_param_persistence_threshold: 1000`", 1, LOWER_THRESHOLD, {}),
]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("page", "row", "place", "changes", "env"), EFFECTS)
def test_a_setting_has_the_effect_that_its_page_states(
    page: str, row: str, place: int, changes: dict[str, str], env: dict[str, str], tmp_path: Path
) -> None:
    one, own = printed(page)
    program = one.program
    for words, others in changes.items():
        assert words in program
        program = program.replace(words, others)
    hook = re.search(r"`(self\..*?register_comm_hook\(.*?\(\).*?\))`", (PAGES / f"{page}.md").read_text())
    program = program.replace("HOOK", hook[1] if hook else "")
    exact, true = sent(dataclasses.replace(one, program=program).run(tmp_path, **own, **env))
    numbers = stated(page, row)
    assert (exact, true) == pytest.approx((numbers[0], numbers[place]), abs=0.06)
