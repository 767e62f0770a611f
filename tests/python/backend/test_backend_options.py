"""Options: values that refuse nonsense by name, from arguments, the environment and pg_options."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import expect, gather_list, newly_counted
from support.worlds import run

import zcomm
from zcomm.distributed.options import OPTION_FIELDS, variable_of


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"policy": "never"}, ValueError),
        ({"policy": True}, TypeError),
        ({"calibration": 3}, TypeError),
        ({"calibration": "it's.json"}, ValueError),
        ({"all_gather": "int5:64"}, ValueError),
        ({"all_gather": "int8:33"}, ValueError),
        ({"all_gather": "int8:64/int4:64"}, ValueError),
        ({"all_gather": 8}, TypeError),
        ({"reduce_scatter": "int8:64/"}, ValueError),
        ({"reduce_scatter": "exact:direct/exact"}, ValueError),
        ({"small_reduce_scatter": "int8:64"}, ValueError),
        ({"all_reduce": "exact:direct"}, ValueError),
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
    if not fields.keys() & {"node_size", "chunk_bytes", "telemetry_every", "calibration"}:
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
        assert twin == made and hash(twin) == hash(made)
        assert repr(twin) == repr(made)
    assert made != zcomm.Options() and made != "options"


README = next(folder / "README.md" for folder in Path(__file__).parents if (folder / "README.md").exists())

# Another value than the default for every option: the text of its variable, and the option.
OTHER_VALUES: dict[str, tuple[str, Any]] = {
    "policy": ("auto", "auto"),
    "all_gather": ("int4:96", "int4:96"),
    "reduce_scatter": ("int8:32/bf16", "int8:32/bf16"),
    "small_reduce_scatter": ("exact:direct", "exact:direct"),
    "all_reduce": ("bf16", "bf16"),
    "min_bytes": ("7", 7),
    "out_of_place": ("1", True),
    "lists": ("true", True),
    "coalesced": ("True", True),
    "strict": ("1", True),
    "node_size": ("2", 2),
    "chunk_bytes": ("4096", 4096),
    "seed": ("12", 12),
    "high_priority_stream": ("0", False),
    "blocking_wait": ("1", True),
    "end_on_failure": ("0", False),
    "max_ctas": ("16", 16),
    "telemetry_every": ("100", 100),
    "calibration": ("cluster.json", "cluster.json"),
}


def test_every_option_is_printed_compared_and_documented() -> None:
    """Each row of the table: in repr, in ==, in the README's table, and, if ranks compare it, in the handshake."""
    names = [field.name for field in OPTION_FIELDS]
    assert names == list(OTHER_VALUES) == list(inspect.signature(zcomm.Options).parameters)
    rows = [line.split("|") for line in README.read_text().splitlines() if line.startswith("| `")]
    documented = "".join(row[1] for row in rows if "ZCOMM_" in row[2])
    default = zcomm.Options()
    for field in OPTION_FIELDS:
        changed = zcomm.Options(**{field.name: OTHER_VALUES[field.name][1]})
        assert changed != default and hash(changed) != hash(default)
        assert repr(changed) != repr(default)
        assert (changed.handshake_text() != default.handshake_text()) == field.compared
        assert f"`{field.name}`" in documented
        assert f"        {field.name}: " in str(zcomm.Options.__doc__)
    uncompared = [field.name for field in OPTION_FIELDS if not field.compared]
    assert uncompared == ["high_priority_stream", "blocking_wait", "end_on_failure", "telemetry_every"]


@pytest.mark.parametrize("value", [2**63, 2**70, -(2**70)])
def test_numbers_that_no_option_holds_are_refused(value: int) -> None:
    expect(ValueError, "seed", lambda: zcomm.Options(seed=value))
    expect(ValueError, "node_size", lambda: zcomm.Options(node_size=value))


def test_environment_variables_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable sets the option of its name; an argument wins over it; a wrong value is refused by name."""
    for name, (text, _) in OTHER_VALUES.items():
        monkeypatch.setenv(variable_of(name), text)
    made = zcomm.Options()
    assert {name: getattr(made, name) for name in OTHER_VALUES} == {
        name: value for name, (_, value) in OTHER_VALUES.items()
    }
    assert zcomm.Options(min_bytes=9, out_of_place=False).min_bytes == 9
    assert not zcomm.Options(out_of_place=False).out_of_place
    for name in OTHER_VALUES.keys() - {"calibration"}:  # which any text may name: it is read when a group is made
        with monkeypatch.context() as patch:
            patch.setenv(variable_of(name), "nonsense")
            with pytest.raises(ValueError, match=f"(?i){name}"):
                zcomm.Options()


def test_ranks_may_differ_in_what_is_not_compared() -> None:
    def body() -> None:
        rank = dist.get_rank()
        loose = dist.new_group([0, 1], pg_options=zcomm.Options(telemetry_every=rank, blocking_wait=bool(rank)))
        dist.all_reduce(torch.ones(1), group=loose)
        strict = dist.new_group([0, 1], pg_options=zcomm.Options(all_gather=f"int8:{64 * (1 + rank)}"))
        with pytest.raises(RuntimeError, match="disagree on the options"):
            dist.all_reduce(torch.ones(1), group=strict)

    run(body)


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
