"""The command line: ``zcomm info`` or ``python -m zcomm info``, which tells versions, codecs, and the options that the
environment sets; ``zcomm nccl-front``, for LD_PRELOAD; and ``zcomm meet``, where sites of a training meet.
``zcomm_bench`` has all other commands."""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
from collections.abc import Sequence
from typing import NoReturn

import zcomm._nccl as _nccl
from zcomm._version import __version__


def main() -> None:
    """Entry point of the ``zcomm`` command."""
    parser = argparse.ArgumentParser(prog="zcomm", description="Compressed collectives for torch.distributed.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="info|nccl-front|meet", dest="command")
    commands.add_parser("info", help="show versions, codecs, and the options that the environment sets")
    commands.add_parser("nccl-front", help="show the library that compresses calls of NCCL, for LD_PRELOAD")
    meet = commands.add_parser("meet", help="serve the meeting point of sites that come and go: docs/outer.md")
    meet.add_argument("--port", type=int, default=29511, help="0 takes a free one")
    meet.add_argument("--least", type=int, default=1, help="sites before the training begins")
    asked = parser.parse_args()
    try:
        if asked.command == "meet":
            _meet(asked.port, asked.least)
        print(_nccl.front_path() if asked.command == "nccl-front" else text())
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    except (TypeError, ValueError) as error:
        raise SystemExit(f"the environment holds a wrong option: {error}") from None


def _meet(port: int, least: int) -> NoReturn:
    from zcomm._meeting import MeetingPoint

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("zcomm").setLevel(logging.INFO)
    point = MeetingPoint(port, least)
    print(f"sites meet at port {point.port}", flush=True)
    point.serve()


def text() -> str:
    """Two tables, and warnings. Raises ValueError or TypeError that names the variable that sets a wrong option."""
    facts = [
        ("zcomm", __version__),
        ("Python", platform.python_version()),
        ("torch", _torch_version()),
        ("CPU codecs", _codecs()),
        *_gpu_facts(),
    ]
    variables = _columns([("variable", "set to", "option in force"), *_variables()])
    return "\n\n".join([_columns(facts), variables, *_warnings()])


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _variables() -> list[tuple[str, str, str]]:
    from zcomm.distributed import environment

    environment.log_level()  # raises on a wrong one, as the next lines
    environment.check_node_memory()
    environment.sample_errors_every()
    try:
        from zcomm.distributed.groups import use
        from zcomm.distributed.options import OPTION_NAMES, Options, variable_of
    except ImportError:
        in_force: dict[str, str] = {}  # without the binding no option does anything
    else:
        options = Options()
        use.has_options = False  # they are for nobody
        in_force = {variable_of(name): f"{name}={getattr(options, name)}" for name in OPTION_NAMES}
    others = {variable: f"({meaning})" for variable, meaning in environment.OTHERS.items()}
    return [(variable, os.environ.get(variable, "-"), meaning) for variable, meaning in (in_force | others).items()]


def _warnings() -> list[str]:
    """Lines on variables with which the two communicators of a group on GPUs, for exact and compressed calls, hang."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return []
    lines = ["warning: CUDA_DEVICE_MAX_CONNECTIONS=1: a GPU starts exact, compressed and other work in one order alone"]
    if os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") != "1":
        lines.append("warning: NCCL_LAUNCH_ORDER_IMPLICIT: expected 1, which keeps exact and compressed calls in order")
    return lines


def _torch_version() -> str:
    try:
        running = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    try:
        from zcomm.distributed.binding import bindings
    except ImportError as error:
        return f"{running}; the torch.distributed backend is not usable: {error}"
    return f"{running} (zcomm was built for {', '.join(bindings())})"


def _codecs() -> str:
    try:
        import zcomm._core as _core
    except ImportError as error:
        return f"the module zcomm._core is not usable: {error}"
    isas = list(_core.cpu_isas())
    chosen = os.environ.get("ZCOMM_ISA") or isas[-1]
    if chosen not in isas:
        return f"{', '.join(isas)}; ZCOMM_ISA asks for {chosen!r}, which is not among them"
    return f"{', '.join(isas)}; {chosen} in use"


def _gpu_facts() -> list[tuple[str, str]]:
    try:
        import zcomm._core as _core
    except ImportError:
        return []
    toolkit, count = _core.cuda_toolkit(), _core.cuda_device_count()
    if not toolkit:
        return [("CUDA", "not built (no nvcc, or ZCOMM_CUDA=OFF)")]
    try:
        path, version = _nccl.load()
        found = f"{version}, {path}"
    except RuntimeError as error:
        found = f"not found: {error}"
    behind = _nccl.library_behind_front()
    return [
        ("CUDA", f"built with {toolkit}"),
        ("CUDA codec", f"kernels for {', '.join(_core.cuda_targets().split(';'))}"),
        ("GPUs", str(count) if count else "none"),
        ("NCCL", found),
        ("front of NCCL", "not loaded" if behind is None else f"forwards to {behind or 'none: it found no NCCL'}"),
    ]


if __name__ == "__main__":
    main()
