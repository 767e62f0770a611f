"""Options: values that refuse nonsense by name, from arguments, the environment and pg_options."""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import re
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.calls import expect, gather_list, newly_counted
from support.worlds import run, sampling

import zcomm
from zcomm import _nccl
from zcomm.distributed import backend, environment
from zcomm.distributed.binding import TORCH, _c10d
from zcomm.distributed.options import OPTION_NAMES, variable_of
from zcomm.distributed.overrides import overridden

README = next(folder / "README.md" for folder in Path(__file__).parents if (folder / "README.md").exists())


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"compress": "never"}, ValueError),
        ({"compress": True}, TypeError),
        ({"decisions": 3}, TypeError),
        ({"decisions": "it's.json"}, ValueError),
        ({"all_gather": "int5:64"}, ValueError),
        ({"all_gather": "int8:33"}, ValueError),
        ({"all_gather": "int8:64/int4:64"}, ValueError),
        ({"all_gather": 8}, TypeError),
        ({"reduce_scatter": "int8:64/"}, ValueError),
        ({"reduce_scatter": "direct"}, ValueError),
        ({"all_reduce": ""}, ValueError),
        ({"min_bytes": "64"}, TypeError),
        ({"min_bytes": 1.5}, TypeError),
        ({"min_bytes": -1}, ValueError),
        ({"forms": 1}, TypeError),
        ({"forms": [1]}, TypeError),
        ({"forms": "lists"}, ValueError),
        ({"forms": ["list", "traced:fsdp"]}, ValueError),
        ({"groups": 1}, TypeError),
        ({"groups": {1: "list"}}, TypeError),
        ({"groups": {"dp": 1}}, TypeError),
        ({"groups": {"dp": ""}}, ValueError),
        ({"groups": {"": "list"}}, ValueError),
        ({"groups": {"dp": "exact,list"}}, ValueError),
        ({"groups": "dp"}, ValueError),
        ({"groups": "dp=exact; dp=single"}, ValueError),
        ({"strict": "yes"}, TypeError),
        ({"node_size": 0}, ValueError),
        ({"node_size": "2"}, TypeError),
        ({"chunk_bytes": 0}, ValueError),
        ({"chunk_bytes": 1e6}, TypeError),
        ({"verify": "all"}, ValueError),
        ({"verify": 1}, TypeError),
        ({"no_such_field": 1}, TypeError),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(fields: dict[str, Any], error: type[Exception]) -> None:
    expect(error, next(iter(fields)), lambda: zcomm.Options(**fields))
    if not fields.keys() & {"node_size", "chunk_bytes", "decisions", "verify"}:
        expect(error, next(iter(fields)), lambda: zcomm.override(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allgather": "exact"}, "allgather: expected an option, got none of that name: did you mean all_gather?"),
        ({"all_to_all": "int8:128"}, "got none of that name: the option exchanges has the formats of all exchanges"),
        ({"all_gather": "int8:128/int4:128"}, "expected one format"),
        ({"all_gather": 8}, "a format such as 'int8:256' or 'exact', got 8"),
        ({"all_reduce": "int8"}, "expected a block size, such as int8:256"),
        ({"forms": True}, "forms: expected names of forms, got True"),
        (
            {"forms": "in_place,lists"},
            "forms: expected single, in_place, out_of_place, list, coalesced, traced, got 'lists'",
        ),
        ({"groups": "dp"}, "groups: expected 'PATTERN=form,form; PATTERN=exact', got 'dp'"),
        ({"groups": {"dp": ""}}, "groups: expected exact or single, in_place, out_of_place"),
        ({"decisions": 1}, "decisions: expected the name of a file, got 1"),
        ({"verify": "all"}, "verify: expected True, False or 'sample', got 'all'"),
        ({"verify": 1}, "verify: expected True, False or 'sample', got 1"),
    ],
    ids=str,
)
def test_errors_say_what_to_write(fields: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        zcomm.Options(**fields)


def test_override_refuses_what_cannot_change() -> None:
    for fields in ({"node_size": 2}, {"chunk_bytes": 4096}, {"decisions": "cluster.json"}, {"verify": True}):
        expect(TypeError, next(iter(fields)), lambda fields=fields: zcomm.override(**fields))


PROGRAM = """import zcomm
zcomm.Options(all_gather="int8:256", forms=["list"])
zcomm.override(min_bytes=1, compress="auto")
zcomm.Options(al_gather="int8:256")
zcomm.Options(compress="sometimes")
zcomm.override(node_size=1)
print(zcomm.Options().forms, zcomm.Options().form)
"""


def test_threads_may_share_an_override() -> None:
    """Each gets back what was in force where it began the block, also if another thread began it later."""
    shared = zcomm.exact()
    inside, may_leave = threading.Event(), threading.Event()
    found: dict[str, list[str]] = {}

    def in_force() -> list[str]:
        return [field for field in ("compress", "min_bytes", "all_reduce") if overridden(field) is not None]

    def other() -> None:
        with zcomm.override(min_bytes=1):
            with shared, shared:
                inside.set()
                may_leave.wait(60)
            found["other"] = in_force()

    thread = threading.Thread(target=other)
    with zcomm.override(compress="auto"):
        with shared:
            thread.start()
            assert inside.wait(60)
        found["main"] = in_force()
    may_leave.set()
    thread.join()
    assert found == {"main": ["compress"], "other": ["min_bytes"]}
    assert in_force() == []


@pytest.mark.timeout(400)  # mypy reads all of zcomm
def test_type_checkers_know_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api")
    file, config = tmp_path / "program.py", tmp_path / "mypy.ini"
    file.write_text(PROGRAM)
    # Without torch's sources, which nothing of Options is typed by, it takes a quarter of the time.
    config.write_text("[mypy]\nignore_missing_imports = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    monkeypatch.setenv("MYPYPATH", str(README.parent))
    text, errors, _ = api.run(["--config-file", str(config), str(file)])
    assert not errors
    lines = {int(found) for found in re.findall(r"program.py:(\d+): error", text)}
    assert lines == {4, 5, 6, 7}, text


def test_options_are_values() -> None:
    """Options print all their values, and copies are equal."""
    made = zcomm.Options(all_gather="int4:64", node_size=3, strict=True)
    assert (made.all_gather, made.node_size, made.strict, made.forms) == ("int4:64", 3, True, ())
    for twin in (copy.copy(made), copy.deepcopy(made), eval(repr(made), {"zcomm": zcomm})):
        assert isinstance(twin, zcomm.Options)
        assert twin == made and hash(twin) == hash(made)
        assert repr(twin) == repr(made)
    assert made != zcomm.Options() and made != "options"


PAGE = Path(__file__).parents[3] / "docs" / "options.md"

# Another value than the default for every option: the text of its variable, and the option.
OTHER_VALUES: dict[str, tuple[str, Any]] = {
    "compress": ("auto", "auto"),
    "all_gather": ("int4:96", "int4:96"),
    "reduce_scatter": ("int8:32/bf16", "int8:32/bf16"),
    "all_reduce": ("bf16", "bf16"),
    "exchanges": ("int8:32/int4:64", "int8:32/int4:64"),
    "min_bytes": ("7", 7),
    "forms": ("traced, list,traced", ("list", "traced")),
    "groups": ("tp=exact; dp* = list,single", {"dp*": "single,list", "tp": "exact"}),
    "strict": ("1", True),
    "node_size": ("2", 2),
    "chunk_bytes": ("4096", 4096),
    "decisions": ("cluster.json", "cluster.json"),
    "verify": ("1", True),
}


def test_every_option_is_printed_compared_and_documented() -> None:
    """Each row of the table: in the signatures, in repr, in ==, and in the page's table."""
    names = list(OPTION_NAMES)
    *keywords, unknown = inspect.signature(zcomm.Options).parameters
    assert names == list(OTHER_VALUES) == keywords
    *overridable, unknown_of_override = inspect.signature(zcomm.override).parameters
    assert overridable == names[: len(overridable)]
    assert unknown == unknown_of_override == "unknown"  # what is no option
    for name in names:
        value = {name: OTHER_VALUES[name][1]}
        with contextlib.nullcontext() if name in overridable else pytest.raises(TypeError, match=name):
            _c10d.PolicyOverride(**value)
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    documented = "".join(row[1] for row in rows if "ZCOMM_" in row[2])
    default = zcomm.Options()
    for name in names:
        changed = zcomm.Options(**{name: OTHER_VALUES[name][1]})
        assert changed != default and hash(changed) != hash(default)
        assert repr(changed) != repr(default)
        assert f"`{name}`" in documented
        assert f"    {name}: " in str(inspect.getdoc(zcomm.Options))


@pytest.mark.parametrize("value", [2**63, 2**70, -(2**70)])
def test_numbers_that_no_option_holds_are_refused(value: int) -> None:
    expect(ValueError, "min_bytes", lambda: zcomm.Options(min_bytes=value))
    expect(ValueError, "node_size", lambda: zcomm.Options(node_size=value))


def test_environment_variables_set_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable sets the option of its name; an argument wins over it; a wrong value is refused by name."""
    for name, (text, _) in OTHER_VALUES.items():
        monkeypatch.setenv(variable_of(name), text)
    made = zcomm.Options()
    assert {name: getattr(made, name) for name in OTHER_VALUES} == {
        name: value for name, (_, value) in OTHER_VALUES.items()
    }
    assert zcomm.Options(min_bytes=9, strict=False).min_bytes == 9
    assert not zcomm.Options(strict=False).strict
    assert zcomm.Options(forms=()).forms == ()
    for name in OTHER_VALUES.keys() - {"decisions"}:  # which may name what is made later
        with monkeypatch.context() as patch:
            patch.setenv(variable_of(name), "nonsense")
            with pytest.raises(ValueError, match=f"^{variable_of(name)}: "):
                zcomm.Options()


@pytest.mark.parametrize(("text", "value"), [("0", False), ("true", True), ("1", True), ("sample", "sample")])
def test_the_variable_of_verify_is_a_flag_or_a_sample(text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_VERIFY", text)
    assert zcomm.Options().verify == value
    assert f"verify={value!r}" in repr(zcomm.Options())
    monkeypatch.setenv("ZCOMM_VERIFY", f"{text}d")
    with pytest.raises(ValueError, match=f"^ZCOMM_VERIFY: expected 1, 0, true, false or sample, got '{text}d'$"):
        zcomm.Options()


@pytest.mark.parametrize("text", ["64K", "6_5", "1e6", "65536.0", "", "\u0663"])
def test_a_variable_of_a_number_has_digits_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_MIN_BYTES", text)
    expected = f"ZCOMM_MIN_BYTES: expected a whole number in digits, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        zcomm.Options()


def test_a_variable_that_nothing_reads_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_ALL_GATER", "exact")
    monkeypatch.setenv("ZCOMM_FLIGHT_RECORDER", "dump")
    environment.warn_of_unknown.cache_clear()
    with pytest.warns(UserWarning) as caught:
        zcomm.Options()
        zcomm.Options()
    texts = [str(warning.message) for warning in caught]
    expected = "zcomm does not read the environment variable ZCOMM_ALL_GATER: did you mean ZCOMM_ALL_GATHER?"
    assert [text for text in texts if "GATER" in text] == [expected]
    assert not [text for text in texts if "RECORDER" in text]


def test_variables_of_nccl_that_only_exact_calls_obey_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NAN_CHECK", "1"), ("DUMP_ON_TIMEOUT", "Yes"), ("DESYNC_DEBUG", "0"), ("BLOCKING_WAIT", "1")):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", value)
    assert environment.unread_of_nccl() == ["TORCH_NCCL_NAN_CHECK", "TORCH_NCCL_DUMP_ON_TIMEOUT"]


def test_the_front_of_nccl_that_would_compress_exact_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nccl, "library_behind_front", lambda: "/libnccl.so.2")
    for name in ("ZCOMM_ALL_REDUCE", "ZCOMM_EXCHANGES", "ZCOMM_RULES"):
        with monkeypatch.context() as context:
            context.setenv(name, "int8:128")
            with pytest.raises(ValueError, match=f"LD_PRELOAD: expected no front of NCCL .*, as {name} asks"):
                backend._make_nccl("store", 0, 2, zcomm.Options())
            context.setattr(_nccl, "library_behind_front", lambda: None)
            context.setattr(dist, "is_nccl_available", lambda: False)
            with pytest.raises(RuntimeError, match="built without NCCL"):
                backend._make_nccl("store", 0, 2, zcomm.Options())


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter", "broadcast", "send_recv"])
def test_exchanges_have_one_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields: dict[str, Any] = {name: "int8:128"}
    for made in (zcomm.Options, zcomm.override):
        with pytest.raises(TypeError, match=f"^{name}: .*: the option exchanges has"):
            made(**fields)
    monkeypatch.setenv(variable_of(name), "int8:128")
    with pytest.raises(ValueError, match=f"^{variable_of(name)}: expected ZCOMM_EXCHANGES, got"):
        zcomm.Options()


def test_a_wrong_variable_is_the_first_error_of_a_program() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"^ZCOMM_ALL_GATHER: ") as caught:
            dist.init_process_group("zcomm", store=dist.HashStore(), rank=0, world_size=1)
        assert "not initialized" not in "".join(traceback.format_exception(caught.value))

    run(body, 1, backend=None, env={"ZCOMM_ALL_GATHER": "int8"})


def test_ranks_may_differ_in_samples_and_not_in_options() -> None:
    def body() -> None:
        rank = dist.get_rank()
        os.environ.update(sampling(rank))
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
        strict = dist.new_group([0, 1], pg_options=zcomm.Options(all_gather=f"int8:{64 * (1 + rank)}"))
        with pytest.raises(RuntimeError, match="disagree on the options"):
            dist.all_reduce(torch.ones(1), group=strict)

    run(body)


def test_options_of_nccl_go_to_the_group_of_exact_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron gives them to new_group(). The rest is as in a group without options, also in a group of this group."""

    class OfNccl:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

    made: list[Any] = []
    nccl = SimpleNamespace(Options=OfNccl, _set_sequence_number_for_group=lambda: None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {"Options": OfNccl}), raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    given = OfNccl()
    resolved = backend._resolve(given)
    assert resolved == zcomm.Options() and resolved.of_nccl is given
    assert resolved.with_threshold(5, "a link").of_nccl is given
    assert copy.copy(resolved).of_nccl is None
    if TORCH < (2, 14):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", lambda *arguments: made.append(arguments) or nccl, raising=False)
        backend._make_nccl("store", 0, 2, resolved)
        assert made[0][3] is given


def test_groups_take_their_options_from_the_environment_or_pg_options() -> None:
    """Variables count without pg_options, also for subgroups; pg_options must be a zcomm.Options."""

    def body() -> None:
        assert newly_counted(gather_list) == {"all_gather: compressed": 1}
        assert dist.new_group([0, 1])._get_backend(torch.device("cpu")).options.forms == ("list",)
        other = dist.new_group([0, 1], pg_options=zcomm.Options(forms=[]))
        assert other._get_backend(torch.device("cpu")).options.forms == ()
        for wrong in ({"forms": "list"}, dist.ProcessGroupGloo._Options()):
            expect(TypeError, "pg_options", lambda wrong=wrong: dist.new_group([0, 1], pg_options=wrong))

    run(body, env={"ZCOMM_FORMS": "list"})
