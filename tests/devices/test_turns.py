"""Lanes run in turns where a seed must give the same random numbers, and at the same time elsewhere."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from parawrap import parallel
from tests.helpers.device_models import SIMS, assert_same_gradients, dropout, rows

TWICE = ["sim:0", "sim:0"]
DRAWS = r"lanes that share a random generator drew from it.*torch\.use_deterministic_algorithms\(True\)"


@pytest.fixture
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
@pytest.mark.parametrize("count", [5, 9])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:0", "sim:1", "sim:1"]], ids=str)
@pytest.mark.usefixtures("_deterministic")
def test_seeds_under_deterministic_algorithms(devices, count, home):
    """Lanes draw in lane order, also without gradients, so a seed gives the same numbers every time."""
    model = dropout(home)
    x = rows(count)
    outputs = []
    with torch.no_grad(), parallel(model, devices, out_dims=0):
        for seed in (1, 2, 1, 1, 2):
            torch.manual_seed(seed)
            outputs.append(model(x))
    first, second, *again = outputs
    torch.testing.assert_close(again, [first, first, second], rtol=0, atol=0)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("devices", [TWICE, ["sim:1", "sim:1"], ["sim:2"] * 4], ids=str)
def test_lanes_of_one_device_draw_in_order(devices):
    """With gradients, the masks are those that the plain model draws for one shard after the other."""
    model = dropout("sim:1")
    plain = copy.deepcopy(model)
    x = rows(9).to("sim:1")
    with parallel(model, devices) as p:
        for seed in range(4):
            torch.manual_seed(seed)
            output, after = model(x), torch.rand(4)
            torch.manual_seed(seed)
            torch.testing.assert_close(output, torch.cat([plain(part) for part in x.split(p.stats().shards)]))
            assert torch.equal(after, torch.rand(4))


@pytest.mark.parametrize("devices", [TWICE, ["sim:1"] * 3], ids=str)
def test_checkpointing_recomputes_the_masks(devices):
    """With and without checkpointing, a seed gives the same gradients.

    The lanes share one device because backward runs one thread per device, and all simulated devices share the CPU's
    random generator.
    """

    class Checkpointed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False)

    plain = dropout("sim:0")
    model = Checkpointed(copy.deepcopy(plain))
    x = rows(11)
    for each in (model, plain):
        with parallel(each, devices):
            for seed in range(3):
                torch.manual_seed(seed)
                each(x).square().sum().backward()
    assert_same_gradients(model.body, plain)


@pytest.mark.parametrize("devices", [TWICE, SIMS], ids=str)
def test_generators_of_the_model(devices):
    """All lanes share a generator that the module holds, and a seed gives the plain numbers every time."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x + torch.rand(x.shape, generator=self.generator).to(x.device)

    model, x = Own(), torch.zeros(9, 3)
    with torch.no_grad(), parallel(model, devices, output_device="cpu"):
        for seed in range(20):
            model.generator.manual_seed(seed)
            output = model(x.to("sim:0"))
            assert torch.equal(output, torch.rand(9, 3, generator=model.generator.manual_seed(seed)))


# ---------------------------------------------------------------- which lanes run in turns


class Recording(nn.Module):
    """Records the thread of each lane."""

    def __init__(self, generator=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.generator = generator
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.seen.append((str(x.device), threading.current_thread().name))
        return x * self.weight


def threads_of_a_call(devices, model):
    """Return the thread that ran each lane, ordered by device and name."""
    with parallel(model.to("sim:0"), devices) as p:
        for _ in range(2):
            Recording.seen.clear()
            model(rows(11))
            assert len(p.stats().shards) == len(devices)
    return [thread for _, thread in sorted(Recording.seen)]


def test_which_lanes_run_in_turns():
    """With gradients, one thread runs all lanes of a device. Different devices run at the same time."""
    caller, lane = threading.current_thread().name, "parawrap-lane 1 on sim:{}"
    assert threads_of_a_call(TWICE, Recording()) == [caller] * 2
    assert threads_of_a_call(["sim:0", "sim:1", "sim:1"], Recording()) == [caller, *[lane.format(1)] * 2]
    frozen = Recording().requires_grad_(requires_grad=False)
    assert sorted(threads_of_a_call(TWICE, frozen)) == sorted([caller, lane.format(0)])
    with torch.no_grad():
        assert sorted(threads_of_a_call(TWICE, Recording())) == sorted([caller, lane.format(0)])
        assert threads_of_a_call(SIMS, Recording(torch.Generator())) == [caller] * 4


# ---------------------------------------------------------------- warnings of draws


@pytest.fixture
def generators(monkeypatch):
    """Give each simulated device its own random generator, as GPUs have. By default they share the CPU's generator."""
    own = {torch.device(device): torch.Generator() for device in SIMS}
    monkeypatch.setattr(torch.sim, "get_rng_state", lambda device: own[torch.device(device)].get_state(), raising=False)
    return own


class Noise(nn.Module):
    """Adds random numbers from the generator of the input's device."""

    def __init__(self, generators):
        super().__init__()
        self.draw = lambda x: torch.rand(x.shape, generator=generators[x.device]).to(x.device)

    def forward(self, x):
        return x + self.draw(x)


@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:1"]], ids=str)
def test_one_generator_per_device(devices, generators):
    """Lanes that draw from their own devices' generators reproduce a seed, without a warning."""
    model, x = Noise(generators), torch.zeros(9, 3).to("sim:0")
    outputs = []
    with torch.no_grad(), parallel(model, devices, output_device="cpu"):
        for _ in range(4):
            for generator in generators.values():
                generator.manual_seed(1)
            outputs.append(model(x))
    torch.testing.assert_close(outputs, [outputs[0]] * 4, rtol=0, atol=0)


def test_draws_of_lanes_on_one_device_warn(generators):
    """Each block warns once if lanes drew from one generator at the same time, and names the cure."""
    model, x = Noise(generators), torch.zeros(9, 3).to("sim:0")
    for _ in range(2):
        with torch.no_grad(), parallel(model, TWICE, output_device="cpu"):
            with pytest.warns(UserWarning, match=DRAWS) as caught:
                model(x)
            assert len(caught) == 1
            model(x)


@pytest.mark.parametrize("grad", [True, False])
def test_draws_from_the_cpus_generator_warn(grad):
    """Lanes on different devices share the CPU's generator, so a seed does not reproduce what they draw from it."""
    model = dropout("sim:0")  # simulated devices draw from the generator of the CPU
    with torch.set_grad_enabled(grad), parallel(model, SIMS):
        with pytest.warns(UserWarning, match=DRAWS):
            model(rows(9))
        model(rows(9))
