"""A headless Chromium, for tests of pages."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil

import pytest

from tests.helpers.tiers import require

CHROMIUM = shutil.which("chromium")


class Window:
    """A page in a browser, and the messages of its console."""

    def __init__(self, page):
        self.page = page
        self.messages = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        self.requests = []

    def run(self, script):
        return self.page.evaluate(script)

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)

    def text(self, element):
        """Return the visible text of an element, by its id."""
        return self.page.inner_text(f"#{element}")


@pytest.fixture(scope="session")
def chromium():
    has_driver = importlib.util.find_spec("playwright") is not None
    require(
        "browser",
        None
        if CHROMIUM and has_driver
        else "it needs Debian's chromium and the package playwright",
    )
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as driver,
        contextlib.closing(
            driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        ) as browser,
    ):
        yield browser


@pytest.fixture
def window(chromium):
    """A function that opens a file in a window.

    At the end, no window had an error or a request beyond its file.
    """
    opened = []

    def show(path, width=1280, height=800, **options):
        page = chromium.new_page(viewport={"width": width, "height": height}, **options)
        opened.append(Window(page))
        page.goto(path.as_uri())
        assert opened[-1].requests == [path.as_uri()]
        return opened[-1]

    yield show
    for each in opened:
        each.page.close()
    assert [message for each in opened for message in each.messages] == []
    assert all(url.startswith(("file:", "data:")) for each in opened for url in each.requests)
