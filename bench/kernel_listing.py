"""What the GPU codec's kernels are compiled to: registers, spills and instructions per element. Needs no GPU.

python bench/kernel_listing.py build/src/libzcomm_core.so    a built library, or a cubin
python bench/kernel_listing.py FILE --arch sm_90             one of its targets
python bench/kernel_listing.py FILE --markdown               tables for the documentation

An instruction is counted once for 32 threads. The path is the one of a thread whose groups are whole and aligned and
whose blocks are finite: of all paths through the machine code with that path's memory accesses and shuffles, the
shortest. Needs cuobjdump and nvdisasm, of the CUDA toolkit or `pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm`, in PATH.
"""

import heapq
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

GROUP = 16  # elements
VALUE_BYTES = {"Float32": 4, "Bfloat16": 2, "Float16": 2}
CODES = ("Int8", "Int4")
DECODE_GROUPS = 4  # of a thread; encoders have 128 bytes of them
SUM_GROUPS = 2

app = typer.Typer(help=(__doc__ or "").replace("\npython", "\n\npython"), rich_markup_mode=None, add_completion=False)


@dataclass
class Instruction:
    address: int
    predicate: str
    operation: str
    operands: str

    @cached_property
    def counted(self) -> str:
        """What this is to a path: a vector access of so many bits, a scale, a shuffle, a barrier or nothing."""
        name, *suffixes = self.operation.split(".")
        if name in ("LDG", "STG"):
            wide = next((s for s in suffixes if s in ("64", "128")), "")
            return name + (wide or ("16" if name == "LDG" and "U16" in suffixes else ""))
        return {"SHFL": "SHFL", "BAR": "BAR"}.get(name, "")


@dataclass
class Kernel:
    name: str
    registers: int = 0
    stack: int = 0
    local: int = 0  # bytes of local memory
    instructions: dict[int, Instruction] = field(default_factory=dict)

    @property
    def spills(self) -> int:
        return sum(i.operation.startswith(("LDL", "STL")) for i in self.instructions.values())

    def successors(self, address: int) -> list[int]:
        instruction = self.instructions[address]
        following = [a for a in (address + 16,) if a in self.instructions]
        name = instruction.operation.split(".")[0]
        if name == "EXIT":
            return following if instruction.predicate else []
        if name in ("BRA", "CALL"):  # a call of the next few instructions, which does not return
            target = int(re.findall(r"0x[0-9a-f]+", instruction.operands)[-1], 16)
            return [target, *following] if self.is_conditional(instruction) else [target]
        if name == "BSYNC":  # goes on where the last BSSY on that barrier said
            barrier = instruction.operands.split(",")[0]
            for back in range(address, -1, -16):
                opener = self.instructions[back]
                if opener.operation.startswith("BSSY") and opener.operands.split(",")[0] == barrier:
                    return [int(re.findall(r"0x[0-9a-f]+", opener.operands)[-1], 16)]
        return following

    @staticmethod
    def is_conditional(branch: Instruction) -> bool:
        return bool(branch.predicate) or branch.operands.startswith(("P", "!P", "UP", "!UP"))

    def shortest(self, **wanted: int) -> int | None:
        """Instructions of the shortest path from the entry to an exit with exactly these accesses."""
        names = list(wanted)
        start = (0, (0,) * len(names))
        best = {start: 0}
        queue = [(0, start)]
        while queue:
            length, (address, counts) = heapq.heappop(queue)
            if length > best[address, counts]:
                continue
            instruction = self.instructions[address]
            length += 1
            if instruction.counted in names:
                i = names.index(instruction.counted)
                counts = (*counts[:i], counts[i] + 1, *counts[i + 1 :])
                if counts[i] > wanted[names[i]]:
                    continue
            if instruction.operation.startswith("EXIT") and list(counts) == list(wanted.values()):
                return length
            for successor in self.successors(address):
                state = (successor, counts)
                if length < best.get(state, 1 << 30):
                    best[state] = length
                    heapq.heappush(queue, (length, state))
        return None

    def widths(self) -> str:
        counts = Counter(i.counted for i in self.instructions.values() if i.counted[:3] in ("LDG", "STG"))
        return " ".join(f"{name}:{counts[name]}" for name in sorted(counts) if name[3:] in ("64", "128"))


def shuffles(block_size: int) -> dict[str, int]:
    steps = min(5, (block_size // GROUP).bit_length() - 1)
    return {"SHFL": steps, "BAR": int(block_size > 32 * GROUP)}


def stores_in_pairs(groups: int, value_bytes: int) -> dict[str, int]:
    """Of values: half of each group's words are exchanged before."""
    return {"STG128": groups * value_bytes, "SHFL": groups * value_bytes * 2}


def per_element(kernel: Kernel) -> dict[str, float | None]:
    """Instructions per element by what varies: the size of blocks, or the number of wires."""
    operation, types = re.findall(r"(\w+)_kernel<(.*)>", kernel.name)[0]
    if types == "void":  # what they do depends on the format, or on the values
        return {}
    names = re.findall(r"\w+", types)
    value_bytes = next((VALUE_BYTES[n] for n in names if n in VALUE_BYTES), 4)
    codes = next((n for n in names if n in CODES), "")
    code_width = {"Int8": "128", "Int4": "64", "": ""}[codes]
    found: dict[str, float | None] = {}

    def add(label: str, elements: int, wanted: dict[str, int], less: dict[str, int] | None = None) -> None:
        length = kernel.shortest(**{k: v for k, v in wanted.items()})
        base = kernel.shortest(**less) if less else 0
        found[label] = None if length is None or base is None else (length - base) / elements

    if operation == "encode":
        groups = 8 // value_bytes
        for block_size in (64, 256, 2048):
            each = shuffles(block_size)
            wanted = {"LDG128": groups * value_bytes, "STG" + code_width: groups, "SHFL": groups * each["SHFL"]}
            add(f"block {block_size}", groups * GROUP, {**wanted, "BAR": each["BAR"]})
    elif operation == "decode":
        groups = DECODE_GROUPS
        loads = {"LDG" + code_width: groups, "LDG16": groups}
        add("", groups * GROUP, {**loads, **stores_in_pairs(groups, value_bytes)})
    else:  # sums: of 4 wires, and what each one more costs
        elements = SUM_GROUPS * GROUP
        stores = stores_in_pairs(SUM_GROUPS, value_bytes)
        if operation == "sum_encode":  # blocks of 256
            stores = {"STG" + code_width: SUM_GROUPS, "SHFL": 3, "BAR": 0}
        for source, loads in (("int8", 2), ("int4", 1)):
            four, eight = ({"LDG128": n * loads, "LDG16": n, **stores} for n in (4, 8))
            add(f"4 {source} wires", elements, four)
            add(f"per {source} wire", 4 * elements, eight, four)
    return found


def demangled(text: str) -> str:
    return subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout


def read(file: Path, arch: str) -> list[Kernel]:
    def cuobjdump(option: str) -> str:
        command = ["cuobjdump", option, "-arch", arch, str(file)]
        return demangled(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    kernels: dict[str, Kernel] = {}
    for line in cuobjdump("-sass").splitlines():
        if match := re.search(r"Function : (?:void )?(?:zcomm::gpu::)?(.*?>)\(", line):
            name = match[1].replace("zcomm::gpu::", "")
            kernel = kernels.setdefault(name, Kernel(name))
        elif match := re.search(r"/\*([0-9a-f]{4,})\*/ +(?:\{ *)?(@!?\w+ )?([A-Z][\w.]*) ?(.*?) *;", line):
            address = int(match[1], 16)
            kernel.instructions[address] = Instruction(address, match[2] or "", match[3], match[4])
    for function, usage in re.findall(r"Function (?:void )?(.*?>)\(.*?:\n(.*)", cuobjdump("-res-usage")):
        kernel = kernels[function.replace("zcomm::gpu::", "")]
        numbers = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", usage)}
        kernel.registers, kernel.stack, kernel.local = numbers["REG"], numbers["STACK"], numbers["LOCAL"]
    return sorted(kernels.values(), key=lambda k: k.name)


@app.command()
def main(
    file: Annotated[Path, typer.Argument(help="libzcomm_core.so or a cubin")],
    arch: Annotated[str, typer.Option(help="targets, as in sm_90, separated by commas; empty: all in the file")] = "",
    markdown: Annotated[bool, typer.Option(help="print tables for the documentation")] = False,
) -> None:
    listing = subprocess.run(["cuobjdump", "-res-usage", str(file)], capture_output=True, text=True, check=True)
    in_file = sorted(set(re.findall(r"arch = (sm_\w+)", listing.stdout + listing.stderr)))
    targets = arch.split(",") if arch else in_file
    for target in targets:
        table = Table(title=None if markdown else target, box=box.MARKDOWN if markdown else box.SIMPLE)
        for column in (target, "registers", "stack", "spills", "instructions per element", "vector accesses, in bits"):
            table.add_column(column, overflow="fold")
        for kernel in read(file, target):
            costs = (
                f"{k + ': ' if k else ''}{'-' if v is None else f'{v:.1f}'}" for k, v in per_element(kernel).items()
            )
            table.add_row(
                kernel.name.replace("_kernel", ""),
                str(kernel.registers),
                str(kernel.stack + kernel.local),
                str(kernel.spills),
                ", ".join(costs),
                kernel.widths(),
            )
        Console(width=200).print(table)


if __name__ == "__main__":
    app()
