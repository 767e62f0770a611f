"""The examples of docstrings that need no ranks do what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import numpy
import pytest

from zcomm import _formats, codec


@pytest.mark.parametrize(("module", "least"), [(codec, 15), (_formats, 1)], ids=["codec", "formats"])
def test_examples_have_the_results_that_they_show(module: ModuleType, least: int) -> None:
    failed, attempted = doctest.testmod(module, extraglobs={"numpy": numpy})
    assert failed == 0 and attempted >= least
