"""The bytes of parameters copied between devices, counted on the simulated accelerator of the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks._measure import Row
from benchmarks._process import in_process
from parawrap import parallel

__all__ = ["count", "rows"]

_DEVICES = 4


def rows() -> list[Row]:
    """Measure a second inference call, and the first inference call after an optimizer step."""
    name = f"replicas: bytes copied, {_DEVICES} simulated devices"
    wanted = "0 bytes at the second call; 3 times the model (once per other device) after a step"
    found = in_process(f"{__name__}:count")
    if isinstance(found, str):
        return [Row(name, {}, f"not measured: {found}", wanted, held=True)]
    second, step = found
    verdict = f"{second} bytes of parameters at the second call; {step:g} times the model after a step"
    return [Row(name, {}, verdict, wanted, (second, step) == (0, 3.0))]


def count() -> tuple[int, float] | str:
    """Return the copied bytes and the copied multiples of the model, or the reason that nothing can be counted."""
    from tests import simdevice

    if (reason := simdevice.available()) is not None:
        return reason
    simdevice.install(_DEVICES)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size, x = sum(parameter.nbytes for parameter in model.parameters()), torch.randn(64, 64, device="sim:0")
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
