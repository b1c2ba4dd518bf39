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


def lane_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]
