"""What the inner loops of the host codec are compiled to: instructions, and cycles if nothing has to be waited for.

python bench/host_listing.py build/plain/src/CMakeFiles/zcomm_core_objects.dir/codec/cpu/kernels_avx2.cpp.o
python bench/host_listing.py OBJECT --cpu znver3
python bench/host_listing.py build/aarch64/.../kernels_neon.cpp.o --machine aarch64 --cpu neoverse-n2

Needs objdump and llvm-mca, and an object file, which has the names of its functions. Listed are loops with no other
one inside, no call, and registers of floats; nearly all take 32 elements at a time. Cycles are llvm-mca's for the CPU
named. Of aarch64, objdump is the cross compiler's.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

MAX_INSTRUCTIONS = 200
FUNCTIONS = ("decode", "encode", "add_wires", "sum_tiles", "store_values", "load_values")
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\t(.*)$")
# By machine: objdump, a conditional jump and its target, what starts a jump or a call, and marks of float registers.
MACHINES = {
    "x86_64": ("objdump", re.compile(r"^j\w+\s+([0-9a-f]+)"), ("j", "call", "ret"), ("ps ", "dq2ps")),
    "aarch64": (
        "aarch64-linux-gnu-objdump",
        re.compile(r"^(?:b\.\w+|cbn?z|tbn?z)\s+(?:.*, )?([0-9a-f]+) <"),
        ("b", "cbz", "cbnz", "tb", "ret"),
        ("scvtf", "fmul", "fcvt", "fadd"),
    ),
}


@dataclass
class Loop:
    function: str
    instructions: list[str]  # without the jump back

    @property
    def nontemporal(self) -> bool:
        return any("vmovnt" in line for line in self.instructions)

    def cycles(self, machine: str, cpu: str) -> float:
        """Of an iteration, by llvm-mca."""
        text = "\n".join(re.sub(r"\s*(<| #|//).*$", "", line) for line in self.instructions)
        command = ["llvm-mca", f"-mtriple={machine}", f"-mcpu={cpu}", "-iterations=100"]
        answer = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
        found = re.search(r"Total Cycles:\s+(\d+)", answer)
        assert found is not None, answer
        return int(found[1]) / 100


def functions_of(object_file: Path, machine: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Each function's name and its instructions by address."""
    command = [MACHINES[machine][0], "-d", "-C", "--no-show-raw-insn", str(object_file)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, lines = "", []
    for line in listing.splitlines():
        if found := FUNCTION.match(line):
            if lines:
                yield name, lines
            name, lines = found[1].replace("zcomm::cpu::(anonymous namespace)::", ""), []
        elif found := INSTRUCTION.match(line):
            lines.append((int(found[1], 16), found[2].strip()))
    yield name, lines


def loops_of(name: str, lines: list[tuple[int, str]], machine: str) -> Iterator[Loop]:
    _, jump_of, other_jumps, marks = MACHINES[machine]
    places = {address: i for i, (address, _) in enumerate(lines)}
    for i, (address, text) in enumerate(lines):
        jump = jump_of.match(text)
        if jump is None or int(jump[1], 16) > address or int(jump[1], 16) not in places:
            continue
        body = [text for _, text in lines[places[int(jump[1], 16)] : i]]
        is_innermost = not any(line.split()[0].startswith(other_jumps) for line in body)
        if is_innermost and len(body) < MAX_INSTRUCTIONS and any(mark in line for line in body for mark in marks):
            yield Loop(name, body)


def main(
    object_file: Annotated[Path, typer.Argument(help="An object file of the kernels, not stripped.")],
    cpu: Annotated[str, typer.Option(help="Whose pipeline llvm-mca models.")] = "icelake-server",
    machine: Annotated[str, typer.Option(help=f"What the object is for: {', '.join(MACHINES)}.")] = "x86_64",
) -> None:
    print("| function | instructions | cycles | past the caches |\n|---|---|---|---|")
    for name, lines in functions_of(object_file, machine):
        if not any(re.search(rf"\b{function}<", name) for function in FUNCTIONS):
            continue
        for loop in loops_of(name, lines, machine):
            mark = "yes" if loop.nontemporal else ""
            print(
                f"| `{name.split('(')[0]}` | {len(loop.instructions) + 1} | {loop.cycles(machine, cpu):.1f} | {mark} |"
            )


if __name__ == "__main__":
    typer.run(main)
