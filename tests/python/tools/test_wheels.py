"""What decides which wheels are built, and what a release is checked for, without building one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools" / "wheels")


def interpreter(folder: Path, prologue: str) -> None:
    """This Python, under its version's name, after it has run the prologue."""
    name = folder / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    name.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{prologue}\n$2"\n')
    name.chmod(0o755)


@pytest.mark.parametrize("has_gil", [True, False])
def test_wheels_are_built_only_with_the_gil(has_gil: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import build_wheels

    disabled = 0 if has_gil else 1
    interpreter(tmp_path, f"import os, sysconfig; os.stat = print; sysconfig.get_config_var = lambda name: {disabled}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert (build_wheels.find_python(f"{sys.version_info[0]}.{sys.version_info[1]}") is not None) == has_gil


def test_a_torch_serves_the_pythons_that_its_metadata_lists(tmp_path: Path) -> None:
    import build_wheels

    metadata = tmp_path / "torch-2.15.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Requires-Python: >=3.1\nClassifier: Programming Language :: Python :: 3.14\n")
    assert build_wheels.serves(tmp_path / "torch", "3.14")
    assert not build_wheels.serves(tmp_path / "torch", "3.1")
    assert not build_wheels.serves(tmp_path / "torch", "3.15")


def test_a_tag_names_the_version() -> None:
    import release_check

    release_check.check_tag(f"v{release_check.version()}")
    with pytest.raises(SystemExit, match=r"expected the tag v.*, got v9\.9\.9"):
        release_check.check_tag("v9.9.9")


def test_links_to_files_are_relative() -> None:
    import release_check

    text = "[a](docs/a.md) ![b](b.png) [c](https://c.org) [d](#d) [e](mailto:e@e.org) [f](f.md#g)"
    assert release_check.relative_links(text) == ["docs/a.md", "b.png", "f.md#g"]


def test_texts_list_the_pythons_of_wheels() -> None:
    import build_wheels

    for python in build_wheels.PYTHONS:
        assert f'"Programming Language :: Python :: {python}",' in (ROOT / "pyproject.toml").read_text()
        assert f'"{python}"' in (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    span = f"Python {build_wheels.PYTHONS[0]} to {build_wheels.PYTHONS[-1]}"
    for page in ("README.md", "docs/install.md", "CHANGELOG.md"):
        assert span in (ROOT / page).read_text()
