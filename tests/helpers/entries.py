"""Record how often a call enters functions of the package."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import parawrap
from parawrap.engine.model_state import read_settled_count
from tests.helpers.waiting import eventually

_ROOT = f"{Path(parawrap.__file__).parent}/"


class Entries:
    """Records the (file, function) of each entry into the package, as a profile function of
    threads.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            self.found.append((code.co_filename.removeprefix(_ROOT), code.co_qualname))

    def of(self, work: Callable[[], object]) -> tuple[list[tuple[str, str]], str]:
        """Return the entries of the last of 21 runs of `work`, until the lanes are idle again, and
        a list of counts.
        """
        for _ in range(20):
            work()
        # For a while after a hook was registered anywhere, calls look for more
        eventually(lambda: read_settled_count() >= 0, "a count of hooks that stays")
        work()
        self.wait_until_idle()
        self.found.clear()
        work()
        self.wait_until_idle()
        return [*self.found], "\n".join(
            f"{count} {name}" for name, count in Counter(self.found).most_common()
        )

    def wait_until_idle(self) -> None:
        count = None
        while count != len(self.found):
            count = len(self.found)
            threading.Event().wait(0.1)


@contextlib.contextmanager
def recorded_entries() -> Iterator[Entries]:
    """Record the entries of this thread, and of all threads of Python that start in the block."""
    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(recorder := Entries())
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
