"""Old names of attributes give the value of the new one, and say so."""

from typing import Any

import pytest

from zcomm.distributed.stats import CollectiveStats, SentCalls
from zcomm.fsdp.compress import ModuleTraffic
from zcomm.fsdp.secondary import ModuleStats

BYTES: dict[str, Any] = {"intra_node_bytes": 3, "inter_node_bytes": 4}


@pytest.mark.parametrize(
    ("made", "old", "value"),
    [
        (CollectiveStats(**BYTES), "inside_bytes", 3),
        (SentCalls(**BYTES), "between_bytes", 4),
        (ModuleStats(**BYTES, gathers_intra_node=5), "gathers_inside", 5),
        (ModuleStats(**BYTES, gathers_inter_node=6), "gathers_between", 6),
        (ModuleStats(**BYTES), "between_bytes", 4),
        (ModuleTraffic("", "", False, 0, 0, gathered_inter_node_bytes=7), "gathered_between_bytes", 7),
        (ModuleTraffic("", "", False, 0, 0, reduced_intra_node_bytes=8), "reduced_inside_bytes", 8),
    ],
)
def test_an_old_name_warns_and_reads_the_new_one(made: Any, old: str, value: int) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{type(made).__name__}\.{old} is now {type(made).__name__}\."):
        assert getattr(made, old) == value
    assert old not in repr(made)
