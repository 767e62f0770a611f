"""Options: values that refuse nonsense by name, from arguments, the environment and pg_options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import expect, gather_list, newly_counted
from support.worlds import run

import zcomm


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"all_gather": "int5:64"}, ValueError),
        ({"all_gather": "int8:33"}, ValueError),
        ({"all_gather": "int8:64/int4:64"}, ValueError),
        ({"all_gather": 8}, TypeError),
        ({"reduce_scatter": "int8:64/"}, ValueError),
        ({"all_reduce": ""}, ValueError),
        ({"min_bytes": "64"}, TypeError),
        ({"min_bytes": 1.5}, TypeError),
        ({"min_bytes": -1}, ValueError),
        ({"lists": 1}, TypeError),
        ({"strict": "yes"}, TypeError),
        ({"node_size": 0}, ValueError),
        ({"node_size": "2"}, TypeError),
        ({"chunk_bytes": 0}, ValueError),
        ({"chunk_bytes": 1e6}, TypeError),
        ({"telemetry_every": -1}, ValueError),
        ({"telemetry_every": True}, TypeError),
        ({"no_such_field": 1}, TypeError),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(fields: dict[str, Any], error: type[Exception]) -> None:
    expect(error, next(iter(fields)), lambda: zcomm.Options(**fields))
    if not fields.keys() & {"node_size", "chunk_bytes", "telemetry_every"}:
        expect(error, next(iter(fields)), lambda: zcomm.override(**fields))


def test_override_refuses_what_cannot_change() -> None:
    for fields in ({"node_size": 2}, {"chunk_bytes": 4096}, {"telemetry_every": 1}):
        expect(TypeError, next(iter(fields)), lambda fields=fields: zcomm.override(**fields))


def test_options_are_values() -> None:
    """They print what they hold, and copies hold the same."""
    made = zcomm.Options(all_gather="int4:64", node_size=3, strict=True)
    assert (made.all_gather, made.node_size, made.strict, made.lists) == ("int4:64", 3, True, False)
    for twin in (copy.copy(made), copy.deepcopy(made), eval(repr(made), {"zcomm": zcomm})):
        assert isinstance(twin, zcomm.Options)
        assert repr(twin) == repr(made)


VARIABLES = {
    "ZCOMM_ALL_GATHER": ("int4:96", "all_gather", "int4:96"),
    "ZCOMM_REDUCE_SCATTER": ("int8:32/bf16", "reduce_scatter", "int8:32/bf16"),
    "ZCOMM_ALL_REDUCE": ("bf16", "all_reduce", "bf16"),
    "ZCOMM_MIN_BYTES": ("7", "min_bytes", 7),
    "ZCOMM_OUT_OF_PLACE": ("1", "out_of_place", True),
    "ZCOMM_LISTS": ("true", "lists", True),
    "ZCOMM_COALESCED": ("True", "coalesced", True),
    "ZCOMM_STRICT": ("0", "strict", False),
    "ZCOMM_NODE_SIZE": ("2", "node_size", 2),
    "ZCOMM_CHUNK_BYTES": ("4096", "chunk_bytes", 4096),
    "ZCOMM_TELEMETRY_EVERY": ("100", "telemetry_every", 100),
}


def test_environment_variables_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable sets the option of its name; an argument wins over it; a wrong value is refused by name."""
    for variable, (text, _, _) in VARIABLES.items():
        monkeypatch.setenv(variable, text)
    made = zcomm.Options()
    assert {field: getattr(made, field) for _, field, _ in VARIABLES.values()} == {
        field: value for _, field, value in VARIABLES.values()
    }
    assert zcomm.Options(min_bytes=9, out_of_place=False).min_bytes == 9
    assert not zcomm.Options(out_of_place=False).out_of_place
    for variable in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "nonsense")
            with pytest.raises(ValueError, match=f"(?i){variable.removeprefix('ZCOMM_')}"):
                zcomm.Options()


def test_groups_take_their_options_from_the_environment_or_pg_options() -> None:
    """Without pg_options the variables count, for subgroups too; pg_options is a zcomm.Options or refused."""

    def body() -> None:
        assert newly_counted(gather_list) == {"all_gather: compressed": 1}
        assert dist.new_group([0, 1])._get_backend(torch.device("cpu")).options.lists
        other = dist.new_group([0, 1], pg_options=zcomm.Options(lists=False))
        assert not other._get_backend(torch.device("cpu")).options.lists
        for wrong in ({"lists": True}, dist.ProcessGroupGloo._Options()):
            expect(TypeError, "pg_options", lambda wrong=wrong: dist.new_group([0, 1], pg_options=wrong))

    run(body, env={"ZCOMM_LISTS": "1"})
