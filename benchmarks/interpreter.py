"""Two lanes for a model that the interpreter's lock holds up: what helps, and what does not.

The model is a chain of small operators, as recurrent cells and heads of many parts are: nearly all of a call is Python.
Ways around the lock are compared: a trace (the same operators from C++), processes over shared memory, both with two lanes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from benchmarks._measure import Row, take_turns
from parawrap import parallel

__all__ = ["rows"]

_OPERATORS = (80, 800)
_ROWS = 16
_LANES = 2


class SmallOperators(nn.Module):
    """So many operators on vectors of 64."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.operators // 2):
            x = torch.tanh(x * 0.5)
        return x


def rows() -> list[Row]:
    """A short and a long model: plain, and two lanes as threads, as threads with a trace, and as processes."""
    return [_row(operators) for operators in _OPERATORS]


def _row(operators: int) -> Row:
    x = torch.randn(_ROWS, 64)
    plain, traced = SmallOperators(operators).eval(), _traced(operators, x)
    in_lanes, traced_in_lanes = SmallOperators(operators).eval(), _traced(operators, x[: _ROWS // _LANES])
    with (
        torch.no_grad(),
        _process(operators) as other,
        parallel(in_lanes, ["cpu"] * _LANES, plan="lanes"),
        parallel(traced_in_lanes, ["cpu"] * _LANES, plan="lanes") as p,
    ):
        arms = take_turns(
            {
                "plain": lambda: plain(x),
                "two lanes": lambda: in_lanes(x),
                "plain, traced": lambda: traced(x),
                "two lanes, traced": lambda: p(x),
                "two processes over shared memory": lambda: other(plain, x),
            },
            rounds=100,
            calls=3,
            settle=3,
        )
    ratios = {name: arms["plain"].median_us / arm.median_us for name, arm in arms.items() if name != "plain"}
    verdict = "times as fast as plain: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    name = f"off the interpreter's lock: {operators} operators on {_ROWS} x 64"
    limit = "cores: 2.00 of one thread's work"
    return Row(name, arms, verdict, "reported", held=True, peers=f"torch {torch.__version__}", extra={"limit": limit})


def _traced(operators: int, x: torch.Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(SmallOperators(operators).eval(), (x,))


@contextmanager
def _process(operators: int) -> Iterator[Any]:
    """A function that runs half of the rows in another process, through memory that both have, and half here."""
    half = _ROWS // _LANES
    given, returned = torch.empty(half, 64).share_memory_(), torch.empty(half, 64).share_memory_()
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=_serve, args=(theirs, operators, given, returned), daemon=True)
    process.start()

    def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        given.copy_(x[half:])
        ours.send_bytes(b"go")
        first = model(x[:half])
        ours.recv_bytes()
        return torch.cat([first, returned])

    try:
        yield call
    finally:
        ours.send_bytes(b"end")
        process.join()


def _serve(pipe: Connection, operators: int, given: torch.Tensor, returned: torch.Tensor) -> None:
    torch.set_num_threads(1)
    model = SmallOperators(operators).eval()
    with torch.no_grad():
        while pipe.recv_bytes() == b"go":
            returned.copy_(model(given))
            pipe.send_bytes(b"done")
