"""The table of docs/design.md of the functions that a reduce-scatter passes is the call stack of one."""

from __future__ import annotations

import ctypes
import mmap
import re
import shutil
import subprocess
from bisect import bisect_right
from functools import cache
from pathlib import Path

import support
import torch
import torch.distributed as dist
from support.worlds import options, run

ROOT = Path(__file__).parents[3]
NUM = 1 << 14  # elements of a shard: one task of the codec, which so stays on this thread
MAY_BE_INLINED = {"HostRunner::run_one", "Job::run", "encode_range"}  # by the compiler, in their callers
DECIDE_NOTHING = {"timed", "run_beside"}  # on a host: run what callers give them, if they are not inlined there
MOST_FRAMES, MOST_FILES = 11, 9


def rows() -> list[tuple[str, str]]:
    """Pairs of a file and a function of the table."""
    text = (ROOT / "docs/design.md").read_text()
    return re.findall(r"^\| `((?:src|python)/[^`]*)` \| `([^`]*)` \|", text, re.MULTILINE)


@cache
def symbols(library: str) -> tuple[list[int], list[str]]:
    """Addresses of a library's functions, and their names."""
    listed = subprocess.run(["nm", "-C", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    found = sorted((int(line[:16], 16), line[19:]) for line in listed.splitlines() if line[17] in "tTwW")
    return [address for address, _ in found], [name for _, name in found]


def function_at(library: str, offset: int) -> str:
    """The function of an instruction, without namespaces and arguments; a lambda counts as the one that has it."""
    addresses, names = symbols(library)
    whole = names[bisect_right(addresses, offset) - 1].replace("(anonymous namespace)::", "")
    name = re.split(r"[(<\[]", whole)[0].split()[-1]
    return re.sub(r"^(zcomm|c10d_binding|cpu|::)+", "", name)


def stack_of_reduce_scatter(helper: str) -> list[str]:
    """The functions of zcomm that are active when the codec reads the first value, the outermost first."""
    stack = ctypes.CDLL(helper)
    size = dist.get_world_size()
    memory = mmap.mmap(-1, size * NUM * 4)
    values = torch.frombuffer(memory, dtype=torch.float32)
    assert stack.watch(ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(values.nbytes)) == 0
    dist.reduce_scatter_tensor(torch.empty(NUM), values)
    functions: list[str] = []
    for index in range(stack.stack_size()):
        library, offset = ctypes.c_char_p(), ctypes.c_size_t()
        stack.frame(index, ctypes.byref(library), ctypes.byref(offset))
        path = (library.value or b"").decode()
        if not re.search(r"/(libzcomm_core|_c10d_\w+)\.", path):
            break
        functions.insert(0, function_at(path, offset.value))
    return functions


def test_the_table_of_layers_is_the_stack_of_a_call(tmp_path: Path) -> None:
    table = rows()
    assert len(table) <= MOST_FRAMES and len({file for file, _ in table}) <= MOST_FILES
    for file, function in table:
        assert re.search(rf"\b{function.split('::')[-1]}\(", (ROOT / file).read_text()), (file, function)
    helper = str(tmp_path / "libstack.so")
    source = Path(support.__path__[0], "stack.cpp")
    compiler = shutil.which("g++") or "c++"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", source, "-o", helper, "-ldl"], check=True)
    for functions in run(lambda: stack_of_reduce_scatter(helper), nodes=[0, 1], options=options()):
        # torch 2.14 calls the function by its newer name, whose body of torch's the compiler has put into this library.
        functions = [name for name in functions if name not in DECIDE_NOTHING and not name.startswith("c10d::")]
        assert functions == [name for _, name in table if name in functions or name not in MAY_BE_INLINED]
