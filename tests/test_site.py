"""The built site, in a real browser: `make docs` builds it, and runs this."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import browser as browsers

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
SOURCES = [*(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml"]


def is_new() -> bool:
    """Return whether the site was built after the last change of its sources."""
    built = SITE / "index.html"
    newest = max(path.stat().st_mtime for path in SOURCES)
    return built.exists() and built.stat().st_mtime >= newest


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_new(), reason="needs the site, built of these pages: make docs"),
]
needs_browser = pytest.mark.skipif(browsers.PROGRAM is None, reason="needs Chromium")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the site: its search asks for files, which a page from a disk may not."""
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[browsers.Browser]:
    with browsers.browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


def pages() -> list[str]:
    """Return where the pages of the site are."""
    found = SITE.rglob("index.html")
    return sorted(str(page.parent.relative_to(SITE)) for page in found)


# What reaches beyond the window, and is not inside of something that scrolls by itself.
BEYOND = """(() => {
  const width = document.documentElement.clientWidth;
  const held = (e) => {
    for (let p = e.parentElement; p; p = p.parentElement)
      if (getComputedStyle(p).overflowX !== "visible" && p.clientWidth <= width) return true;
    return false;
  };
  const found = [...document.querySelectorAll(".md-content *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && box.right > width + 1 && !held(e);
  });
  return JSON.stringify([
    document.documentElement.scrollWidth - width,
    found.slice(0, 3).map((e) => `${e.tagName}: ${e.textContent.trim().slice(0, 60)}`),
  ]);
})()"""


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_scrolls_sideways(browser, address, width):
    browser.size(width)
    wrong = {}
    for page in pages():
        browser.visit(f"{address}/{page}/")
        beyond, what = json.loads(browser.run(BEYOND))
        if beyond > 0 or what:
            wrong[page] = (beyond, what)
    assert len(pages()) > 30
    assert wrong == {}


# The search of the site is in a tree of its own.
SEARCH = "[...document.querySelectorAll('div')].map((e) => e.shadowRoot).find(Boolean)"


@needs_browser
def test_a_search_finds_the_right_page_first(browser, address):
    browser.size(1280)
    browser.visit(f"{address}/reference/glossary/")
    browser.until(lambda: browser.run("!!document.querySelector('.md-search__button')"))
    browser.run("document.querySelector('.md-search__button').click()")
    browser.until(lambda: browser.run(f"!!{SEARCH}?.querySelector('input')"))
    browser.run(f"{SEARCH}.querySelector('input').focus()")
    browser.call("Input.insertText", text="noise scale")
    first = f"{SEARCH}.querySelector('a')?.getAttribute('href')"
    browser.until(lambda: browser.run(first))
    assert "/howto/noise/" in browser.run(first)


def test_examples_of_the_reference_are_code():
    page = (SITE / "reference" / "api" / "index.html").read_text()
    assert "<blockquote>" not in page
    assert page.count('<span class="gp">&gt;&gt;&gt; </span>') > 20
