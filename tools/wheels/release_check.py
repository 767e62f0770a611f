"""Rehearses a release, but for what needs an account: `make release-check`.

It builds the sdist, the wheel of zcomm-bench and a wheel for this Python in build/release, tries the wheels, and checks
what PyPI would show. Other arguments go to build_wheels.py, such as `--torch 2.13.0`. With `--tag` it only compares
that with the version.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import build_wheels

# readme-renderer alone has no renderer for Markdown; older releases of twine do not know the metadata of our wheels.
TOOLS = ["twine>=6.1", "readme-renderer[md]"]


def version() -> str:
    return re.findall(r'^__version__ = "(.+)"', (build_wheels.ROOT / "zcomm/_version.py").read_text(), re.MULTILINE)[0]


def check_tag(tag: str) -> None:
    if tag != f"v{version()}":
        raise SystemExit(f"expected the tag v{version()}, which zcomm/_version.py has, got {tag}")


def relative_links(markdown: str) -> list[str]:
    """Links and pictures that lead to a file beside the text, and nowhere on PyPI."""
    return [link for link in re.findall(r"\]\(([^)\s]+)", markdown) if not re.match(r"[a-z]+:|#", link)]


def check_files(out: Path) -> None:
    """Ends the program unless PyPI would take the files, all of them of this version, and render the README."""
    files = sorted(out.iterdir())
    for file in files:
        if not re.match(rf"zcomm_\w+-{re.escape(version())}(-|\.tar)", file.name):
            raise SystemExit(f"expected files of version {version()}, got {file.name}")
    venv = build_wheels.WORK / "venv-twine"
    build_wheels.run(sys.executable, "-m", "venv", venv)
    build_wheels.run(venv / "bin/python", "-m", "pip", "install", "-q", *TOOLS)
    build_wheels.run(venv / "bin/python", "-m", "twine", "check", "--strict", *files)
    if links := relative_links((build_wheels.ROOT / "README.md").read_text()):
        print(f"warning: {len(links)} relative links: set [project.urls] when the repository has an address")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--tag", help="only compare this tag with the version, e.g. v0.1.0")
    arguments, others = parser.parse_known_args()
    if arguments.tag:
        return check_tag(arguments.tag)
    out = build_wheels.BUILD / "release"
    shutil.rmtree(out, ignore_errors=True)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    build_wheels.run(sys.executable, Path(build_wheels.__file__), "--python", python, *others, "--out", out)
    check_files(out)


if __name__ == "__main__":
    main()
