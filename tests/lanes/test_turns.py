"""Turns: which lanes of a call run one after another, what a seed then reproduces, and the warnings."""

from __future__ import annotations

import itertools
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parawrap import parallel
from parawrap.lanes import Turns, here
from tests.helpers.waiting import PATIENCE_S

CPU, FIRST, SECOND = map(torch.device, ("cpu", "cuda:0", "cuda:1"))
DRAWS = r"drew from it at the same time.*torch\.use_deterministic_algorithms\(True\)"
EVAL = r"a model in eval mode is called with gradients enabled.*torch\.inference_mode\(\)"
X = torch.zeros(17, 3)
LEARNING = torch.zeros(4, requires_grad=True)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# The decision


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


# The calls


RAN = []
"""The lane and the thread of each recorded call."""


class Recording(nn.Module):
    """A linear layer that records its calls. `draw` is a function of its output."""

    def __init__(self, draw=lambda y: y):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.draw = draw

    def forward(self, x, options=None):
        RAN.append((here.lane.index if here.lane is not None else None, threading.get_ident()))
        return self.draw(self.layer(x))


def ran_in_turns(lanes):
    """True if the caller ran every lane, in lane order, since the last look."""
    ran = [*RAN]
    RAN.clear()
    return ran == [(lane, threading.get_ident()) for lane in range(lanes)]


@pytest.mark.parametrize("lanes", [2, 4])
def test_training_steps_take_turns(lanes):
    """At every call, with a frozen model whose input requires gradients, and once a parameter is unfrozen."""
    RAN.clear()
    model = Recording()
    with parallel(model, ["cpu"] * lanes, out_dims=0):
        for _ in range(2):
            model(X)
            assert ran_in_turns(lanes)
        model.requires_grad_(False)
        model(X.clone().requires_grad_())
        assert ran_in_turns(lanes)
        model.layer.bias.requires_grad_(True)
        model(X)
        assert ran_in_turns(lanes)
        with deterministic(), torch.inference_mode():
            model(X)
        assert ran_in_turns(lanes)
        with torch.no_grad():
            model(X, {"generator": torch.Generator()})
        assert ran_in_turns(lanes)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_other_calls_run_at_the_same_time(mode):
    """Lanes may wait for each other, at every call; a frozen model does not need a mode."""
    gate = threading.Barrier(3)
    model = Recording(lambda y: (gate.wait(PATIENCE_S), y)[1]).requires_grad_(False)
    with mode(), parallel(model, ["cpu"] * 3):
        for _ in range(2):
            assert model(X).shape == X.shape


class Noise(nn.Module):
    """Draws from a generator of its own, or of the call."""

    def __init__(self):
        super().__init__()
        self.held = {"generator": torch.Generator()}

    def forward(self, x, generator=None):
        return x + torch.rand(len(x), 1, generator=generator or self.held["generator"])


@pytest.mark.parametrize("of_call", [True, False])
def test_a_generator_gives_the_same_numbers(of_call):
    """Without gradients too; no lane starts again."""
    model, found = Noise(), []
    with torch.no_grad(), parallel(model, ["cpu"] * 2):
        for _ in range(5):
            model.held["generator"].manual_seed(3)
            found.append(model(X, torch.Generator().manual_seed(3) if of_call else None))
    assert all(torch.equal(each, found[0]) for each in found)
    assert len(found[0][:, 0].unique()) == len(X)


def test_a_failure_in_turns_ends_the_call():
    def fail(y):
        if here.lane.index == 1:
            raise KeyError("mine")
        return y

    RAN.clear()
    with parallel(Recording(fail), ["cpu"] * 3) as p, pytest.raises(KeyError, match="mine") as caught:
        p(X)
    assert [lane for lane, _ in RAN] == [0, 1]
    assert caught.value.__notes__ == ["in lane 1 on cpu, shard 1 of 3: 6 of 17 rows"]


# What a seed reproduces


class Checkpointed(nn.Module):
    """A model that is computed again in the backward pass."""

    def __init__(self, model, *, use_reentrant):
        super().__init__()
        self.model, self.use_reentrant = model, use_reentrant

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=self.use_reentrant)


def dropping():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.3))


def step(model, x):
    """Return the output and all gradients of a training step from a seed."""
    model.zero_grad()
    x.grad = None
    torch.manual_seed(7)
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("lanes", [2, 4])
def test_a_seed_reproduces_a_training_step(lanes):
    """At each step, in another block, and with checkpoints, which recompute the masks of each lane."""
    x, found = torch.randn(33, 8, requires_grad=True), []
    for _ in range(2):
        with parallel(model := dropping(), ["cpu"] * lanes):
            found += [step(model, x) for _ in range(2)]
            found.append(step(Checkpointed(model, use_reentrant=True), x))
    for use_reentrant in (True, False):
        with parallel(model := Checkpointed(dropping(), use_reentrant=use_reentrant), ["cpu"] * lanes):
            found.append(step(model, x))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_draw_different_numbers(lanes):
    """Equal rows in different lanes get different masks; the gradient of the input is the mask of the output."""
    x = torch.ones(lanes, 64, requires_grad=True)
    with parallel(nn.Dropout(0.5), ["cpu"] * lanes, out_dims=0) as p:
        y = p(x)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(y, 2))
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_deterministic_calls_are_reproducible():
    """The warning about draws names this switch."""
    found = []
    with deterministic(), torch.no_grad(), parallel(nn.Dropout(0.5), ["cpu"] * 2) as p:
        for _ in range(4):
            torch.manual_seed(7)
            found.append(p(torch.ones(33, 8)))
    assert all(torch.equal(other, found[0]) for other in found[1:])


# The warnings


@pytest.mark.parametrize("mode", [torch.no_grad, nullcontext])
def test_a_draw_warns_once_per_block(mode):
    """The warning points at the call and names the cure. Calls in turns, whole calls, and other calls do not warn."""
    for _ in range(2):
        with mode(), parallel(nn.Dropout(0.5), ["cpu"] * 2) as p:
            p.target.eval()
            p(torch.ones(9, 3))
            p.target.train()
            p(torch.ones(1, 3))
            p(torch.ones(9, 3, requires_grad=True))
            with pytest.warns(UserWarning, match=DRAWS) as caught:
                p(torch.ones(9, 3))
            assert [each.filename for each in caught] == [__file__]
            p(torch.ones(9, 3))


def test_eval_with_gradients_warns_once_per_block():
    """Turns are rarely meant then. The warning names the cure."""
    RAN.clear()
    model = Recording().eval()
    for _ in range(2):
        with parallel(model, ["cpu"] * 2) as p:
            model(X[:1])
            model(X.clone().requires_grad_())
            with torch.no_grad():
                model(X)
            assert len(list(p.map([X, X]))) == 2
            RAN.clear()
            with pytest.warns(UserWarning, match=EVAL) as caught:
                model(X)
            assert [each.filename for each in caught] == [__file__]
            assert ran_in_turns(2)
            model(X)
