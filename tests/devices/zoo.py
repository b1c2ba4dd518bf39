"""The models of these tests, and the comparison of a parallel call with the plain one."""

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
    """A batch on the CPU."""
    return torch.randn(count, width, dtype=torch.float64)


def side_stream(device: str = "sim:0") -> torch.Stream:
    """A stream that is neither the default one nor any lane's: those come from the pool of the other priority."""
    stream: torch.Stream = torch.sim.Stream(device, priority=-1)
    return stream


def parameter_bytes(model: nn.Module) -> int:
    """The bytes of all parameters, tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The gradients by parameter name, on the CPU."""
    return {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Each gradient equals the plain model's; each lies where its parameter does."""
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
    """A call in a block answers as a plain copy of the model does where the model is, and gives its gradients."""
    home = next(model.parameters()).device
    plain = copy.deepcopy(model) if plain is None else plain
    expected = plain(x.to(home))
    loss(expected).backward()
    with parallel(model, devices, **options):
        for _ in range(2):  # the first call makes the replicas, the second has them
            model.zero_grad()
            output = model(x)
            loss(output).backward()
            torch.testing.assert_close(output, expected)
            assert_same_gradients(model, plain)


class Recurrent(nn.Module):
    """Both kinds of recurrent layer, whose weights are kept a second time in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True, dtype=torch.float64)
        self.gru = nn.GRU(4, 3, batch_first=True, bidirectional=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gru(self.lstm(x[:, None].expand(-1, 4, -1))[0])[0]
        return output[:, -1]


class Tied(nn.Module):
    """One matrix used twice, under two names."""

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
    """A linear layer, and tensors that are neither parameters nor buffers: an attribute, and some in containers."""

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
    """A linear layer that holds a lock, which nothing can copy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)
        self.lock = threading.Lock()

    def forward(self, x):
        with self.lock:
            return self.linear(x)


class Average(nn.Module):
    """Subtracts a running mean, kept in a buffer that forward replaces, or writes in place."""

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
    """Answers with the index of the device that each row was on; -1 is the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.bias.device
        return torch.full((len(x),), -1 if x.device.index is None else x.device.index, device=x.device) + self.bias


def devices_of(values: Sequence[Tensor]) -> list[str]:
    """The devices of tensors, as strings."""
    return [str(value.device) for value in values]
