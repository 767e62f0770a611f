"""The library of bench/one_gpu/cuda. It is built where it is first used: by nvcc, or in a rehearsal by g++."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bench.one_gpu import BENCH, IS_REHEARSAL
from zcomm import _core, _nccl

ROOT = BENCH.parent
SOURCES = BENCH / "one_gpu" / "cuda"
BUILT = ROOT / "build" / "gpu"
MOST_RANKS, WORDS_APART = 8, 32  # as probes.hpp has them
ENCODE, DECODE, SUM, SUM_ENCODE = range(4)

Job = tuple[int, int]  # the address of a job's values and their number


def core_library() -> str:
    """The core that this process has loaded: of one name, and one copy."""
    assert _core  # which has loaded it
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("/libzcomm_core.so"):
            return line.split(maxsplit=5)[5]
    raise RuntimeError("expected libzcomm_core.so in this process, got none")


def command(core: str, is_rehearsal: bool) -> list[str]:
    common = ["-std=c++20", "-shared", f"-I{ROOT / 'include'}", f"-I{ROOT / 'src'}"]
    sources = [str(SOURCES / name) for name in ("kernels.cu", "host.cpp")]
    if is_rehearsal:
        on_host = ["-O1", "-fPIC", "-Wno-unknown-pragmas", f"-I{ROOT / 'tests' / 'cuda_host' / 'include'}"]
        return ["g++", *common, *on_host, "-x", "c++", *sources, "-x", "none", core]
    return ["nvcc", *common, "-O3", "-arch=native", "-Xcompiler", "-fPIC", *sources, core]


@cache
def library() -> ctypes.CDLL:
    """Raises subprocess.CalledProcessError if it cannot be built; the compiler says why."""
    build = command(core_library(), IS_REHEARSAL)
    headers = [path for folder in ("include", "src") for path in (ROOT / folder).rglob("*.*h*")]
    text = " ".join(build).encode() + b"".join(path.read_bytes() for path in sorted([*SOURCES.iterdir(), *headers]))
    made = BUILT / f"probes-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not made.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")
        subprocess.run([*build, "-o", str(unfinished)], check=True)
        unfinished.rename(made)
    return ctypes.CDLL(str(made))


def call(name: str, *arguments: Any) -> None:
    """Raises RuntimeError with what the library says."""
    function = getattr(library(), f"probe_{name}")
    function.restype = ctypes.c_char_p
    if (wrong := function(*arguments)) is not None:
        raise RuntimeError(f"{name}: {wrong.decode()}")


def address(number: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(number)


def _addresses(numbers: Sequence[int]) -> Any:
    return (ctypes.c_void_p * max(1, len(numbers)))(*numbers)


def codec_pass(
    operation: int,
    jobs: Sequence[Job],
    dtype: str,
    *,
    wires: Sequence[int] = (),
    format: str = "exact",
    terms: Sequence[int] = (),
    term_format: str = "exact",
    own: Sequence[int] = (),
    stream: int = 0,
    keep: object = None,
) -> Callable[[], None]:
    """A batch of the codec's jobs, which are as probe_codec in host.cpp has them. Wires, terms and own are addresses of
    memory that must live as long as the pass, as `keep` does."""
    num_elements = (ctypes.c_int64 * len(jobs))(*(num for _, num in jobs))
    arguments = (
        *(operation, ctypes.c_int64(len(jobs)), num_elements, _addresses([values for values, _ in jobs])),
        *(dtype.encode(), _addresses(wires), format.encode(), len(terms) // len(jobs), _addresses(terms)),
        *(term_format.encode(), _addresses(own), address(stream)),
    )
    return lambda keep=keep: call("codec", *arguments)


def wheel() -> bytes:
    return _nccl.wheel_path().encode()
