"""The simulated accelerator behaves as several separate devices do."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from . import available, install, reset_stats, stats


@pytest.fixture(autouse=True)
def _no_races(sim: ModuleType) -> Iterator[None]:
    """Fail a test that leaves a race behind: these use one stream per device."""
    yield
    assert stats().races == ()


def conv_net() -> nn.Module:
    """A small convolutional classifier with batch normalisation."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def encoder() -> nn.Module:
    """A small transformer encoder with dropout."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def recurrent() -> nn.Module:
    """Both kinds of recurrent layer."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
            self.gru = nn.GRU(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.gru(self.lstm(x)[0])[0]
            return output[:, -1]

    return Last()


# ---------------------------------------------------------------- installing


def test_install_twice(sim):
    """A second install returns the same module, and raises when asked for another number of devices."""
    assert install() is sim
    assert available() is None
    with pytest.raises(ValueError, match="4 simulated devices are installed, not 2"):
        install(2)


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("other", ["sim:1", "cpu"])
@pytest.mark.parametrize(
    "operator",
    [torch.add, torch.mm, torch.Tensor.add_, nn.functional.linear, lambda a, b: torch.cat([a, b])],
    ids=["add", "mm", "add_", "linear", "cat"],
)
def test_mixed_devices_raise(operator: Callable[[Tensor, Tensor], Tensor], other: str) -> None:
    """An operator over tensors of two devices raises, naming both."""
    a, b = torch.ones(2, 2, device="sim:0"), torch.ones(2, 2, device=other)
    for x, y in ((a, b), (b, a)):
        with pytest.raises(RuntimeError, match="same device, but found at least two devices") as error:
            operator(x, y)
        assert str(a.device) in str(error.value)
        assert str(b.device) in str(error.value)


def test_invalid_ordinal_raises(sim):
    """A device past the last one cannot be allocated on, copied to or made current."""
    attempts: list[Callable[[], object]] = [
        lambda: torch.empty(1, device="sim:4"),
        lambda: torch.ones(1).to("sim:4"),
        lambda: nn.Linear(1, 1).to("sim:9"),
        lambda: sim.set_device(4),
        lambda: torch.accelerator.set_device_index(4),
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            attempt()
    assert sim.current_device() == 0


def test_current_device_per_thread(sim):
    """The current device takes what names no ordinal, and each thread has its own."""
    seen: list[int] = []
    with sim.device("sim:3"):
        seen.append(torch.empty(1, device="sim").device.index)
        thread = threading.Thread(target=lambda: seen.append(torch.empty(1, device="sim").device.index))
        thread.start()
        thread.join()
    seen.append(sim.current_device())
    assert seen == [3, 0, 0]


# ---------------------------------------------------------------- counters


def test_copies_are_counted_exactly():
    """Each copy across devices counts once, with the bytes that arrive, and nothing else counts."""
    host = torch.ones(3, 5)
    reset_stats()
    x = host.to("sim:0")  # 60 bytes in
    y = x.to("sim:1", non_blocking=True)  # 60 across
    y.to("sim:2", torch.float64)  # 120 across
    y.cpu()  # 60 out
    y.t()[:2].cpu()  # 24 out
    y.clone().add_(1).mul(y).sum()
    y.to("sim:1")
    torch.empty(0).to("sim:0")
    assert y.sum().item() == 15
    now = stats()
    assert (now.h2d, now.h2d_bytes) == (1, 60)
    assert (now.d2d, now.d2d_bytes) == (2, 180)
    assert (now.d2h, now.d2h_bytes) == (2, 84)
    assert now.scalar_reads == 1
    reset_stats()
    now = stats()
    assert (now.h2d, now.d2h_bytes, now.d2d, now.scalar_reads, now.operators) == (0, 0, 0, 0, 0)


def test_live_memory():
    """Live allocations are counted on their device, from their making to their end."""
    before = stats()
    x = torch.empty(100, device="sim:2")
    y = x[10:].view(9, 10)
    during = stats()
    assert during.live - before.live == 1
    assert during.live_bytes_by_device[2] - before.live_bytes_by_device[2] == 400
    del x
    assert stats().live == during.live
    del y
    assert stats() == before


# ---------------------------------------------------------------- operators


def test_gradient_flows_across_devices():
    """A backward pass follows the copies between devices back to each leaf's own."""
    a = torch.tensor([2.0, 3.0], device="sim:0", requires_grad=True)
    b = torch.tensor([5.0, 7.0], requires_grad=True)
    reset_stats()
    torch.autograd.backward(((a * a).to("sim:1") * b.to("sim:1")).to("sim:2").sum())
    now = stats()
    assert (now.h2d, now.d2h, now.d2d) == (1, 1, 4)
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.device == a.device
    assert a.grad.tolist() == [20, 42]
    assert b.grad.tolist() == [4, 9]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(("make", "shape"), [(conv_net, (4, 2, 6, 6)), (encoder, (3, 5, 8)), (recurrent, (3, 5, 3))])
def test_training_equals_cpu(
    make: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: type[torch.optim.Optimizer]
) -> None:
    """Training steps on a device lead to the CPU's parameters, buffers and loss."""
    torch.manual_seed(0)
    on_cpu = make().double()
    on_sim = copy.deepcopy(on_cpu).to("sim:3")
    x = torch.randn(shape, dtype=torch.float64)
    losses = []
    for model in (on_cpu, on_sim):
        torch.manual_seed(1)
        steps = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        inputs = x.to(next(model.parameters()).device)
        for _ in range(3):
            steps.zero_grad()
            output = model(inputs)
            loss = (output - torch.linspace(-1, 1, output.shape[-1]).to(output)).square().mean()
            loss.backward()
            steps.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    expected, actual = on_cpu.state_dict(), on_sim.state_dict()
    assert {t.device for t in actual.values()} == {torch.device("sim:3")}
    torch.testing.assert_close({name: t.cpu() for name, t in actual.items()}, dict(expected), rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------- modules
