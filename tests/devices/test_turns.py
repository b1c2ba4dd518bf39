"""Lanes run in turns where a seed must give the same random numbers, and at the same time
elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap import parallel
from tests.helpers.device_models import SIMS, dropout, rows

TWICE = ["sim:0", "sim:0"]
DRAWS = (
    r"lanes that share a random generator drew from it.*torch\.use_deterministic_algorithms\(True\)"
)


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:0", "sim:1", "sim:1"]], ids=str)
@pytest.mark.usefixtures("_deterministic")
def test_seeds_if_deterministic(devices, home):
    """Under deterministic algorithms, also lanes without gradients draw in lane order."""
    model = dropout(home)
    x = rows(9)
    outputs = []
    with torch.no_grad(), parallel(model, devices, out_dims=0):
        for seed in (1, 2, 1, 1, 2):
            torch.manual_seed(seed)
            outputs.append(model(x))
    first, second, *again = outputs
    torch.testing.assert_close(again, [first, first, second], rtol=0, atol=0)
    assert not torch.equal(first, second)


@pytest.fixture
def generators(monkeypatch):
    """Give each simulated device its own random generator, as GPUs have.

    By default they share the CPU's generator.
    """
    own = {torch.device(device): torch.Generator() for device in SIMS}
    monkeypatch.setattr(
        torch.sim,
        "get_rng_state",
        lambda device: own[torch.device(device)].get_state(),
        raising=False,
    )
    return own


class Noise(nn.Module):
    """Adds random numbers from the generator of the input's device."""

    def __init__(self, generators):
        super().__init__()
        self.draw = lambda x: torch.rand(x.shape, generator=generators[x.device]).to(x.device)

    def forward(self, x):
        return x + self.draw(x)


def test_one_generator_per_device(generators):
    """Lanes that draw from their own devices' generators reproduce a seed, without a warning."""
    model, x = Noise(generators), torch.zeros(9, 3).to("sim:0")
    outputs = []
    with torch.no_grad(), parallel(model, SIMS, output_device="cpu"):
        for _ in range(4):
            for generator in generators.values():
                generator.manual_seed(1)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 4, rtol=0, atol=0)


def test_draws_on_one_device_warn(generators):
    """Each block warns once if lanes drew from one generator at the same time,
    and names the cure.
    """
    model, x = Noise(generators), torch.zeros(9, 3).to("sim:0")
    for _ in range(2):
        with torch.no_grad(), parallel(model, TWICE, output_device="cpu"):
            with pytest.warns(UserWarning, match=DRAWS) as caught:
                model(x)
            assert len(caught) == 1
            model(x)
