"""Printers for gdb: `source tools/gdb/zcomm.py`, then `print view` shows values, and `print format` its name.

A tensor view shows its dtype, its length and the first values. A format shows the name that options take. A topology
shows nodes by rank.
"""

from __future__ import annotations

import re

import gdb
import gdb.printing

SHOWN = 8  # values of a view
C_TYPES = {
    "float32": "float",
    "bfloat16": "unsigned short",
    "float16": "unsigned short",
    "byte_pairs": "unsigned short",
}


def enumerator(value: gdb.Value) -> str:
    """Return the name of an enumeration's value, without its scope."""
    return str(value).rsplit("::", 1)[-1]


class TensorView:
    """``dtype[num_elements] {first values}``; types of 16 bits show their bits."""

    def __init__(self, value: gdb.Value) -> None:
        self._value = value

    def to_string(self) -> str:
        dtype, count = enumerator(self._value["dtype"]), int(self._value["num_elements"])
        if dtype not in C_TYPES:
            return f"{dtype}[{count}]"
        values = self._value["data"].cast(gdb.lookup_type(C_TYPES[dtype]).const().pointer())
        shown = [str(values[i]) if dtype == "float32" else f"0x{int(values[i]):04x}" for i in range(min(count, SHOWN))]
        return f"{dtype}[{count}] {{{', '.join(shown)}{', ...' if count > SHOWN else ''}}}"


class BlockFormat:
    """``int8:256``, with ``:stochastic`` where it is on."""

    def __init__(self, value: gdb.Value) -> None:
        self._value = value

    def to_string(self) -> str:
        block_size = int(self._value["block_size"])
        words = [enumerator(self._value["kind"])] + ([str(block_size)] if block_size else [])
        return ":".join(words + ["stochastic"] * bool(self._value["stochastic"]))


class HopFormats:
    """``INTRA_NODE/INTER_NODE``."""

    def __init__(self, value: gdb.Value) -> None:
        self._value = value

    def to_string(self) -> str:
        return "/".join(BlockFormat(self._value[name]).to_string() for name in ("intra_node", "inter_node"))


class Topology:
    """The node of each rank."""

    def __init__(self, value: gdb.Value) -> None:
        self._value = value

    def to_string(self) -> str:
        nodes = self._value["tables_"]["_M_ptr"].dereference()["node_of"]["_M_impl"]
        begin, end = nodes["_M_start"], nodes["_M_finish"]
        return f"nodes {[int(begin[i]) for i in range(int(end - begin))]}"


PRINTERS = {
    r"BasicTensorView<.*>": TensorView,
    "BlockFormat": BlockFormat,
    "HopFormats": HopFormats,
    "Topology": Topology,
}


def _printers() -> gdb.printing.RegexpCollectionPrettyPrinter:
    printers = gdb.printing.RegexpCollectionPrettyPrinter("zcomm")
    for name, printer in PRINTERS.items():
        printers.add_printer(re.sub(r"\W", "", name), f"^zcomm::{name}$", printer)
    return printers


gdb.printing.register_pretty_printer(gdb.current_objfile(), _printers(), replace=True)
