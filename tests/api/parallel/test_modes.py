"""The caller's modes apply in the lanes, and random numbers can be repeated; else a warning says
so.
"""

from __future__ import annotations

import contextvars
import random
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from parawrap import parallel
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.calling import Calls
from tests.helpers.waiting import PATIENCE_S

# Of small batches
pytestmark = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
FOUR = ["cpu"] * 4
variable = contextvars.ContextVar("variable")


def look():
    return torch.empty(1).device.type, variable.get()


def test_every_lane_has_the_callers_context():
    """Modes of the caller hold in the lanes of calls, `submit`, and `map`. A mode ends in the lanes
    when it ends in the caller.
    """
    variable.set("set")
    seen, barrier, x = [], threading.Barrier(3), torch.ones(3, 2)

    def target(x):
        if len(x) == 1:
            barrier.wait(PATIENCE_S)
        seen.append((threading.get_ident(), look()))
        return x

    with parallel(target, THREE, out_dims=0) as p:
        for mode, device in (
            (torch.device("meta"), "meta"),
            (torch.autocast("cpu"), "cpu"),
            (nullcontext(), "cpu"),
        ):
            seen.clear()
            with mode:
                p(x)
                assert look() == (device, "set")
                futures = [p.submit(x) for _ in range(3)]
                list(p.map([x] * 3))
            for future in futures:
                future.result(PATIENCE_S)
            assert len({thread for thread, _ in seen[:3]}) == 3
            assert [found for _, found in seen] == [(device, "set")] * 9


def test_training_under_autocast():
    """The dtype, the values, and the gradients are the plain ones.

    Lanes cast weights again after they changed.
    """
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(7, 8)

    def step():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
        return y, [parameter.grad.clone() for parameter in model.parameters()]

    plain = step()
    assert plain[0].dtype == torch.bfloat16
    with parallel(model, THREE):
        assert_close(step(), plain, atol=0.05, rtol=0.05)
        for value in (0.0, 1.0):
            with torch.no_grad():
                model[2].weight.zero_()
                model[2].bias.fill_(value)
            assert step()[0].unique().tolist() == [value]


def test_the_profiler_records_the_lanes():
    """A profiler records the operators of all lanes, also if earlier calls of
    the block had none.
    """
    model, x = nn.Linear(4, 4), torch.randn(10, 4)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with parallel(model, THREE):
        model(x)
        with profiler as profile:
            for _ in range(5):
                model(x)
    events = {event.key: event.count for event in profile.key_averages()}
    assert events["aten::linear"] == 15


def test_dispatch_modes_see_whole_calls():
    """A FLOP counter counts as in the plain call, also in `submit` and `map`, whose futures get the
    errors.
    """
    model, x = nn.Linear(4, 4), torch.randn(10, 4)
    with FlopCounterMode(display=False) as plain:
        model(x)
    with torch.no_grad(), parallel(model, THREE) as p:
        with FlopCounterMode(display=False) as counted:
            outputs = [
                model(x),
                p.submit(x).result(),
                next(p.map([x])),
                next(p.map([-x], prepare=torch.neg)),
            ]
            assert isinstance(p.submit(x.T).exception(), RuntimeError)
        assert p.stats().plain == 4
    assert counted.get_total_flops() == 4 * plain.get_total_flops() > 0
    assert_close(outputs, [model(x)] * 4)


def test_tracing_and_export_are_plain():
    model, x = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.randn(10, 4)
    with parallel(model, THREE), parallel(model[0], THREE):
        traced = torch.jit.trace(model, x)
        programs = [
            traced,
            torch.fx.symbolic_trace(model),
            torch.export.export(model, (x,)).module(),
        ]
    assert "split" not in str(traced.graph)
    for program in programs:
        assert_close(program(x), model(x))


# -- random numbers


def test_a_seed_gives_the_same_numbers():
    """Calls with gradients have the same output, and leave the generator in the same state."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.2))
    for rows in (4, 7):
        x, outcomes = torch.randn(rows, 6), []
        with parallel(model, FOUR):
            for _ in range(4):
                torch.manual_seed(3)
                outcomes.append((model(x), torch.rand(())))
        assert_close(outcomes, outcomes[:1] * 4, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_checkpoints_recompute_dropout(where, reentrant):
    """Dropout of ones has the mask as output and as gradient."""
    weight, x = nn.Parameter(torch.ones(6)), torch.ones(9, 6, requires_grad=True)

    def dropped(x):
        return nn.functional.dropout(x * weight, 0.5)

    def recomputed(x):
        return checkpoint(dropped, x, use_reentrant=reentrant)

    with parallel(recomputed if where == "inside" else dropped, FOUR) as p:
        y = p(x) if where == "inside" else checkpoint(p, x, use_reentrant=reentrant)
        torch.rand(3)  # changes the generator's state between the two passes
        y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(weight.grad, y.detach().sum(0))


@pytest.mark.parametrize("source", ["argument", "attribute"])
def test_lanes_that_share_a_generator(source):
    """Lanes that share a generator draw in turns, in row order."""

    class Draws(nn.Module):
        def forward(self, x, given=None):
            return x + torch.rand(x.shape, generator=given or self.generator)

    model, generator, x = Draws(), torch.Generator().manual_seed(5), torch.zeros(7, 2)
    model.generator = generator if source == "attribute" else None
    with torch.no_grad(), parallel(model, FOUR):
        outputs = [model(x, *([generator] if source == "argument" else [])) for _ in range(3)]
    generator.manual_seed(5)
    assert_close(outputs, [torch.rand(x.shape, generator=generator) for _ in range(3)])


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng, np.random.RandomState])
def test_generators_of_python_and_numpy(make):
    """Lanes share generators of Python and NumPy too, in turns, as attributes and in `prepare`."""
    generator, x = make(3), torch.zeros(5)
    model = Calls(lambda x: x + torch.tensor([generator.random() for _ in x]))
    with torch.no_grad(), parallel(model, FOUR) as p:
        outputs = [model(x), model(x), *p.map([x] * 3, prepare=lambda x: x - generator.random())]
    generator = make(3)
    for output in outputs[:2]:
        assert_close(output, model(x))
    assert len(torch.stack(outputs).unique()) == 25


def messages_of(target, mode=torch.enable_grad):
    """Return the warnings of three calls in one block."""

    def use():
        with mode(), parallel(target, TWO) as p:
            for _ in range(3):
                p(torch.randn(9, 3))  # numbers that the caller draws do not count

    return warnings_of(use)


def test_simultaneous_draws_warn_once():
    """With gradients, lanes run in turns."""
    (message,) = messages_of(nn.Dropout(0.5), torch.no_grad)
    assert "drew from it at the same time, so a seed does not reproduce this call" in message
    assert "With torch.use_deterministic_algorithms(True), lanes run one after another" in message
    assert (
        messages_of(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
        == messages_of(torch.tanh)
        == []
    )


def test_eval_with_gradients_warns_once():
    """Without gradients, and for frozen models, no warning is due."""
    model = nn.Linear(3, 2).eval()
    (message,) = messages_of(model)
    assert message.startswith("a model in eval mode is called with gradients enabled")
    assert "inside torch.inference_mode()" in message
    assert messages_of(model, torch.no_grad) == messages_of(model, torch.inference_mode) == []
    for target in (
        nn.Linear(3, 2),
        nn.Sequential(model),
        nn.Tanh().eval(),
        model.requires_grad_(requires_grad=False),
    ):
        assert messages_of(target) == []
