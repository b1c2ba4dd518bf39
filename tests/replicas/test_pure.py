"""Scripted modules that write nothing: all lanes of a device run the module itself; any other has its replicas."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.replicas._pure import writes_nothing

X = torch.randn(6, 4)


class Branches(nn.Module):
    """Decides, loops, makes lists and tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.LayerNorm(4))
        self.rounds = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            raise ValueError("no rows")
        for _ in range(self.rounds):
            x = self.inner(x)
        low, high = x.min(), x.max()
        return torch.cat([x - low, x - high], 1)


class Counts(nn.Module):
    """Writes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Sums(nn.Module):
    """Writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return x + self.total


class Collects(nn.Module):
    """Writes a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.jit.Attribute([torch.zeros(1)], list[torch.Tensor])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return x * len(self.seen)


class WritesItsInput(nn.Module):
    """Which may be a part of the module: nobody looks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(1)


class Forks(nn.Module):
    """Runs a part that nobody looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Counts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.jit.wait(torch.jit.fork(self.part, x))


class WritesElsewhere(nn.Module):
    """Writes in a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    @torch.jit.export
    def reset(self) -> None:
        self.factor = 0


class LeavesAMethodToPython(nn.Module):
    """Has a way in that nobody compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @torch.jit.ignore
    def predict(self, x):
        self.scale = x.max().reshape(1)
        return self.forward(x)


class Scripted(torch.jit.ScriptModule):
    """Is scripted from the start, and has a method in Python beside."""

    @torch.jit.script_method
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def predict(self, x):
        self.flag = x.max()
        return self(x)


def norm_in_train_mode():
    return torch.jit.script(nn.BatchNorm1d(4))


def traced_norm_in_train_mode():
    with warnings.catch_warnings():  # that how many rows it may have is not traced
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(nn.BatchNorm1d(4), X, check_trace=False)


PURE = {
    "script": lambda: torch.jit.script(Branches()),
    "script in eval mode": lambda: torch.jit.script(Branches().eval()),
    "trace": lambda: torch.jit.trace(Branches().eval().inner, X),
    "frozen": lambda: torch.jit.freeze(torch.jit.script(Branches().eval())),
    "traced norm in eval mode": lambda: torch.jit.trace(nn.BatchNorm1d(4).eval(), X),
}
WRITING = {
    "number": lambda: torch.jit.script(Counts()),
    "number of a child": lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), Counts())),
    "buffer": lambda: torch.jit.script(Sums()),
    "list": lambda: torch.jit.script(Collects()),
    "in place": lambda: torch.jit.script(WritesItsInput()),
    "fork": lambda: torch.jit.script(Forks()),
    "a method in Python": lambda: torch.jit.script(LeavesAMethodToPython()),
    "a class of one's own": Scripted,
    "another method": lambda: torch.jit.script(WritesElsewhere()),
    "norm": norm_in_train_mode,
    "traced norm": traced_norm_in_train_mode,
    "norm in eval mode, which may change": lambda: torch.jit.script(nn.BatchNorm1d(4).eval()),
}


@pytest.mark.parametrize("make", PURE.values(), ids=PURE)
def test_a_module_whose_code_writes_nothing_is_found(make):
    """Scripted, traced, frozen."""
    assert writes_nothing(make())


@pytest.mark.parametrize("make", WRITING.values(), ids=WRITING)
def test_a_module_whose_code_may_write_is_found(make):
    """A number, a buffer, a list, running statistics, or what cannot be looked into."""
    assert not writes_nothing(make())


def test_an_eager_module_is_never_taken_for_one_that_writes_nothing():
    """Its code is not known."""
    assert not writes_nothing(nn.Linear(4, 4))


@pytest.mark.parametrize("make", PURE.values(), ids=PURE)
def test_all_lanes_run_the_module_itself(make):
    """No copy of it is made, and whole calls give the plain answer in each of them."""
    model = make().eval()
    with torch.no_grad():
        expected = model(X)
        with parallel(model, ["cpu"] * 3) as p:
            outputs = list(p.map([X] * 12))
            assert [replica.module for replica in p._opened().replicate()] == [model] * 3
    assert_close(outputs, [expected] * 12)


def test_gradients_of_a_shared_module_are_the_plain_ones():
    """All lanes have the very parameters."""
    model = torch.jit.script(nn.Linear(4, 4))
    model(X).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with parallel(model, ["cpu"] * 3):
        model(X).square().sum().backward()
    assert_close([parameter.grad for parameter in model.parameters()], expected)
