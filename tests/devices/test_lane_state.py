"""Writes of forward in lanes on several devices: statistics, other buffers, parameters, and odd
places.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from parawrap import ReplicaError, parallel
from tests.fuzz.cases import Case, Outcome, run
from tests.helpers.calling import Stateful
from tests.helpers.device_models import SIMS, rows

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


@pytest.mark.parametrize("devices", [SIMS, ["sim:1", "sim:1"]], ids=str)
@HOMES
def test_batch_norm_statistics(home, devices):
    """Each lane normalizes its own rows, the model keeps lane 0's statistics, and eval mode uses
    them in all lanes.
    """
    plain = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    model = copy.deepcopy(plain).to(home)
    with parallel(model, devices) as p:
        for count in (13, 13, 11):
            x = rows(count) * 3 + 1
            output = model.train()(x)
            parts = x.split(p.stats().shards)
            expected = torch.cat([copy.deepcopy(plain).train()(part) for part in parts])
            torch.testing.assert_close(output.cpu(), expected)
            plain.train()(parts[0])
            ours = {name: value.cpu() for name, value in model.state_dict().items()}
            torch.testing.assert_close(ours, dict(plain.state_dict()))
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(x).cpu(), plain.eval()(x))


@HOMES
@pytest.mark.parametrize(
    "write", [lambda calls: calls.data.add_(1), lambda calls: setattr(calls, "data", calls + 1)]
)
def test_writes_of_parameters(write, home):
    """Writes of parameters are refused, also in lanes that would write their own copy."""

    def forward(self, x):
        write(self.calls)
        return x

    model = Stateful(forward, calls=nn.Parameter(torch.zeros(()), requires_grad=False)).to(home)
    with parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(
                ReplicaError, match="the parameter 'calls' was written during a call"
            ):
                model(rows())


@HOMES
def test_later_writes_of_parameters(home):
    """A write that torch counts is refused at any call."""
    calls = nn.Parameter(torch.zeros(()), requires_grad=False)
    model = Stateful(
        lambda self, x: x + self.calls.add_(1) if self.writes else x, calls=calls, writes=False
    ).to(home)
    with parallel(model, SIMS):
        model(rows())
        model.writes = True
        with pytest.raises(ReplicaError, match="the parameter 'calls' was written during a call"):
            model(rows())


PLAIN = ("plain",)
SPECS = {
    "hook of the module": ("reads_hook", PLAIN),
    "lists": ("in_list", PLAIN, ("in_tuple", PLAIN), ("in_dicts", PLAIN), ("in_deque", PLAIN)),
    "partial": ("in_partial", PLAIN),
    "dicts of dicts": ("attributes",),
    "child with parent": ("child_of_listed_parent", PLAIN),
    "equal modules": ("twins",),
    "objects": ("in_slots", ("in_namespace", PLAIN), ("in_set", PLAIN)),
    "closures": ("in_closure", PLAIN),
    "buffer with gradients": ("buffers",),
    "norm in a list": ("in_list", PLAIN, ("eval_norm",)),
    "scratch": ("in_list", ("scratch",), ("written_buffer",)),
}
"""Models of the fuzzer that keep modules, tensors, or state in unusual places.

Each once had a wrong output in lanes.
"""


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_odd_models_equal_a_plain_copy(spec):
    """Outputs and gradients are the plain ones, whatever changes between calls."""
    events = [("backward", 0)]
    for number, change in enumerate(("data_new", "freeze", "replace_parameter"), start=1):
        events += [(change, number), ("backward", number)]
    case = Case(
        seed=0,
        body=spec,
        outputs=("rows",),
        form="positional",
        scale="missing",
        input_grad=False,
        frozen=False,
        devices=("sim:2", "sim:0", "sim:3", "sim:3"),
        home="sim:0",
        events=(*events, ("unfreeze", 4), ("no_grad", 4)),
    )
    assert run(case) == Outcome("answered")


@pytest.mark.parametrize("devices", [["sim:0", "sim:0"], ["sim:0", "sim:1", "sim:0"]], ids=str)
@torch.no_grad()
def test_batch_norms_without_gradients(devices):
    """Lanes of one device run on streams of their own, and renew their statistics for each call."""
    plain = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 5), nn.BatchNorm1d(5)).double()
    model = copy.deepcopy(plain).to("sim:0")
    with parallel(model, devices, out_dims=0) as p:
        for count in (12, 12, 9, 12):
            x = rows(count) * 3 + 1
            output = model(x.to("sim:0"))
            parts = x.split(p.stats().shards)
            expected = torch.cat([copy.deepcopy(plain)(part) for part in parts])
            torch.testing.assert_close(output.cpu(), expected)
            plain(parts[0])
            ours = {name: value.cpu() for name, value in model.state_dict().items()}
            torch.testing.assert_close(ours, dict(plain.state_dict()))
