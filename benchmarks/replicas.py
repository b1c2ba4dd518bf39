"""The cost of keeping replicas up to date: bytes copied between simulated devices, and checks
before a call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks._measure import Result, Row, take_turns
from benchmarks._process import in_process
from parawrap import parallel
from parawrap.engine.model_state import Snapshot
from parawrap.engine.survey import Survey

__all__ = ["count", "rows"]

_DEVICES = 4
_MOST_FOR_PARAMETERS_US = 60.0
_MOST_PER_MODULE_US = 1.5
_NORMS = 200
_MOST_FOR_NORMS_US = 2_000.0  # a third of what calls took that made new buffers


class _Holds(nn.Module):
    """Identity with parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def rows(rounds: int = 400) -> list[Row]:
    """Measure bytes copied, unchanged parameters, renewed statistics, and the check of the
    structure.
    """
    return [_copied(), _unchanged(rounds), _renewed(rounds // 4), _checked(rounds)]


def _renewed(rounds: int) -> Row:
    """Measure calls in training mode without gradients, as those that compute statistics anew after
    averaging weights.
    """
    model, x = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(_NORMS))), torch.randn(16, 8)
    with torch.no_grad(), parallel(model, ["cpu"] * 2, out_dims=0):
        arms = take_turns({"2 lanes": partial(model, x)}, rounds=rounds)
    result = Result("call in training mode", arms["2 lanes"].median_us, "us").held_to(
        "at most", _MOST_FOR_NORMS_US
    )
    return Row(f"replicas: statistics of {_NORMS} batch norms, 2 CPU lanes", arms, [result])


def _unchanged(rounds: int) -> Row:
    few, many, x = _Holds(2), _Holds(200), torch.zeros(8, 2)
    with (
        torch.no_grad(),
        parallel(few, ["cpu"] * 2, out_dims=0),
        parallel(many, ["cpu"] * 2, out_dims=0),
    ):
        arms = take_turns(
            {"2 parameters": partial(few, x), "200 parameters": partial(many, x)},
            rounds=rounds,
            calls=5,
        )
    added = arms["200 parameters"].median_us - arms["2 parameters"].median_us
    result = Result("time added by 198 unchanged parameters", added, "us").held_to(
        "at most", _MOST_FOR_PARAMETERS_US
    )
    return Row("replicas: 200 unchanged parameters, 2 CPU lanes", arms, [result])


def _checked(rounds: int) -> Row:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True), 12)
    modules = sum(1 for _ in model.modules())
    snapshot = Snapshot(Survey(model).places, lambda owner: owner, is_model=True)
    arms = take_turns({"check": snapshot.is_same}, rounds=rounds, calls=5)
    each = arms["check"].median_us / modules
    name = f"replicas: check of the structure, {modules} modules"
    return Row(
        name,
        arms,
        [Result("check, per module", each, "us").held_to("at most", _MOST_PER_MODULE_US)],
    )


def _copied() -> Row:
    """Measure a second inference call, and the first inference call after an optimizer step."""
    name = f"replicas: bytes copied, {_DEVICES} simulated devices"
    found = in_process(f"{__name__}:count")
    if isinstance(found, str):
        return Row(name, {}, [], note=f"not measured: {found}")
    return copied_row(name, *found)


def copied_row(name: str, second: float, step: float) -> Row:
    """Return the row for the bytes of the second call, and for the copies of the model after a
    step.
    """
    return Row(
        name,
        {},
        [
            Result("parameters that the second call copies", second, "bytes").held_to("exactly", 0),
            Result("copies of the model after a step", step, "count").held_to(
                "exactly", _DEVICES - 1
            ),
        ],
    )


def count() -> tuple[int, float] | str:
    """Return the bytes that the second call copies and the copies of the model after a step, or why
    none can be counted.
    """
    from tests import simdevice

    if (reason := simdevice.available()) is not None:
        return reason
    simdevice.install(_DEVICES)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size, x = (
        sum(parameter.nbytes for parameter in model.parameters()),
        torch.randn(64, 64, device="sim:0"),
    )
    rows_moved = (_DEVICES - 1) * (x.nbytes + 64 * 8 * 4) // _DEVICES

    def moved() -> Any:
        before = simdevice.stats().d2d_bytes
        model(x)
        return simdevice.stats().d2d_bytes - before

    with parallel(model, _DEVICES, out_dims=0):
        with torch.no_grad():
            moved()
            second = moved()
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            step, after = moved(), moved()
    return second - rows_moved, (step - after) / size
