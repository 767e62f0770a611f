"""What memory and the machine code bound the codec's kernels by: stores and loads alone, registers, and counters.

`pairs` stores as a decoder does to 4 or 2 bytes a value: two lanes fill a sector, and a warp's store touches as many
lines as it has pairs. `rows` stores whole rows. Where the toolkit has cuobjdump, there is a listing of the kernels;
where it has ncu, and the driver lets it, its counters are in the log of the stage.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bench.one_gpu import probes, stage
from zcomm_bench import gpu_clock

FLOORS = (
    "memset",
    "store in pairs, 4 bytes a value",
    "store in pairs, 2 bytes a value",
    "store in rows",
    "load in rows",
)
SIZES = stage.pick((1 << 26, 1 << 28, 1 << 30), (1 << 15,))
REPEATS = stage.pick(25, 1)
COLUMNS = ("floor", "bytes", "us", "gbps")
LISTED = ("kernel", "registers", "stack", "shared_bytes", "warps_by_registers")
REGISTERS, WARPS = 65536, 64  # of an SM, from compute capability 8.0 on
COUNTED = "regex:^(decode|sum|sum_encode|measure|write|decode_lossless)_kernel"
COUNT_SECONDS = 45.0
SECTIONS = ("LaunchStats", "Occupancy", "WarpStateStats", "SpeedOfLight")


def rows() -> Iterator[dict[str, Any]]:
    for size in SIZES:
        data = torch.zeros(size, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        place = (probes.address(data.data_ptr()), probes.ctypes.c_int64(size), probes.address(stream))
        passes = [partial(probes.call, "floor", number, *place) for number in range(len(FLOORS))]
        for floor, times in zip(FLOORS, gpu_clock.seconds_of(passes, REPEATS), strict=True):
            seconds = statistics.median(times)
            yield {"floor": floor, "bytes": size, "us": seconds * 1e6, "gbps": size / seconds / 1e9}


def warps_of(registers: int) -> int:
    """Of an SM, as far as registers go: they are handed out to warps by 256, on four schedulers each."""
    of_warp = -(-registers * 32 // 256) * 256
    return min(WARPS, REGISTERS // 4 // of_warp * 4) if of_warp else WARPS


def listing(library: str) -> list[dict[str, Any]]:
    """Its kernels, by what `cuobjdump -res-usage` says of them; none without it."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        print("no listing: no cuobjdump on the PATH")
        return []
    done = subprocess.run([tool, "-res-usage", library], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"no listing: {(done.stderr or done.stdout).strip()}")
        return []
    names = subprocess.run(["c++filt"], input=done.stdout, capture_output=True, text=True, check=True).stdout
    found = []
    for function, usage in re.findall(r"Function (?:void )?(.*):\n(.*)", names):
        numbers = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
        name = re.sub(r"\((?!anonymous).*", "", function).replace("zcomm::gpu::", "").replace("_kernel", "")
        figures = (numbers["REG"], numbers["STACK"], numbers["SHARED"], warps_of(numbers["REG"]))
        found.append(dict(zip(LISTED, (name, *figures), strict=True)))
    return found


def count() -> None:
    """Runs the kernels of real_shapes and of differences once under ncu, whose tables go to the log."""
    tool = shutil.which("ncu")
    if tool is None:
        print("no counters: no ncu on the PATH")
        return
    sections = [part for name in SECTIONS for part in ("--section", name)]
    # ncu locks clocks unless it is told not to, and leaves them locked when it is killed.
    command = [tool, "--clock-control", "none", "--kernel-name", COUNTED, "--launch-count", "24", *sections]
    command += [sys.executable, "-m", "bench.one_gpu.floors", "--run-kernels"]
    try:
        done = subprocess.run(command, timeout=COUNT_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"no more counters: ncu took more than {COUNT_SECONDS:.0f} s")
        return
    if done.returncode != 0:
        print(f"no counters: ncu ended with status {done.returncode}")


def run_kernels() -> None:
    """Each once: what ncu looks at."""
    from bench.one_gpu import real_shapes
    from lossless_cuda import Piece

    for _, call in real_shapes.passes():
        call()
        torch.cuda.synchronize()
    piece = Piece(stage.pick(1 << 27, 1 << 12), 3e-4, "cuda")
    piece.restore()
    piece.encode()
    piece.decode()
    torch.cuda.synchronize()


if __name__ == "__main__":
    if "--run-kernels" in sys.argv:
        run_kernels()
    else:
        out = stage.output(__doc__)
        stage.keep(out, "floors", COLUMNS, rows())
        if listed := listing(probes.core_library()):
            stage.keep(out, "listing", LISTED, listed)
        count()
