"""The site that `make docs` has built, opened in a browser: `make test-docs` runs this."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin, urlparse

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="make test-docs installs what this needs")

SITE = Path(__file__).parents[2] / "build" / "site"
# Block elements of what the browser shows, but for code: there, Markdown that was not understood would be left.
PROSE = """() => [...document.querySelectorAll(".md-content p, .md-content li, .md-content td")]
    .map(element => { const copy = element.cloneNode(true);
                      copy.querySelectorAll("code, pre").forEach(code => code.remove());
                      return copy.textContent; })"""

MARKS = ("](", "**", "\n* ", "\n| ", ":class:", ":func:")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert path, "expected chromium in PATH"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    page.asked, page.errors = [], []  # type: ignore[attr-defined]
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    page.close()


def links_of(page: Any) -> set[str]:
    found = page.eval_on_selector_all("a[href]", "all => all.map(a => a.getAttribute('href'))")
    return {urljoin(page.url, href) for href in found if not href.startswith(("mailto:", "data:"))}


def test_every_page_loads_and_no_link_is_dead(page: Any, address: str) -> None:
    waiting, anchors, wanted = [f"{address}index.html"], dict[str, set[str]](), dict[str, set[str]]()
    seen = set(waiting)
    while waiting:
        url = waiting.pop()
        answer = page.goto(url, wait_until="load")
        assert answer is not None and answer.ok, (url, wanted.get(url))
        if not url.endswith(".html"):
            continue
        assert page.locator("h1").count() >= 1, url
        anchors[url] = set(page.eval_on_selector_all("[id]", "all => all.map(e => e.id)"))
        if "/source/" not in url:
            left = [text for text in page.evaluate(PROSE) if any(mark in text for mark in MARKS)]
            assert not left, f"Markdown that was not understood in {url}: {left[0]}"
        for link in links_of(page):
            bare = urldefrag(link)[0]
            if not link.startswith(address):
                continue
            bare = f"{bare}index.html" if bare.endswith("/") else bare
            wanted.setdefault(bare + "#" + urldefrag(link)[1], set()).add(url)
            if bare not in seen:
                seen.add(bare)
                waiting.append(bare)
    pages = {path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")} - {"404.html"}
    assert {url.removeprefix(address) for url in anchors} == pages, "every page can be reached"
    for link, pages_with_it in wanted.items():
        bare, anchor = urldefrag(link)
        assert not anchor or bare not in anchors or anchor in anchors[bare], (link, pages_with_it)
    others = {urlparse(url).netloc for url in page.asked} - {urlparse(address).netloc, ""}
    assert not others, f"pages ask other hosts: {others}"
    assert not page.errors, page.errors


@pytest.mark.parametrize("words", ["reduce_scatter", "keep_in_node", "stochastic"])
def test_the_search_finds(page: Any, address: str, words: str) -> None:
    page.goto(f"{address}index.html")
    page.locator("input.md-search__input").click()
    page.keyboard.type(words)  # key by key, as the search listens to keys
    results = page.locator(".md-search-result__link")
    results.first.wait_for(timeout=20_000)
    page.goto(urljoin(page.url, results.first.get_attribute("href")))
    assert words in page.locator(".md-content").inner_text()
    assert not page.errors, page.errors
