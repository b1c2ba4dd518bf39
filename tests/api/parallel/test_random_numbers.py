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

small = pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")  # of small batches
TWO = ["cpu"] * 2
FOUR = ["cpu"] * 4


@small
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("grad", [True, False])
def test_a_seed_gives_the_same_numbers(grad):
    """Calls have the same output, and leave the generator in the same state. Gradients need no deterministic algorithms."""
    torch.use_deterministic_algorithms(not grad)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.2))
    for rows in (2, 4, 7, 9):
        x, outcomes = torch.randn(rows, 6), []
        with torch.set_grad_enabled(grad), parallel(model, FOUR):
            for _ in range(4):
                torch.manual_seed(3)
                outcomes.append((model(x), torch.rand(())))
        assert_close(outcomes, outcomes[:1] * 4, rtol=0, atol=0)


class Drops(nn.Module):
    """Dropout of x * weight. If both are ones, the output and the gradient of x equal the mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.dropout = nn.Dropout(0.5)
        self.reentrant = None  # no checkpoint inside

    def forward(self, x):
        return self.dropped(x) if self.reentrant is None else checkpoint(self.dropped, x, use_reentrant=self.reentrant)

    def dropped(self, x):
        return self.dropout(x * self.weight)


@small
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "around", "both"])
def test_checkpoints_recompute_dropout(where, reentrant):
    model = Drops()
    model.reentrant = None if where == "around" else reentrant
    for rows in (2, 5, 12):
        with parallel(model, FOUR):
            model.zero_grad()
            x = torch.ones(rows, 6, requires_grad=True)
            y = model(x) if where == "inside" else checkpoint(model, x, use_reentrant=reentrant)
            torch.rand(3)  # changes the generator's state between the two passes
            y.sum().backward()
            assert torch.equal(x.grad, y.detach())
            assert torch.equal(model.weight.grad, y.detach().sum(0))


@pytest.mark.parametrize("source", ["argument", "attribute"])
def test_lanes_that_share_a_generator(source):
    """They draw in turns, in the caller's thread, in row order."""
    threads, generator, x = set(), torch.Generator(), torch.zeros(7, 2)

    class Draws(nn.Module):
        def forward(self, x, given=None):
            threads.add(threading.get_ident())
            return x + torch.rand(x.shape, generator=self.generator if given is None else given)

    model = Draws()
    model.generator = generator if source == "attribute" else None
    with torch.no_grad(), parallel(model, FOUR):
        generator.manual_seed(5)
        outputs = [model(x, *([generator] if source == "argument" else [])) for _ in range(3)]
    generator.manual_seed(5)
    assert_close(outputs, [torch.rand(x.shape, generator=generator) for _ in range(3)])
    assert threads == {threading.get_ident()}


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
    assert messages_of(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))) == messages_of(torch.tanh) == []


def test_eval_with_gradients_warns_once():
    """Without gradients, and for frozen models, no warning is due."""
    model = nn.Linear(3, 2).eval()
    (message,) = messages_of(model)
    assert message.startswith("a model in eval mode is called with gradients enabled")
    assert "inside torch.inference_mode()" in message
    assert messages_of(model, torch.no_grad) == messages_of(model, torch.inference_mode) == []
    for target in (nn.Linear(3, 2), nn.Sequential(model), nn.Tanh().eval(), model.requires_grad_(requires_grad=False)):
        assert messages_of(target) == []
