"""Models for the tests on devices, and comparisons of parallel calls with plain calls."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parawrap import parallel

SIMS = ["sim:0", "sim:1", "sim:2", "sim:3"]


def mlp() -> nn.Module:
    """Return two linear layers.

    In double precision, the order of additions changes no result noticeably.
    """
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def rows(count: int = 10, width: int = 5) -> Tensor:
    """Return a random batch on the CPU."""
    return torch.randn(count, width, dtype=torch.float64)


def dropout(home: str) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double().to(home)


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


class Recurrent(nn.Module):
    """An LSTM and a GRU. torch keeps their weights in a list as well as in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, batch_first=True, dtype=torch.float64)
        self.gru = nn.GRU(4, 3, batch_first=True, bidirectional=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.gru(self.lstm(x[:, None].expand(-1, 4, -1))[0])[0]
        return output[:, -1]


class Holder(nn.Module):
    """A layer with buffers, and with plain tensors in an attribute and in nested containers."""

    def __init__(self, home: str = "sim:0") -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64, device=home)
        self.register_buffer("factor", torch.rand(3, dtype=torch.float64, device=home))
        self.register_buffer(
            "mask", torch.tensor([True, False, True], device=home), persistent=False
        )
        self.scale = torch.rand(3, dtype=torch.float64, device=home)
        self.held = {"shift": [torch.rand(3, dtype=torch.float64, device=home)]}

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.where(self.mask, self.linear(x) * self.factor, 0.0) * self.scale
            + self.held["shift"][0]
        )


def devices_of(values: Iterable[Tensor]) -> list[str]:
    return [str(value.device) for value in values]


def side_stream(device: str = "sim:0") -> torch.Stream:
    """Return a stream that no lane uses and that is not the default stream.

    Lanes take their streams from torch's pool of the other priority.
    """
    return torch.sim.Stream(device, priority=-1)


def settle() -> None:
    """Wait for all simulated devices, so that earlier work cannot affect what follows."""
    for device in SIMS:
        torch.sim.synchronize(device)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Assert that each gradient equals the plain model's, on any device, and lies on its
    parameter's device.
    """
    for (name, mine), (other, theirs) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        assert name == other
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert mine.grad.device == mine.device, name
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad.cpu())


def assert_same_training_step(model: nn.Module, x: Tensor, devices: Any) -> None:
    """Assert that a training step in a block has the output, the output device, and the gradients
    of a plain copy.
    """
    plain = copy.deepcopy(model)
    with parallel(model, devices):
        assert_same_steps(model, model, plain, x)


def assert_same_steps(called: nn.Module, model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Assert that steps with calls of `called` have the plain output and its device, and give
    `model` the gradients.
    """
    expected = plain(x.to(next(plain.parameters()).device))
    expected.square().sum().backward()
    for _ in range(2):  # the first call makes the replicas, the second reuses them
        model.zero_grad()
        output = called(x)
        output.square().sum().backward()
        torch.testing.assert_close(output, expected)
        assert_same_gradients(model, plain)
