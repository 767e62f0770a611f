"""The meeting point: which sites are present, refused, or left out."""

from __future__ import annotations

import json
import logging
import time

import pytest
import torch.distributed as dist

from zcomm._meeting import MeetingPoint, Registration, register

PATIENCE = 0.3


class Table:
    """A meeting point, and sites that only write."""

    def __init__(self, least: int = 1, patience: float = PATIENCE) -> None:
        self.point = MeetingPoint(0, least, patience)
        self.store = dist.TCPStore("localhost", self.point.port, is_master=False)  # type: ignore[attr-defined]
        self.beats = 0

    def come(self, handle: str, terms: str = "terms", joined: int = 0, timeout: float = 60.0, name: str = "") -> int:
        return register(self.store, Registration(handle, terms, joined, timeout, name))

    def beat(self, *numbers: int) -> None:
        self.beats += 1
        for number in numbers:
            self.store.set(f"beat {number}", str(self.beats))

    def told(self) -> tuple[int, list[str]]:
        self.point.poll()
        present = json.loads(self.store.get("present")) if self.has("present") else {"number": 0, "handles": []}
        return present["number"], present["handles"]

    def handles(self) -> list[str]:
        return self.told()[1]

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))


def test_the_training_begins_with_the_least_number() -> None:
    table = Table(least=2)
    table.come("one")
    assert table.handles() == []
    table.come("two")
    assert table.handles() == ["one", "two"]


def test_a_silent_site_is_lost_and_may_register_again() -> None:
    table = Table()
    one, two = table.come("one"), table.come("two")
    table.handles()
    time.sleep(PATIENCE)
    table.beat(two)
    assert table.handles() == ["two"] and table.has(f"lost {one}") and not table.has(f"lost {two}")
    again = table.come("one")
    assert table.handles() == ["two", "one"]
    table.store.set(f"left {two}", "")
    assert table.handles() == ["one"] and not table.has(f"lost {again}")


def test_names_order_the_sites_and_one_that_returns_has_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zcomm")
    table = Table()
    for handle, name in [("three", "c"), ("first", ""), ("two", "b"), ("one", "a"), ("second", ""), ("also two", "b")]:
        table.come(handle, name=name)
    first, handles = table.told()
    assert handles == ["first", "second", "one", "two", "also two", "three"]
    assert "6 sites are present: first, second, a one, b two, b also two, c three" in caplog.messages
    assert table.told() == (first, handles)
    time.sleep(PATIENCE)
    table.beat(1, 2, 3, 5, 6)
    assert table.handles() == ["first", "second", "two", "also two", "three"]
    assert "lost a one: it was silent" in caplog.messages
    table.come("one again", name="a")
    assert table.handles() == ["first", "second", "one again", "two", "also two", "three"]


def test_names_do_not_decide_whose_terms_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zcomm")
    table = Table()
    table.come("member", name="z")
    table.handles()
    other = table.come("other", "others", name="a")
    assert table.handles() == ["member"] and table.has(f"refused {other}")
    assert any(message.startswith("refused a other: ") for message in caplog.messages)


def test_the_same_sites_are_told_again_after_all_were_silent() -> None:
    table = Table()
    one = table.come("one")
    first, _ = table.told()
    time.sleep(PATIENCE)
    assert table.told() == (first, ["one"]) and table.has(f"lost {one}")
    table.come("one", joined=first)
    assert table.told() == (first, ["one"])  # it waits for others that were silent, too
    time.sleep(PATIENCE)
    table.beat(2)
    second, handles = table.told()
    assert second > first and handles == ["one"]


def test_a_registration_of_another_release_is_refused() -> None:
    table = Table()
    table.store.set("site 1", json.dumps({"handle": "one"}))
    table.store.add("sites", 1)
    table.come("two")
    assert table.handles() == ["two"] and table.has("refused 1")


def test_members_that_are_busy_are_not_left_out_because_new_ones_wait() -> None:
    table = Table(patience=0.2)
    one = table.come("one", timeout=0.1)
    table.beat(one)
    table.told()
    two = table.come("two", timeout=0.1)
    second, _ = table.told()
    table.store.set(f"ready {second} {two}", "")
    for _ in range(5):
        table.beat(one, two)
        assert table.handles() == ["one", "two"]
        time.sleep(0.1)
    time.sleep(1.0)
    table.beat(one, two)
    assert table.handles() == ["two"]


def test_other_terms_are_refused_and_those_of_members_are_those_of_all() -> None:
    table = Table()
    table.come("one")
    other = table.come("other", "others")
    assert table.handles() == ["one"] and table.has(f"refused {other}")
    new = Table()  # a meeting point that was started again
    stranger = new.come("stranger", "others")
    new.come("one", joined=5)
    assert new.handles() == []  # it waits for the other members
    new.come("two", joined=5)
    time.sleep(PATIENCE)
    new.beat(stranger, 2, 3)
    number, handles = new.told()
    assert handles == ["one", "two"] and new.has(f"refused {stranger}") and number > 5


def test_members_of_an_earlier_point_need_not_be_the_least_number() -> None:
    table = Table(least=3)
    number = table.come("one", joined=2**62)  # of a clock that was ahead
    table.handles()
    time.sleep(PATIENCE)
    table.beat(number)
    assert table.told() == (2**62 + 1, ["one"])


def test_all_meet_anew_once_each_is_ready() -> None:
    table = Table(patience=30)
    numbers = [table.come("one"), table.come("two")]
    table.beat(*numbers)
    first, handles = table.told()
    table.store.set(f"ready {first} {numbers[0]}", "")
    table.beat(*numbers)
    assert table.told() == (first, handles) and table.has(f"again {first}")
    table.store.set(f"ready {first} {numbers[1]}", "")
    table.beat(*numbers)
    second, handles = table.told()
    assert second > first and handles == ["one", "two"]
    table.beat(*numbers)
    assert table.told() == (second, handles)


def test_a_site_that_beats_and_does_not_come_is_left_out() -> None:
    table = Table(patience=0.5)
    one, stuck = table.come("one", timeout=0.2), table.come("stuck", timeout=0.1)
    table.beat(one, stuck)
    first, _ = table.told()
    table.store.set(f"ready {first} {one}", "")
    for _ in range(3):
        table.beat(one, stuck)
        assert table.handles() == ["one", "stuck"]
        time.sleep(0.1)
    time.sleep(0.45)
    table.beat(one, stuck)
    assert table.handles() == ["one"] and table.has(f"lost {stuck}")


def test_a_site_that_was_killed_while_it_registered_holds_up_nobody() -> None:
    table = Table()
    table.store.add("sites", 1)
    table.come("two")
    assert table.handles() == []
    time.sleep(PATIENCE)
    table.beat(2)
    assert table.handles() == ["two"]


def test_a_port_that_is_in_use_is_an_error() -> None:
    point = MeetingPoint(0)
    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        MeetingPoint(point.port)
