"""Formats by their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

import zcomm._core as _core

#: As formats() lists them; of reductions also INTRA_NODE/INTER_NODE.
Format: TypeAlias = Literal["exact", "bf16", "int8:256", "int4:128", "eden2:128", "int8:128/int4:128"] | str

#: Names of forms of calls, or one text with commas.
Forms: TypeAlias = "str | Collection[str]"
#: Forms of calls by pattern of groups, or one text with semicolons.
Groups: TypeAlias = "str | Mapping[str, Forms]"


def formats(dtype: str = "float32") -> dict[str, float]:
    """The formats, and the bits that a value of ``dtype`` takes in a long message, scales included.

    Blocks have 256 elements here. Any multiple of 32 from 32 to 4096 may stand in its place, for eden a power of two up
    to 512. ``":stochastic"`` may follow it in int8 and int4, and changes no size.
    Reductions take one, or two for the hops inside a node and between nodes, ``"int8:128/int4:128"``.

    >>> round(formats("bfloat16")["int8:256"], 2)
    8.06
    """
    num_elements = 1 << 20
    names = [name + (":256" if has_scales else "") for name, has_scales in _core.ELEMENT_KINDS]
    return {name: 8 * _core.WireLayout(name, dtype, num_elements).num_bytes / num_elements for name in names}
