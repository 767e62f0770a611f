"""``python -m zcomm info``: it needs no package beside zcomm's own, and names what the environment sets."""

import os
import subprocess
import sys

import pytest

import zcomm
from zcomm import __main__ as command
from zcomm import _core


def told(*arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zcomm", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=60, env=env)


def test_info_tells_what_was_built_and_what_the_environment_sets() -> None:
    pytest.importorskip("torch")
    output = told("info", ZCOMM_MIN_BYTES="4096").stdout
    for name in ("CPU codecs", "CUDA", "ZCOMM_NCCL_LIB", "ZCOMM_ISA"):
        assert name in output
    assert ("not built (no nvcc, or ZCOMM_CUDA=OFF)" in output) != bool(_core.cuda_toolkit())
    (line,) = (line for line in output.splitlines() if line.startswith("ZCOMM_MIN_BYTES"))
    assert line.split() == ["ZCOMM_MIN_BYTES", "4096", "min_bytes=4096"]


def test_info_warns_of_variables_with_which_two_communicators_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    queue, order = "warning: CUDA_DEVICE_MAX_CONNECTIONS=1: ", "warning: NCCL_LAUNCH_ORDER_IMPLICIT: expected 1"
    for variables, warnings in [
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, []),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, [queue, order]),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, [queue]),
    ]:
        for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        lines = [line for line in command.text().splitlines() if line.startswith("warning: ")]
        assert len(lines) == len(warnings)
        assert all(map(str.startswith, lines, warnings))


def test_a_wrong_option_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    done = told("info", check=False, ZCOMM_MIN_BYTES="many")
    assert done.returncode == 1 and "the environment holds a wrong option: ZCOMM_MIN_BYTES: " in done.stderr
    for variable, wanted, given in (("ZCOMM_NODE_MEMORY", "off", "on"), ("ZCOMM_LOG", "info', 'debug", "verbose")):
        monkeypatch.setenv(variable, given)
        with pytest.raises(ValueError, match=f"{variable}: expected '{wanted}' or nothing, got '{given}'"):
            command.text()
        monkeypatch.delenv(variable)


def test_it_needs_neither_torch_nor_packages_of_the_benchmarks() -> None:
    script = "import sys, runpy; sys.modules |= dict.fromkeys(('torch', 'rich', 'typer', 'yaml'))"
    script += "; sys.argv = ['', 'info']; runpy.run_module('zcomm', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "CPU codecs" in done.stdout, done.stderr


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), ([], 2), (["plan"], 2)])
def test_other_commands_are_refused(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["zcomm", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == status
    assert status != 0 or capsys.readouterr().out.strip() == zcomm.__version__
