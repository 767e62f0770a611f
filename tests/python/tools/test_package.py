"""Public names of ``import zcomm``, and no others."""

from __future__ import annotations

import builtins
import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import zcomm
from zcomm import _core


def test_public_names_are_there_and_listed() -> None:
    pytest.importorskip("torch")
    assert dir(zcomm) == sorted(zcomm.__all__)
    assert len(zcomm.__all__) == 19
    assert all(getattr(zcomm, name) is not None for name in dir(zcomm))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        zcomm.nonsense  # noqa: B018


def test_no_text_installs_the_other_project_of_this_name() -> None:
    """That is PyPI's zcomm. This one is zcomm-collectives."""
    root = Path(__file__).parents[3]
    texts = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("zcomm/**/*.py"), *root.glob("examples/*.py")]
    assert len(texts) > 80
    warning = "`pip install zcomm` installs"
    assert warning in (root / "docs" / "install.md").read_text()
    for file in texts:
        found = re.findall(r"pip install (?:-\S+ )*['\"]?zcomm(?![-\w]).*", file.read_text().replace(warning, ""))
        assert not found, (file, found)


@pytest.mark.parametrize("name", ["codec.wire_bytes", "testing.LocalWorld", "errors.TransportError"])
def test_modules_are_there_after_import_zcomm(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import zcomm; zcomm.{name}"], check=True)


def test_formats_are_listed_with_their_bits() -> None:
    found = zcomm.formats()
    assert {"exact", "bf16", "int8:256", "int4:256", "fp8:256"} <= found.keys()
    assert (found["exact"], found["int8:256"]) == (32, 8 + 16 / 256)  # a scale of 16 bits for each block
    assert zcomm.formats("bfloat16")["exact"] == 16


def test_errors_can_be_named() -> None:
    for error in (zcomm.errors.ArgumentError, zcomm.errors.TransportError, zcomm.errors.TimeoutError):
        assert issubclass(error, zcomm.errors.Error)
    assert {zcomm.errors.TransportError, builtins.TimeoutError} <= set(zcomm.errors.TimeoutError.__mro__)
    assert issubclass(zcomm.errors.ArgumentError, ValueError)
    with pytest.raises(zcomm.errors.ArgumentError, match="int5"):
        zcomm.codec.wire_bytes("int5:32", "float32", 32)


def test_a_late_rank_is_a_timeout_of_python() -> None:
    world = zcomm.testing.LocalWorld("1x2", timeout=0.1)
    with pytest.raises(builtins.TimeoutError) as caught:
        world.ranks[0].all_gather(np.zeros(1024, np.float32), np.zeros(2048, np.float32))
    assert isinstance(caught.value, zcomm.errors.TimeoutError)


def test_libraries_share_one_cpp_library_with_torch() -> None:
    """This also holds if the compiler links its own library into each: CXX="g++ -static-libstdc++"."""
    folder = Path(_core.__file__).parent
    libraries = [*folder.glob("_c*.so"), *folder.glob("libzcomm_*.so")]
    assert len(libraries) >= 3, libraries
    for library in libraries:
        assert b"\0libstdc++.so.6\0" in library.read_bytes(), library


def test_type_checkers_are_told() -> None:
    assert (importlib.resources.files("zcomm") / "py.typed").is_file()
