"""Training steps take turns. tests/devices has which lanes do, and tests/api what a seed then reproduces."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.lanes import here

X = torch.zeros(17, 3)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


RAN = []
"""The lane and the thread of each recorded call."""


class Recording(nn.Linear):
    def forward(self, x, options=None):
        RAN.append((here.lane.index if here.lane is not None else None, threading.get_ident()))
        return super().forward(x)


def ran_in_turns(lanes):
    """True if the caller ran every lane, in lane order, since the last look."""
    ran = [*RAN]
    RAN.clear()
    return ran == [(lane, threading.get_ident()) for lane in range(lanes)]


@pytest.mark.parametrize("lanes", [2, 4])
def test_training_steps_take_turns(lanes):
    """At every call, with a frozen model and an input that requires gradients, and once a parameter is unfrozen."""
    RAN.clear()
    model = Recording(3, 3)
    with parallel(model, ["cpu"] * lanes, out_dims=0):
        for _ in range(2):
            model(X)
            assert ran_in_turns(lanes)
        model.requires_grad_(False)
        model(X.clone().requires_grad_())
        assert ran_in_turns(lanes)
        model.bias.requires_grad_(True)
        model(X)
        assert ran_in_turns(lanes)
        with deterministic(), torch.inference_mode():
            model(X)
        assert ran_in_turns(lanes)
        with torch.no_grad():
            model(X, {"generator": torch.Generator()})
        assert ran_in_turns(lanes)
