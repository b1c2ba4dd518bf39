"""With gradients, or under deterministic algorithms, a seed gives the same numbers; else a warning says so."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from parawrap import parallel
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.waiting import PATIENCE_S

small = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")  # of small batches
TWO = ["cpu"] * 2
FOUR = ["cpu"] * 4


# -- seeds


def assert_reproducible(model, lanes):
    """Assert that calls after the same seed have the same output, and leave the generator in the same state."""
    for rows in (2, 4, 7, 9):
        x, outcomes = torch.randn(rows, 6), []
        with parallel(model, ["cpu"] * lanes):
            for _ in range(4):
                torch.manual_seed(3)
                outcomes.append((model(x), torch.rand(())))
        (first, drawn), *others = outcomes
        assert all(torch.equal(y, first) and number == drawn for y, number in others)


def dropping():
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.2))


@small
@pytest.mark.parametrize("lanes", [2, 4])
def test_a_seed_gives_the_same_numbers(lanes):
    assert_reproducible(dropping(), lanes)


@small
@pytest.mark.parametrize("lanes", [2, 4])
@pytest.mark.usefixtures("_deterministic")
def test_deterministic_algorithms(lanes):
    """The lanes run in turns without gradients, too, and no warning is due."""
    with torch.no_grad():
        assert_reproducible(dropping(), lanes)


def test_calls_that_draw_nothing():
    """They do not change the generator."""
    model, x, state = nn.Dropout(0.0), torch.randn(10, 4), torch.get_rng_state()
    with parallel(model, FOUR):
        assert torch.equal(model(x), x)
    assert torch.equal(state, torch.get_rng_state())


class Drops(nn.Module):
    """Dropout of x * weight. If both are ones, the output and the gradient of x equal the mask."""

    def __init__(self, inside=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.dropout = nn.Dropout(0.5)
        self.inside = inside

    def forward(self, x):
        if self.inside is None:
            return self.dropped(x)
        return checkpoint(self.dropped, x, use_reentrant=self.inside == "reentrant")

    def dropped(self, x):
        return self.dropout(x * self.weight)


@small
@pytest.mark.parametrize("form", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["inside", "around", "both"])
def test_checkpoints_recompute_the_same_dropout(where, form):
    model = Drops(form if where != "around" else None)
    for rows in (2, 5, 12):
        with parallel(model, FOUR):
            model.zero_grad()
            x = torch.ones(rows, 6, requires_grad=True)
            y = model(x) if where == "inside" else checkpoint(model, x, use_reentrant=form == "reentrant")
            torch.rand(3)  # changes the generator's state between the two passes
            y.sum().backward()
            assert torch.equal(x.grad, y.detach())
            assert torch.equal(model.weight.grad, y.detach().sum(0))


class Draws(nn.Module):
    """Draws from a generator in an argument or attribute."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator
        type(self).threads = []  # on the class, because a replica has its own attributes

    def forward(self, x, generator=None):
        self.threads.append(threading.get_ident())
        return x + torch.rand(x.shape, generator=self.generator if generator is None else generator)


@small
@pytest.mark.parametrize("source", ["argument", "attribute"])
def test_lanes_that_share_a_generator(source):
    """They draw in turns, in the caller's thread, in row order."""
    generator = torch.Generator()
    model = Draws(generator if source == "attribute" else None)
    for rows in (2, 4, 9):
        x = torch.zeros(rows, 2)
        with torch.no_grad(), parallel(model, FOUR):
            generator.manual_seed(5)
            outputs = [model(x, *([generator] if source == "argument" else [])) for _ in range(3)]
        generator.manual_seed(5)
        assert_close(outputs, [torch.rand(x.shape, generator=generator) for _ in range(3)])
    assert set(model.threads) == {threading.get_ident()}


# -- warnings


def messages_of(target, x, mode=torch.enable_grad, **options):
    """Return the warnings of three calls in one block."""

    def use():
        with mode(), parallel(target, TWO, **options) as p:
            for _ in range(3):
                p(x)

    return warnings_of(use)


def test_draws_at_the_same_time_warn_once():
    model, x = nn.Dropout(0.5), torch.ones(9, 3)
    for _ in range(2):
        (message,) = messages_of(model, x, torch.no_grad)
        assert "drew from it at the same time, so a seed does not reproduce this call" in message
        assert "With torch.use_deterministic_algorithms(True), lanes run one after another" in message
    assert messages_of(nn.Sequential(nn.Linear(3, 3), model), x) == []  # with gradients, lanes run in turns

    def use():
        with parallel(torch.tanh, TWO) as p:
            for _ in range(3):
                p(torch.randn(9))  # the caller draws

    assert warnings_of(use) == []


def test_eval_mode_with_gradients_warns_once():
    model, x = nn.Linear(3, 2).eval(), torch.ones(9, 3)
    for _ in range(2):
        (message,) = messages_of(model, x)
        assert message.startswith("a model in eval mode is called with gradients enabled")
        assert "inside torch.inference_mode()" in message
    assert messages_of(model, x, torch.no_grad) == messages_of(model, x, torch.inference_mode) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(3, 2),
        lambda: nn.Sequential(nn.Linear(3, 2).eval()),
        lambda: nn.Linear(3, 2).eval().requires_grad_(requires_grad=False),
        lambda: nn.Tanh().eval(),
        lambda: torch.tanh,
    ],
    ids=["train mode", "submodule", "frozen", "no parameters", "function"],
)
def test_targets_without_the_eval_warning(make):
    assert messages_of(make(), torch.ones(9, 3)) == []


def test_inference_mode_ends_the_turns():
    """As the warning says: the lanes run in turns with gradients, and at the same time without."""
    threads, barrier = [], threading.Barrier(4)

    class Model(nn.Linear):
        def forward(self, x):
            threads.append(threading.get_ident())
            if torch.is_inference_mode_enabled():
                barrier.wait(PATIENCE_S)
            return super().forward(x)

    model, x = Model(3, 2), torch.ones(9, 3)
    with parallel(model, FOUR):
        model(x)
        assert set(threads) == {threading.get_ident()}
        with torch.inference_mode():
            model(x)
    assert len(set(threads)) == 4
