"""What every run of pytest shares: the tests over a CUDA that lives on the host run by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

# It replaces the core of the library, and with it CUDA, for the whole process.
BY_ITSELF = Path(__file__).parent / "cuda_host" / "python"
LEFT_OUT = pytest.StashKey[bool]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path != BY_ITSELF:
        return None
    folder = config.invocation_params.dir
    named = [(folder / argument.split("::")[0]).resolve() for argument in config.args]
    if any(path == BY_ITSELF or BY_ITSELF in path.parents for path in named):
        return None
    config.stash[LEFT_OUT] = True
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(LEFT_OUT, False):
        terminalreporter.write_line(f"not run: {BY_ITSELF.relative_to(config.rootpath)}, which runs by itself")
