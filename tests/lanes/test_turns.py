"""Turns: which lanes of a call run one after another, what a seed then reproduces, and the warnings."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from parawrap import parallel
from parawrap.lanes import here
from parawrap.lanes._turns import Turns

CPU, FIRST, SECOND = map(torch.device, ("cpu", "cuda:0", "cuda:1"))
DRAWS = r"drew from it at the same time.*torch\.use_deterministic_algorithms\(True\)"
EVAL = r"a model in eval mode is called with gradients enabled.*torch\.inference_mode\(\)"
X = torch.zeros(17, 3)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Recording(nn.Module):
    """A linear layer that records its calls. `draw` is a function of its output."""

    def __init__(self, draw=None):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.draw = draw

    def forward(self, x):
        record()
        y = self.layer(x)
        return y if self.draw is None else self.draw(y)


RAN = []
"""The lane and the thread of each recorded call."""


def record():
    RAN.append((here.lane.index if here.lane is not None else None, threading.get_ident()))


@pytest.fixture(autouse=True)
def ran():
    RAN.clear()
    return RAN


def ran_in_turns(ran, lanes):
    """True if the caller ran every lane, in lane order."""
    return ran == [(lane, threading.get_ident()) for lane in range(lanes)]


# The decision


def decided(devices, *leaves, generators=(), learns=True, **options):
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
def test_lanes_of_one_device_run_in_turns_with_gradients(devices, with_gradients):
    """A tensor of the model or an argument must require gradients. Lanes on devices of their own run at the same time."""
    x, learns = torch.zeros(4), torch.zeros(4, requires_grad=True)
    assert decided(devices, x) == with_gradients
    assert decided(devices, x, learns, learns=False) == with_gradients
    assert decided(devices, x, learns=False) is None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert decided(devices, x) is None


def test_an_argument_that_requires_gradients_puts_the_lanes_in_turns_also_without_them():
    """A reentrant checkpoint runs forward without gradients, and again with them."""
    with torch.no_grad():
        assert decided((CPU, CPU), torch.zeros(4, requires_grad=True), learns=False) == "device"


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("devices", [(CPU, CPU), (FIRST, SECOND)])
def test_all_lanes_run_in_turns_with_a_generator_or_deterministic_algorithms(devices, grad):
    """A generator among the arguments or in the model is shared by all lanes, also by those on devices of their own."""
    x, generator = torch.zeros(4), torch.Generator()
    with torch.set_grad_enabled(grad):
        assert decided(devices, x, generator, learns=False) == "all"
        assert decided(devices, x, generators=(generator,), learns=False) == "all"
        with deterministic():
            assert decided(devices, x, learns=False) == "all"


def test_lanes_that_are_processes_have_their_own_generators():
    """They run at the same time, except under deterministic algorithms."""
    assert decided((CPU, CPU), torch.zeros(4), share_generators=False) is None
    with deterministic():
        assert decided((CPU, CPU), torch.zeros(4), share_generators=False) == "all"


# The calls


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_a_training_step_runs_its_lanes_in_order(ran, lanes):
    """With gradients, the caller runs the lanes of one device one after another, at every call."""
    model = Recording()
    with parallel(model, ["cpu"] * lanes, out_dims=0):
        for _ in range(3):
            ran.clear()
            model(X)
            assert ran_in_turns(ran, lanes)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_runs_its_lanes_at_the_same_time(mode):
    """Lanes may wait for each other, at every call."""
    gate = threading.Barrier(3)
    model = Recording(draw=lambda y: (gate.wait(20), y)[1])
    with mode(), parallel(model, ["cpu"] * 3):
        for _ in range(2):
            assert model(X).shape == X.shape


def test_a_frozen_model_runs_its_lanes_at_the_same_time():
    """Gradients are enabled, and nothing requires them."""
    gate = threading.Barrier(2)
    model = Recording(draw=lambda y: (gate.wait(20), y)[1]).requires_grad_(False)
    with parallel(model, ["cpu"] * 2):
        assert model(X).shape == X.shape


def test_an_input_that_requires_gradients_puts_the_lanes_in_turns(ran):
    """Also for a frozen model."""
    model = Recording().requires_grad_(False)
    with parallel(model, ["cpu"] * 2):
        model(X.clone().requires_grad_())
    assert ran_in_turns(ran, 2)


def test_unfreezing_puts_the_next_call_in_turns(ran):
    """Each call looks at the model as it is."""
    model = Recording().requires_grad_(False)
    with parallel(model, ["cpu"] * 2):
        model(X)
        model.layer.bias.requires_grad_(True)
        ran.clear()
        model(X)
    assert ran_in_turns(ran, 2)


def test_deterministic_algorithms_put_every_call_in_turns(ran):
    """Also without gradients."""
    model = Recording()
    with deterministic(), torch.inference_mode(), parallel(model, ["cpu"] * 3):
        model(X)
    assert ran_in_turns(ran, 3)


def test_a_generator_among_the_arguments_puts_the_lanes_in_turns(ran):
    """Also inside a container, and without gradients."""

    def noise(x, options):
        record()
        return x + torch.rand(len(x), 1, generator=options["generator"])

    found = []
    with torch.no_grad(), parallel(noise, ["cpu"] * 3) as p:
        for _ in range(3):
            ran.clear()
            found.append(p(X, {"generator": torch.Generator().manual_seed(3)}))
            assert ran_in_turns(ran, 3)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    assert len(found[0][:, 0].unique()) == len(X)  # no lane starts again


def test_a_generator_of_the_model_puts_the_lanes_in_turns(ran):
    """Lanes share the generator, so a seed gives the same numbers, without gradients too."""

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            record()
            return x + torch.rand(len(x), 1, generator=self.generator)

    model, found = Noise(), []
    with torch.no_grad(), parallel(model, ["cpu"] * 2):
        for _ in range(3):
            ran.clear()
            model.generator.manual_seed(3)
            found.append(model(X))
            assert ran_in_turns(ran, 2)
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])
    assert len(found[0][:, 0].unique()) == len(X)


def test_lanes_in_turns_have_all_threads_of_torch():
    """A lane that runs alone does not share the processor. Lanes that run at the same time share it."""
    counts, before = [], torch.get_num_threads()
    torch.set_num_threads(4)
    model = Recording(draw=lambda y: (counts.append(torch.get_num_threads()), y)[1])
    try:
        with parallel(model, ["cpu"] * 2):
            model(X)
            assert (counts, torch.get_num_threads()) == ([4, 4], 4)
            with torch.no_grad():
                model(X)
            assert max(counts[2:]) < 4
    finally:
        torch.set_num_threads(before)


def test_the_first_failure_in_turns_ends_the_call(ran):
    """Lanes after the one that raised do not start."""

    def fail(y):
        if here.lane.index == 1:
            raise KeyError("mine")
        return y

    with parallel(Recording(draw=fail), ["cpu"] * 3) as p, pytest.raises(KeyError, match="mine") as caught:
        p(X)
    assert [lane for lane, _ in ran] == [0, 1]
    assert caught.value.__notes__ == ["in lane 1 on cpu, shard 1 of 3: 6 of 17 rows"]


# What a seed reproduces


def dropping(make):
    torch.manual_seed(1)
    return make(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.3))


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self, *layers, use_reentrant=False):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.use_reentrant)


class Around(nn.Module):
    """A checkpoint around a model."""

    def __init__(self, model, *, use_reentrant):
        super().__init__()
        self.model = model
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.model, x, use_reentrant=self.use_reentrant)


def reentrant(*layers):
    return Checkpointed(*layers, use_reentrant=True)


def step(model, x):
    """Return the output and all gradients of a training step from a seed."""
    model.zero_grad()
    torch.manual_seed(7)
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("make", [nn.Sequential, Checkpointed, reentrant])
def test_a_seed_reproduces_a_training_step_with_dropout(make, lanes):
    """The same seed gives the same output and gradients at each step, and in another block."""
    model, x = dropping(make), torch.randn(33, 8, requires_grad=make is reentrant)
    found = []
    for _ in range(2):
        with parallel(model, ["cpu"] * lanes):
            found += [step(model, x) for _ in range(4)]
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.parametrize("make", [Checkpointed, reentrant])
def test_checkpointing_recomputes_the_masks_of_each_lane(make, lanes):
    """Gradients with checkpointing are those of the same step without it, so each lane drew the same masks again."""
    plain, recomputed = dropping(nn.Sequential), dropping(make)
    x = torch.randn(33, 8, requires_grad=make is reentrant)
    with parallel(plain, ["cpu"] * lanes), parallel(recomputed, ["cpu"] * lanes):
        for one, other in zip(step(plain, x), step(recomputed, x), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("lanes", [2, 4])
def test_a_reentrant_checkpoint_around_a_call_recomputes_the_masks(lanes):
    """The call itself is made without gradients, and again in the backward pass, with the masks of the first time."""
    model, x = dropping(nn.Sequential), torch.randn(33, 8, requires_grad=True)
    with parallel(model, ["cpu"] * lanes):
        assert all(map(torch.equal, step(Around(model, use_reentrant=True), x), step(model, x)))


def test_a_checkpoint_around_a_call_recomputes_the_masks():
    """A checkpoint that is not reentrant sets hooks on saved tensors, so the call runs plainly, both times."""
    model, x = dropping(nn.Sequential), torch.randn(33, 8, requires_grad=True)
    expected = step(model, x)
    with parallel(model, ["cpu"] * 2) as p:
        assert all(map(torch.equal, step(Around(model, use_reentrant=False), x), expected))
        assert p.stats().plain == p.stats().calls > 0


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_draw_different_numbers(lanes):
    """Equal rows in different lanes get different masks."""
    with parallel(nn.Dropout(0.5), ["cpu"] * lanes, out_dims=0) as p:
        shards = p(torch.ones(lanes, 64, requires_grad=True))
    for one, other in itertools.combinations(shards, 2):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("lanes", [2, 4])
def test_a_gradient_of_dropout_belongs_to_the_mask_of_its_output(lanes):
    """The gradient of the input is the mask of the output."""
    x = torch.ones(33, 8, requires_grad=True)
    with parallel(nn.Dropout(0.5), ["cpu"] * lanes) as p:
        y = p(x)
    y.sum().backward()
    assert_close(x.grad, y.detach())


@pytest.mark.parametrize("lanes", [2, 4])
def test_a_seed_reproduces_a_call_without_gradients_under_deterministic_algorithms(lanes):
    """The warning about draws names this switch, and with it a seed gives the same numbers."""
    found = []
    with deterministic(), torch.no_grad(), parallel(nn.Dropout(0.5), ["cpu"] * lanes) as p:
        for _ in range(4):
            torch.manual_seed(7)
            found.append(p(torch.ones(33, 8)))
    assert all(torch.equal(other, found[0]) for other in found[1:])


# The warnings


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_draw_without_gradients_warns_once_per_block(mode):
    """The warning names the cure. Later calls of the block do not warn; another block does."""
    for _ in range(2):
        with mode(), parallel(nn.Dropout(0.5), ["cpu"] * 2) as p:
            p.target.eval()
            p(torch.ones(9, 3))
            p.target.train()
            with pytest.warns(UserWarning, match=DRAWS) as caught:
                p(torch.ones(9, 3))
            assert [each.filename for each in caught] == [__file__]
            for _ in range(3):
                p(torch.ones(9, 3))


def test_a_draw_in_turns_does_not_warn():
    """A training step, a call of one row, and a call that draws nothing are reproducible."""
    model = dropping(nn.Sequential)
    with parallel(model, ["cpu"] * 2):
        model(torch.ones(9, 8))
        with torch.no_grad():
            model(torch.ones(1, 8))
    with torch.no_grad(), parallel(model.eval(), ["cpu"] * 2):
        model(torch.ones(9, 8))


@pytest.mark.parametrize("target", [nn.Dropout(0.5), torch.rand_like])
def test_a_target_without_parameters_draws_with_a_warning(target):
    """Nothing requires gradients, so its lanes run at the same time, also with gradients enabled."""
    with parallel(target, ["cpu"] * 2) as p, pytest.warns(UserWarning, match=DRAWS):
        p(torch.ones(9, 3))


def test_a_model_in_eval_mode_with_gradients_warns_once_per_block(ran):
    """Its lanes run in turns, which is rarely meant. The warning names the cure."""
    model = Recording().eval()
    for _ in range(2):
        with parallel(model, ["cpu"] * 2):
            ran.clear()
            with pytest.warns(UserWarning, match=EVAL) as caught:
                model(X)
            assert [each.filename for each in caught] == [__file__]
            assert ran_in_turns(ran, 2)
            model(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.train()(X),
        lambda model: torch.inference_mode()(model)(X),
        lambda model: torch.no_grad()(model)(X),
        lambda model: model(X[:1]),
        lambda model: model(X.clone().requires_grad_()),
        lambda model: model.requires_grad_(False)(X),
    ],
    ids=["train", "inference", "no-grad", "plain", "input", "frozen"],
)
def test_other_calls_do_not_warn_of_turns(call):
    """In training mode, without gradients, and with an input that requires them, turns are meant or there are none."""
    model = Recording().eval()
    with parallel(model, ["cpu"] * 2):
        call(model)


def test_streams_do_not_warn_of_turns():
    """Each batch of `map` and `submit` is one call in one lane."""
    model = Recording().eval()
    with parallel(model, ["cpu"] * 2) as p:
        assert len(list(p.map([X, X, X]))) == 3
        assert p.submit(X).result(20).shape == X.shape
