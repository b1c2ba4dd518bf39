"""TupleParallel and tuple_fn on four simulated devices."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import TupleParallel, cat, tuple_fn
from tests.helpers.device_models import SIMS, assert_same_gradients, devices_of, mlp, rows


def test_outputs_stay_on_their_devices(closing):
    """Part i runs on device i, and its output stays there. The module gets the sum of the gradients."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    wrapped = closing(TupleParallel(model))
    parts = rows(10).split((4, 3, 2, 1))
    outputs = wrapped(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [plain(part.to("sim:0")).cpu() for part in parts])
    sum(output.square().sum().to("sim:0") for output in outputs).backward()
    plain(torch.cat(parts).to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_options_of_transfer(closing):
    model = mlp().to("sim:0")
    x = rows(8)
    moved = closing(TupleParallel(model, output_device=2, transfer_output=True))
    assert devices_of(moved(x.chunk(4))) == ["sim:2"] * 4
    for transfer in (False, True):
        joined = closing(TupleParallel(model, reduction=cat, transfer_output=transfer))
        torch.testing.assert_close(joined(x.chunk(4)), model(x.to("sim:0")))


def test_without_transfer_of_inputs(closing):
    """With `transfer_input=False`, no part is moved. A part on the wrong device raises torch's error."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, transfer_input=False))
    parts = [part.to(device) for part, device in zip(rows(8).chunk(4), SIMS, strict=True)]
    assert devices_of(wrapped(parts)) == SIMS
    with pytest.raises(RuntimeError, match="same device"):
        wrapped(parts[::-1])


@pytest.mark.parametrize("devices", [SIMS, 4], ids=str)
def test_tuple_fn_moves_its_parts(devices):
    double = tuple_fn(lambda x: x * 2, parallel=True, devices=devices)
    parts = rows(8).chunk(4)
    outputs = double(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [2 * part for part in parts])
    assert devices_of(double(parts[:2])) == SIMS[:2]
