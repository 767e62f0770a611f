"""``python -m zcomm_bench``."""

from zcomm_bench.cli import app

app(prog_name="python -m zcomm_bench")
