"""Modules for tests of the public classes."""

from __future__ import annotations

import threading

from torch import nn


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class Stateful(nn.Module):
    """Calls `run` with itself and its rows. It has `buffers`, and all others as attributes."""

    def __init__(self, run, buffers=None, **others):
        super().__init__()
        self.run = run
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.run(self, x)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def lane_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]
