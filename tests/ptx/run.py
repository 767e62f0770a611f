"""The tests of the GPU's codec on the kernels that nvcc compiled, executed on the host: ``make test-ptx``.

    python tests/ptx/run.py PROGRAM FOLDER TARGET... [--once TARGET...]

FOLDER has two modules for each target: codec_TARGET.ptx and lossless_TARGET.ptx. They run as they are, and in three
more ways with what PTX and CUDA leave open: the error of the approximate reciprocal, the bits of NaNs, the order of
warps and CTAs. Those after --once run in the last way alone. Then modules with one instruction changed run, on which a
test must fail: of each kind of change up to three, as some change nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODES = [
    {},
    {"ZCOMM_PTX_RCP": "1", "ZCOMM_PTX_NAN": "random", "ZCOMM_PTX_ORDER": "backward"},
    {"ZCOMM_PTX_RCP": "-1", "ZCOMM_PTX_NAN": "random", "ZCOMM_PTX_ORDER": "random"},
    {"ZCOMM_PTX_RCP": "random", "ZCOMM_PTX_NAN": "random", "ZCOMM_PTX_ORDER": "random"},
]
REFUSED = "PTX, line"  # by the parser: a mutant of that kind shows nothing
TIMEOUT = 900.0  # seconds: some mutants do not end, which says nothing, as a busy machine may be slow

# Mutations of a module: pattern and replacement.
CODEC_MUTATIONS = {
    "order of a comparison": (r"\bsetp\.ge\.u32\b", "setp.gt.u32"),
    "halves change places": (r"(cvt\.rn\.b?f16x2\.f32 \S+), (\S+), (\S+);", r"\1, \3, \2;"),
    "product for a sum": (r"\badd\.rn\.f32\b", "mul.rn.f32"),
    "sum for a product": (r"\bmul\.rn\.f32\b", "add.rn.f32"),
    "factor and addend change places": (r"(fma\.rn\.f32\s+\S+), (\S+), (\S+), (\S+);", r"\1, \2, \4, \3;"),
    "one operand of a maximum": (r"max\.NaN\.\S+(\s+\S+), (\S+), \S+;", r"mov.b32\1, \2;"),
    "the smaller for the larger": (r"\bmax\.u32\b", "min.u32"),
    "a shift by another number": (r"(sh[lr]\.(?:b|u)32\s+\S+, %\S+), 16;", r"\1, 17;"),
    "bytes from another register": (r"(prmt\.b32\s+\S+), (\S+), (\S+), (\S+);", r"\1, \3, \2, \4;"),
    "a load from 4 bytes further": (r"(ld\.global\.v4\.u32\s+.*\[%\w+)\]", r"\1+4]"),
    "the other of two values": (r"(selp\.b32\s+\S+), (\S+), (\S+), (\S+);", r"\1, \3, \2, \4;"),
    "or for xor": (r"\bxor\.b32\b", "or.b32"),
    "another lane's value": (r"(shfl\.sync\.bfly\.b32\s+[^,]+, \S+), (\S+), ", r"\1, 3, "),
    "no barrier": (r"^\s*bar\.sync.*$", ""),
    "a store to 2 bytes further": (r"(st\.global\.u16\s+\[%\w+)\]", r"\1+2]"),
    "a sign that stays": (r"\bneg\.f32\b", "abs.f32"),
}

LOSSLESS_MUTATIONS = {
    "order of a comparison": (r"\bsetp\.ge\.u32\b", "setp.gt.u32"),
    "the larger for the smaller": (r"\bmin\.u32\b", "max.u32"),
    "or for xor": (r"\bxor\.b(32|64)\b", r"or.b\1"),
    "the other of two values": (r"(selp\.b(?:32|64)\s+\S+), (\S+), (\S+), (\S+);", r"\1, \3, \2, \4;"),
    "a sum for a difference": (r"\bsub\.s(32|64)\b", r"add.s\1"),
    "a shift the other way": (r"\bshf\.l\.wrap\b", "shf.r.wrap"),
    "the highest bit for the lowest": (r"\bbrev\.b32\b", "mov.b32"),
    "zeros counted for ones": (r"\bpopc\.b32\b", "clz.b32"),
    "bits inserted elsewhere": (r"(bfi\.b64\s+\S+, \S+, \S+), (\d+),", r"\1, 1\2,"),
    "a lane's own value in place of another's": (r"(shfl\.sync\.bfly\.b32\s+[^,]+, \S+), (\S+), ", r"\1, 0, "),
    "a store for an atomic": (r"atom\.shared\.or\.b32\s+\S+, (\[\S+\]), ", r"st.shared.u32 \1, "),
    "no barrier of the warp": (r"^\s*bar\.warp\.sync.*$", ""),
    "no barrier": (r"^\s*bar\.sync.*$", ""),
    "a store to 2 bytes further": (r"(st\.global\.u16\s+\[%\w+)\]", r"\1+2]"),
    "other keys of the hash": (r"(ld\.global\.nc\.v4\.u32\s+.*\[%\w+)\]", r"\1+16]"),
}

# The tests of each module.
SUITES = {"codec": "codec on a GPU", "lossless": "jobs of lossless codecs"}
MUTATIONS = {"codec": CODEC_MUTATIONS, "lossless": LOSSLESS_MUTATIONS}


def run(program: str, modules: list[Path], mode: dict[str, str], *arguments: str) -> tuple[int | None, str, float]:
    """The exit status, None if it did not end in time; what was printed; seconds."""
    environment = {**os.environ, **mode, "ZCOMM_PTX": ":".join(map(str, modules))}
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [program, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT
        )
        status, text = done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        status, text = None, f"did not end in {TIMEOUT:.0f} s"
    return status, text, time.monotonic() - begin


def check_target(program: str, folder: Path, target: str, mode: dict[str, str]) -> bool:
    modules = [folder / f"{name}_{target}.ptx" for name in SUITES]
    status, text, seconds = run(program, modules, mode)
    how = ", ".join(f"{name.removeprefix('ZCOMM_PTX_')} {value}" for name, value in mode.items()) or "plain"
    print(f"{'passed' if status == 0 else 'FAILED'}  {target}, {how}: {seconds:.0f} s", flush=True)
    if status != 0:
        print(text[-5000:], flush=True)
    return status == 0


def check_mutants(program: str, module: str, lines: list[str], name: str) -> bool:
    """Check that each kind of mutation fails a test; the places are the same in every run."""
    pattern, replacement = MUTATIONS[module][name]
    places = [index for index, line in enumerate(lines) if re.search(pattern, line)]
    for index in random.Random(name).sample(places, min(3, len(places))):
        changed = re.sub(pattern, replacement, lines[index], count=1)
        with tempfile.TemporaryDirectory() as temporary:
            mutant = Path(temporary, "mutant.ptx")
            mutant.write_text("\n".join([*lines[:index], changed, *lines[index + 1 :]]))
            status, text, seconds = run(program, [mutant], {}, f"-ts={SUITES[module]}", "-aa=1")
        is_caught = status is not None and status != 0 and REFUSED not in text
        what = f"{module}, {name}, line {index + 1}: {lines[index].strip()} -> {changed.strip()}"
        print(f"{'caught' if is_caught else 'missed'}  {what}: {seconds:.0f} s", flush=True)
        if is_caught:
            return True
    print(
        f"FAILED  {module}, {name}: expected a test that fails, got none in 3 of {len(places)} places",
        flush=True,
    )
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("folder", type=Path)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--once", nargs="*", default=[])
    arguments = parser.parse_args()
    program, folder = arguments.program, arguments.folder
    ways = [(target, mode) for target in arguments.targets for mode in MODES]
    ways += [(target, MODES[-1]) for target in arguments.once]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [pool.submit(check_target, program, folder, target, mode) for target, mode in ways]
        mutants = []
        for module, mutations in MUTATIONS.items():
            lines = (folder / f"{module}_{arguments.targets[0]}.ptx").read_text().split("\n")
            mutants += [pool.submit(check_mutants, program, module, lines, name) for name in mutations]
    failures = sum(not run.result() for run in [*runs, *mutants])
    print(f"{len(runs)} runs, {len(mutants)} kinds of mutants, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main() != 0)
