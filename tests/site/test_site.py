"""The documentation site: every page in a real browser, the search, and the reference."""

from __future__ import annotations

import http.server
import importlib.util
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import parawrap
from parawrap import errors
from tests.helpers.browser import Window
from tests.helpers.tiers import require

ROOT = Path(__file__).parents[2]
NARROW, WIDE = 420, 1300
# Tables of many numbers, which cannot wrap, scroll in their own boxes
HAVE_WIDE_TABLES = ("results/", "versions.html")

IS_TOO_WIDE = """() => {
  const content = document.querySelector(".content");
  return document.documentElement.scrollWidth > innerWidth
      || (content && content.scrollWidth > content.clientWidth);
}"""

# The beginnings of tables, pictures, or lines of code that are cut off, or scroll in their boxes
CUT_OFF = """(kinds) => [...document.querySelectorAll(kinds)].filter(element => {
  const box = element.closest(".table-wrapper") || element.parentElement;
  const widths = [element.scrollWidth, element.getBoundingClientRect().width];
  return Math.max(...widths) > Math.min(element.clientWidth || Infinity, box.clientWidth) + 1;
}).map(element => element.innerText.slice(0, 40) || element.src)"""

SHOWS_CONTENTS = """() => {
  const contents = document.querySelector(".toc-tree").getBoundingClientRect();
  const text = document.querySelector("article").getBoundingClientRect();
  return contents.width > 100 && contents.left >= text.right && contents.right <= innerWidth;
}"""


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    require(
        "browser",
        None if importlib.util.find_spec("sphinx") else "it needs the packages of the extra docs",
    )
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--fresh-env"]
    built = subprocess.run(
        [*command, ROOT / "docs", folder], capture_output=True, text=True, check=False
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.fixture(scope="session")
def address(site):
    """The address of a server of the site on this machine."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def ids_of(site):
    """Return the ids of the elements of each page.

    Sphinx itself refuses links and anchors that lead nowhere.
    """
    pages = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]
    return {
        str(path.relative_to(site)): set(re.findall(r' id="([^"]+)"', path.read_text()))
        for path in pages
    }


@pytest.fixture
def opened(chromium, site, address):
    """A function that opens every page in a window of a width, and yields its name and the
    window.
    """
    windows = []

    def open_all(width):
        window = chromium.new_page(viewport={"width": width, "height": 800})
        windows.append(Window(window))
        for name in ids_of(site):
            window.goto(address + name)
            yield name, window

    yield open_all
    for each in windows:
        each.page.close()
    assert [message for each in windows for message in each.messages] == []
    requests = [url for each in windows for url in each.requests]
    assert all(url.startswith((address, "data:")) for url in requests)


def test_pages_fit_a_narrow_window(opened):
    """No page scrolls sideways, and tables and pictures fit. No page writes an error to the
    console, or needs another server.
    """
    wide, cut_off = [], {}
    for name, window in opened(NARROW):
        if window.evaluate(IS_TOO_WIDE):
            wide.append(name)
        kinds = "article img" if name.startswith(HAVE_WIDE_TABLES) else "article :is(table, img)"
        cut_off[name] = window.evaluate(CUT_OFF, kinds)
    assert wide == []
    assert {name: found for name, found in cut_off.items() if found} == {}


def test_pages_fit_a_wide_window(opened):
    """Tables, code, and pictures fit next to the sidebar and the contents of the page, which are
    visible. No page writes an error to the console, or needs another server.
    """
    wide, cut_off, hidden = [], {}, []
    for name, window in opened(WIDE):
        if window.evaluate(IS_TOO_WIDE):
            wide.append(name)
        cut_off[name] = window.evaluate(CUT_OFF, "article :is(table, pre, img)")
        has_contents = window.locator("article :is(h2, h3) .headerlink").count() >= 3
        if has_contents and not window.evaluate(SHOWS_CONTENTS):
            hidden.append(name)
    assert (wide, hidden) == ([], [])
    assert {name: found for name, found in cut_off.items() if found} == {}


def test_search_finds_the_pages(chromium, address):
    window = chromium.new_page(viewport={"width": WIDE, "height": 800})
    window.goto(f"{address}search.html?q=GatherError")
    window.wait_for_selector("#search-results li a")
    found = window.eval_on_selector_all(
        "#search-results li a", "links => links.map(link => link.getAttribute('href'))"
    )
    window.close()
    assert any("errors.html" in link for link in found)


def test_reference_has_every_name(site):
    entries = set().union(
        *(ids for name, ids in ids_of(site).items() if name.startswith("reference"))
    )
    shown = {entry.rpartition(".")[2] for entry in entries}
    modules = {"cpu", "functional", "neuron", "__version__"}
    assert {*parawrap.__all__} - modules <= shown
    for module in ("functional", "neuron", "cpu", "testing"):
        assert {*getattr(__import__(f"parawrap.{module}"), module).__all__} <= shown
    # An alias of a class would be one line, without its methods
    assert {"parawrap.Parallel.map", "parawrap.TupleParallel.close"} <= entries


def test_error_page_has_every_exception(site):
    anchors = ids_of(site)["errors.html"]
    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and name != "ParawrapError"
    ]
    names = [name for name in names if issubclass(getattr(errors, name), errors.ParawrapError)]
    assert len(names) > 10
    assert [name for name in names if name.lower() not in anchors] == []
