"""What the site has beside docs: the README and its like, the C++ headers, and the source files that pages link to.

A hook of MkDocs. Pages are written for a reader of the repository, so their links are relative to where the file lies.
Here each becomes a link within the site, or fails the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
# Page of the site -> file of the repository, for the pages that lie outside of docs.
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
_PAGE_OF = {file: page for page, file in ELSEWHERE.items()}
_LANGUAGES = {".py": "python", ".cpp": "cpp", ".hpp": "cpp", ".toml": "toml", ".yml": "yaml", ".sh": "bash"}
# A link or a picture: its text, its target, its anchor.
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")
# A picture that bench.pictures draws into build/pictures, for light and dark colors: its name, and what it shows.
_PICTURE = re.compile(r"<!-- picture: (\w+): (.*?) -->")
PICTURES = ROOT / "build" / "pictures"
_FENCE = re.compile(r"(^ *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def _target(target: str, folder: Path) -> tuple[str, str]:
    """The file of the repository that a link in ``folder`` means, and the page of the site that shows it."""
    path = Path(os.path.normpath(folder / target))
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"expected a file of the repository, got {target!r} in {folder}")
    name = path.as_posix()
    if (ROOT / path).is_dir():
        name += "/README.md"
    if name.startswith("docs/"):
        return name, name.removeprefix("docs/")
    if name in _PAGE_OF:
        return name, _PAGE_OF[name]
    if Path(name).suffix in (".png", ".svg"):
        return name, f"files/{name}"
    return name, f"source/{name}.md"


def _is_local(target: str) -> bool:
    return bool(target) and not re.match(r"[a-z]+:", target)


def _sources() -> list[str]:
    """The files outside of docs that a page links to."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / file for file in ELSEWHERE.values())]
    found = set()
    for page in pages:
        for match in _LINK.finditer(page.read_text()):
            if _is_local(match[2]):
                file, shown = _target(match[2], page.parent.relative_to(ROOT))
                if shown.startswith(("source/", "files/")):
                    found.add(file)
    return sorted(found)


def _source_page(name: str) -> str:
    text = (ROOT / name).read_text()
    language = _LANGUAGES.get(Path(name).suffix, "cmake" if name.endswith("CMakeLists.txt") else "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{language}\n{text}````\n"


def _header(path: Path) -> str:
    """A header as a section: what its first comment says, then its declarations."""
    lines = path.read_text().splitlines()
    comment = []
    while lines and lines[0].startswith("//"):
        comment.append(lines.pop(0).removeprefix("//").strip())
    code = "\n".join(line for line in lines if line != "#pragma once").strip()
    return f"## zcomm/{path.name}\n\n{' '.join(comment)}\n\n```cpp\n{code}\n```\n"


def _cpp_page() -> str:
    headers = sorted((ROOT / "include/zcomm").glob("*.hpp"))
    intro = (
        "The headers of `find_package(zcomm)`. [Without torch](../communicator.md#from-c) has a program. Comments say "
        "what throws, on which stream work is queued, and how long memory is borrowed. What follows a line with "
        "`Internal` is for other parts of zcomm.\n"
    )
    return "\n".join(["# C++ API\n", intro, *(_header(header) for header in headers)])


def on_files(files: Any, config: Any) -> Any:
    for page, file in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    files.append(File.generated(config, "api/cpp.md", content=_cpp_page()))
    for name in _sources():
        if Path(name).suffix in (".png", ".svg"):
            files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
        else:
            files.append(File.generated(config, f"source/{name}.md", content=_source_page(name)))
    files.append(File.generated(config, "files/site.css", abs_src_path=str(ROOT / "tools/site/site.css")))
    for picture in sorted(PICTURES.glob("*.png")):
        files.append(File.generated(config, f"files/pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name.startswith(("source/", "api/")):
        return markdown
    folder = Path(ELSEWHERE[name]).parent if name in ELSEWHERE else Path("docs", name).parent

    def rewrite(match: re.Match[str]) -> str:
        if not _is_local(match[2]):
            return match[0]
        shown = _target(match[2], folder)[1]
        relative = os.path.relpath(shown, Path(name).parent)
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    pictures = os.path.relpath("files/pictures", Path(name).parent)
    drawn = rf"![\2]({pictures}/\1.png#only-light)![\2]({pictures}/\1-dark.png#only-dark)"
    parts = _FENCE.split(markdown)
    for number in range(0, len(parts), 2):  # those between are code
        parts[number] = _PICTURE.sub(drawn, _LINK.sub(rewrite, parts[number]))
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things as Sphinx does, :class:`zcomm.Stats`: here the role would be left as text."""
    return re.sub(r":(?:class|func|meth|attr|mod|data|exc):(?=<code)", "", html)
