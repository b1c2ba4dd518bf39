"""Turns: which lanes of a call run one after another. Tests of tests/api show what a seed then reproduces."""

from __future__ import annotations

import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.lanes import Turns, here

CPU, FIRST, SECOND = map(torch.device, ("cpu", "cuda:0", "cuda:1"))
X = torch.zeros(17, 3)
LEARNING = torch.zeros(4, requires_grad=True)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def decided(devices, *leaves, generators=(), learns=True, mode=nullcontext, **options):
    with mode():
        return Turns(devices, **options).decide(leaves, generators, learns=learns, target=None)


@pytest.mark.parametrize(
    ("devices", "with_gradients"),
    [
        ((CPU, CPU), "device"),
        ((FIRST, FIRST), "device"),
        ((FIRST, FIRST, SECOND), "device"),
        ((FIRST, SECOND), None),
        ((CPU, FIRST), None),
    ],
)
def test_turns_depend_on_gradients(devices, with_gradients):
    """Lanes of one device take turns if the model learns in grad mode, or an argument does in any mode.

    A reentrant checkpoint runs forward without gradients, and again with them.
    """
    x, generator = torch.zeros(4), torch.Generator()
    assert decided(devices, x) == with_gradients
    assert decided(devices, x, LEARNING, learns=False) == with_gradients
    assert decided(devices, x, LEARNING, learns=False, mode=torch.no_grad) == with_gradients
    assert decided(devices, x, learns=False) is None
    assert decided(devices, x, mode=torch.no_grad) is None
    assert decided(devices, x, mode=torch.inference_mode) is None
    for mode in (torch.no_grad, torch.enable_grad):  # shared by all lanes, also by those on devices of their own
        assert decided(devices, x, generator, learns=False, mode=mode) == "all"
        assert decided(devices, x, generators=(generator,), learns=False, mode=mode) == "all"
    assert decided(devices, x, learns=False, mode=deterministic) == "all"


def test_processes_have_their_own_generators():
    """Lanes that are processes run at the same time, except under deterministic algorithms."""
    assert decided((CPU, CPU), X, share_generators=False) is None
    assert decided((CPU, CPU), X, share_generators=False, mode=deterministic) == "all"
    assert Turns((CPU, CPU), share_generators=False).read_generators() == []
    assert Turns((CPU,)).read_generators() == []
    assert len(Turns((CPU, CPU)).read_generators()) == 1


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
    """At every call, with a frozen model whose input requires gradients, and once a parameter is unfrozen."""
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
