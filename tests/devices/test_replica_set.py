"""Replicas on other devices follow every change of the module, and only changed
tensors are copied.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from parawrap import parallel
from tests import simdevice
from tests.helpers.calling import Stateful
from tests.helpers.device_models import SIMS, Holder, assert_same_gradients, mlp, rows

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu"])


def bytes_of(model):
    """Return the total bytes of all parameters. Tied parameters count once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def load(model):
    state = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def narrow(model):
    """Replace the data of the layer by data of another shape."""
    model.linear.weight.data = torch.ones(1, 5).to(model.linear.weight)
    model.linear.bias.data = torch.ones(1).to(model.linear.weight)


def convert(model, to):
    """Also convert the tensors that `Module.to` leaves alone."""
    model.to(to)
    model.scale, model.held["shift"][0] = model.scale.to(to), model.held["shift"][0].to(to)


def write_and_move(model):
    with torch.no_grad():
        model.linear.weight.add_(1)
    convert(model, "sim:2")


CHANGES = {
    "parameter replaced": lambda m: setattr(
        m.linear, "weight", nn.Parameter(m.linear.weight.detach() * 2)
    ),
    "load, assign": load,
    "data of another shape": narrow,
    "buffer written": lambda m: (m.factor.add_(1), m.mask.logical_not_()),
    "attribute written": lambda m: m.scale.mul_(3),
    "item replaced": lambda m: m.held["shift"].__setitem__(0, m.scale * 3),
    "float": lambda m: convert(m, torch.float32),
    "to cpu": lambda m: convert(m, "cpu"),
    "written, then to sim:2": write_and_move,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@HOMES
def test_replicas_follow_changes(change, home):
    """Cut, submitted, and mapped calls use the changed model, and gradients are those of the
    changed model.
    """
    model = Holder(home)
    for earlier in (torch.enable_grad, torch.no_grad):
        twin = copy.deepcopy(model)
        with parallel(twin, SIMS) as p:
            with earlier():
                twin(rows())
            change(twin)
            assert_follows(p, twin)
            with torch.no_grad():
                for each in (*twin.parameters(), twin.scale):
                    each.mul_(0.5)
            assert_follows(p, twin)


def assert_follows(p, model):
    plain = copy.deepcopy(model)
    x = rows().to(plain.linear.weight.dtype)
    expected = plain(x.to(plain.linear.weight.device))
    with torch.no_grad():
        for output in (model(x), p.submit(x).result(), *p.map([x])):
            assert output.device == expected.device
            torch.testing.assert_close(output, expected.detach())
    output = model(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert_same_gradients(model, plain)
    model.zero_grad()


def test_cpu_tensors_of_a_device_model():
    """If a model on a device holds a CPU tensor, the tensor is on the CPU in every lane."""

    def forward(self, x):
        return (x * self.factor)[:, : int(self.lengths.numpy().sum())]

    model, x = (
        Stateful(forward, {"factor": torch.ones(5)}, lengths=torch.tensor([1, 2])).to("sim:0"),
        rows(),
    )
    with torch.no_grad(), parallel(model, SIMS):
        torch.testing.assert_close(model(x), x[:, :3].to("sim:0"))


def test_only_changes_are_copied():
    """Parameters travel once to each other device, whatever the number of its lanes, and again only
    if one changed.
    """
    model = mlp().to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = rows(13)

    def copied(*, grad):
        simdevice.reset_stats()
        with torch.set_grad_enabled(grad):
            output = model(x)
        assert (simdevice.stats().h2d_bytes, simdevice.stats().scalar_reads) == (x.nbytes, 0)
        return simdevice.stats().d2d_bytes, output

    with parallel(model, [*SIMS, "sim:3", "sim:0"], out_dims=0, output_device="cpu") as p:
        assert copied(grad=False)[0] == 3 * bytes_of(model)
        assert copied(grad=False)[0] == 0
        with torch.no_grad():
            model[2].bias.fill_(1)
        assert copied(grad=False)[0] == 3 * bytes_of(model)
        for _ in range(2):
            before = p.stats()
            _, output = copied(grad=True)
            simdevice.reset_stats()
            output.square().sum().backward()
            # Gradients, once from each device
            assert simdevice.stats().d2d_bytes == 3 * bytes_of(model)
            assert simdevice.stats().scalar_reads == 0
            optimizer.step()
            assert copied(grad=True)[0] == 3 * bytes_of(model)
            copied(grad=False)
            assert copied(grad=False)[0] == 0
            assert p.stats().refreshes > before.refreshes
            assert p.stats().copied_bytes - before.copied_bytes >= 3 * bytes_of(model)


def test_small_tensors_travel_together():
    """A refresh of many small tensors takes few copies.

    Large tensors travel alone, and every byte once per device.
    """
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(20)),
        nn.Linear(5, 60_000),
    )
    model.to("sim:0")
    x = torch.randn(8, 5, device="sim:0")
    with torch.no_grad(), parallel(model.eval(), ["sim:0", "sim:1", "sim:2"], out_dims=0) as p:
        for _ in range(2):
            before = p.stats().copied_bytes
            simdevice.reset_stats()
            model(x)
            # Copies per device: rows there and back, three packs (parameters, float buffers,
            # counters), and a large tensor.
            assert simdevice.stats().d2d <= 2 * (2 + 3 + 1)
            if before:
                assert p.stats().copied_bytes - before == 2 * bytes_of(model)
            for parameter in model.parameters():
                parameter.add_(0.1)
        torch.testing.assert_close(p(x), model.forward(x))


@HOMES
@pytest.mark.filterwarnings("ignore:the model wrote 'last', 'ema':UserWarning")
def test_memory_does_not_grow(home):
    """Memory does not grow with calls, also if forward stores its last output in an attribute and a
    buffer.
    """

    def forward(self, x):
        y = self.layer(x)
        self.last = y.detach()
        self.ema = 0.9 * self.ema + 0.1 * self.last.mean(0)
        return y

    model = Stateful(forward, {"ema": torch.zeros(3)}, layer=nn.Linear(5, 3)).to(home)
    optimizer = torch.optim.Adam(model.parameters())
    levels = []
    with parallel(model, SIMS):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(9, 5)).square().mean().backward()
            optimizer.step()
            model.layer.weight.data = model.layer.weight.data * 2
            with torch.no_grad():
                model(torch.randn(9, 5))
            gc.collect()
            levels.append(simdevice.stats().live)
    assert levels[-1] <= levels[3], levels


@HOMES
def test_memory_is_freed_after_a_block(home):
    """A block frees all memory at its end, also if a call fails."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(home)
    model(torch.randn(9, 5, device=home)).sum().backward()  # allocates the gradients
    gc.collect()
    before = simdevice.stats()

    def calls():
        with parallel(model, SIMS):
            for _ in range(3):
                model(torch.randn(9, 5)).sum().backward()
            assert simdevice.stats().live_bytes > before.live_bytes
            model(torch.randn(9, 6))

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        calls()
    gc.collect()
    assert simdevice.stats().live_bytes_by_device == before.live_bytes_by_device
