"""A gate that blocks calls in any process of this machine until a test opens it."""

from __future__ import annotations

import os


class Gate:
    """Two named pipes. Leaving the ``with`` block opens the gate for all; `close` frees the pipes.

    Pass `paths` to the function that calls `wait_at`.
    """

    def __init__(self, folder):
        self.paths = folder / "started", folder / "opened"
        self._files = []

    def __enter__(self):
        for path in self.paths:
            os.mkfifo(path)
            self._files.append(os.open(path, os.O_RDWR))
        return self

    def __exit__(self, *error):
        self.open(100)

    def close(self):
        for file in self._files:
            os.close(file)

    def wait_for(self, calls):
        while calls > 0:
            calls -= len(os.read(self._files[0], calls))

    def open(self, calls):
        os.write(self._files[1], b"x" * calls)


def wait_at(paths):
    """Tell the gate that a call has started, and wait until the gate is open."""
    started, opened = paths
    with started.open("wb", buffering=0) as file:
        file.write(b"x")
    with opened.open("rb", buffering=0) as file:
        file.read(1)
