"""Models that workers import with this file, which does not import pytest: each new worker would
take 0.2 s of a processor for that.
"""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import nn

from tests.helpers.waiting import eventually


class Dying(nn.Module):
    """Doubles its input. Exits for -1, and kills its process for -9."""

    def forward(self, x):
        if x[0] == -1:
            os._exit(7)
        if x[0] == -9:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2


class Where(nn.Module):
    """Returns its input, and the id of its process."""

    def forward(self, x):
        return x, os.getpid()


class Gated(nn.Module):
    """Scales its input, for odd numbers once the folder has a file ``go``.

    Returns the process id too.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        if int(x[0]) % 2:
            (self.folder / str(int(x[0]))).touch()
            eventually((self.folder / "go").exists, "go")
        return x * self.weight, os.getpid()


class Keeping(nn.Module):
    """Returns the sum of all inputs so far, which it keeps."""

    kept: list[torch.Tensor] = []  # noqa: RUF012

    def forward(self, x):
        self.kept.append(x)
        return torch.stack([each.sum() for each in self.kept]).sum()[None]


class Sleeping(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x
