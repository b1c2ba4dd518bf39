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
NARROW, WIDE = 390, 1280


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


def test_pages_fit_and_have_no_error(chromium, site, address):
    """No page is wider than a wide or a narrow window, writes an error to the console, or needs
    another server.
    """
    window = chromium.new_page()
    opened = Window(window)
    wide = []
    for name in ids_of(site):
        window.goto(address + name)
        for width in (WIDE, NARROW):
            window.set_viewport_size({"width": width, "height": 800})
            if not opened.run("document.documentElement.scrollWidth <= innerWidth"):
                wide.append(name)
    window.close()
    assert (opened.messages, wide) == ([], [])
    assert all(url.startswith((address, "data:")) for url in opened.requests)


def test_search_finds(chromium, address):
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
