"""Models for the tests on simulated devices, and comparisons of parallel calls with plain calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parawrap import parallel

SIMS = ["sim:0", "sim:1", "sim:2", "sim:3"]


def mlp() -> nn.Module:
    """Two linear layers in double precision."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def rows(count: int = 10, width: int = 5) -> Tensor:
    """A random batch on the CPU."""
    return torch.randn(count, width, dtype=torch.float64)


def side_stream(device: str = "sim:0") -> torch.Stream:
    """A stream that no lane uses and that is not the default stream.

    Lanes take their streams from torch's pool of the other priority.
    """
    stream: torch.Stream = torch.sim.Stream(device, priority=-1)
    return stream


def parameter_bytes(model: nn.Module) -> int:
    """Total bytes of all parameters. Tied parameters count once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by parameter name, copied to the CPU."""
    return {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Assert that each gradient equals the plain model's and lies on its parameter's device."""
    mine, theirs = gradients(model), gradients(plain)
    assert [name for name, g in mine.items() if g is None] == [name for name, g in theirs.items() if g is None]
    torch.testing.assert_close(
        {k: v for k, v in mine.items() if v is not None}, {k: theirs[k] for k in mine if mine[k] is not None}
    )
    assert all(p.grad is None or p.grad.device == p.device for p in model.parameters())


def assert_same_training_step(
    model: nn.Module,
    x: Tensor,
    devices: Any = SIMS,
    *,
    plain: nn.Module | None = None,
    loss: Callable[[Any], Tensor] = lambda output: output.square().sum(),
    **options: Any,
) -> None:
    """Assert that a training step in a block has the output, the output device, and the gradients of a plain copy."""
    home = next(model.parameters()).device
    plain = copy.deepcopy(model) if plain is None else plain
    expected = plain(x.to(home))
    loss(expected).backward()
    with parallel(model, devices, **options):
        for _ in range(2):  # the first call makes the replicas, the second reuses them
            model.zero_grad()
            output = model(x)
            loss(output).backward()
            torch.testing.assert_close(output, expected)
            assert_same_gradients(model, plain)


class Recurrent(nn.Module):
    """An LSTM and a GRU. torch keeps their weights in a list as well as in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True, dtype=torch.float64)
        self.gru = nn.GRU(4, 3, batch_first=True, bidirectional=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gru(self.lstm(x[:, None].expand(-1, 4, -1))[0])[0]
        return output[:, -1]


class Tied(nn.Module):
    """One weight matrix registered under two names and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.down = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        assert self.down.weight is self.up.weight, "the replica has untied the weights"
        return self.up(x).tanh() @ self.down.weight


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(5, 5, dtype=torch.float64)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(5, dtype=torch.float64))})

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = (x @ step).tanh()
        return x + self.named["shift"]


class Holder(nn.Module):
    """A linear layer with plain tensors (neither parameters nor buffers) in an attribute and in nested containers."""

    def __init__(self, home: str = "sim:0") -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64, device=home)
        self.scale = torch.rand(3, dtype=torch.float64, device=home)
        self.held = {"shift": [torch.rand(3, dtype=torch.float64, device=home)]}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.held["shift"][0]


class Masked(nn.Module):
    """A persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.register_buffer("scale", torch.rand(3, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.linear(x) * self.scale, 0.0)


class Locked(nn.Module):
    """A linear layer that holds a lock, which cannot be copied."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.lock = threading.Lock()

    def forward(self, x):
        with self.lock:
            return self.linear(x)


class Average(nn.Module):
    """Subtracts a running mean. Forward replaces the mean's buffer, or writes to it in place."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.linear = nn.Linear(5, 5, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x) - self.mean
        if self.in_place:
            self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        else:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return output


class Where(nn.Module):
    """Returns for each row the index of the device that it ran on; -1 is the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.bias.device
        return torch.full((len(x),), -1 if x.device.index is None else x.device.index, device=x.device) + self.bias


def devices_of(values: Sequence[Tensor]) -> list[str]:
    """Device names of tensors."""
    return [str(value.device) for value in values]
