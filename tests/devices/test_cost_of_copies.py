"""Copies of a model on other devices cost little Python and few additions. Counts, not times."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from parawrap import parallel
from tests.helpers.device_models import SIMS
from tests.helpers.entries import recorded_entries

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


class Small(nn.Module):
    """Many small parameters.

    The threads of backward passes start outside Python: a hook has them record.
    """

    profile = staticmethod(lambda: None)  # of the class: a replica has its own attributes

    def __init__(self, count, home):
        super().__init__()
        self.held = nn.ParameterList(
            [nn.Parameter(torch.ones(4, device=home)) for _ in range(count)]
        )

    def forward(self, x):
        for parameter in self.held:
            x = x * parameter
        if x.requires_grad:
            x.register_hook(lambda gradient: sys.setprofile(self.profile()))
        return x


@HOMES
@torch.no_grad()
def test_entries_of_a_warm_call(home):
    """A call without gradients enters as few functions with 150 parameters as with 4: at most 500
    on 4 devices.
    """
    counts = []
    with recorded_entries() as entries:
        for count in (4, 150):
            model, x = Small(count, home), torch.ones(16, 4, device=home)
            with parallel(model, SIMS, out_dims=0):
                found, shown = entries.of(lambda model=model, x=x: model(x))
            counts.append(len(found))
    assert 0 < counts[1] <= 500, shown
    assert counts[1] <= counts[0] + 20, shown


@HOMES
def test_entries_of_a_training_step(home, monkeypatch):
    """A step with 80 parameters more enters at most one function more per parameter and other
    device.
    """
    counts = []
    with recorded_entries() as entries:
        for count in (20, 100):
            model, x = Small(count, home), torch.ones(16, 4, device=home)
            with parallel(model, SIMS, out_dims=0):
                with monkeypatch.context() as patch:
                    patch.setattr(Small, "profile", staticmethod(lambda: entries))
                    found, shown = entries.of(lambda model=model, x=x: model(x).sum().backward())
                model(x).sum().backward()  # these threads outlive the test
            counts.append(len(found))
            assert ("engine/parameter_copies.py", "_Broadcast.backward") in found
    others = len(SIMS) - (home == "sim:0")
    assert counts[1] - counts[0] <= 80 * others, shown


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[operator.overloadpacket] += 1
        return operator(*args, **(kwargs or {}))


def additions(model, x):
    """Return how often torch adds tensors in the backward pass of a call on four devices."""
    with parallel(model, SIMS, out_dims=0):
        output = model(x).sum()
        with Operators() as operators:
            output.backward()
    return operators.counts[torch.ops.aten.add]


@pytest.mark.parametrize("count", [10, 60])
def test_gradients_are_added_once(count):
    """Gradients are added once per further device and dtype, and those of lanes at home once per
    parameter.

    One more addition per device is that of the marks which say what the parameters with a gradient
    are.
    """
    x = torch.ones(16, 4)
    assert additions(Small(count, "cpu"), x) == 3 * 2
    mixed = Small(count, "cpu")
    for parameter in mixed.held[: count // 2]:
        parameter.data = parameter.data.double()
    assert additions(mixed, x) == 3 * 3
    assert additions(Small(count, "sim:0"), x.to("sim:0")) == 2 * 2 + count
