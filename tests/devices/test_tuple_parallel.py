"""TupleParallel and tuple_fn on four simulated devices."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import ShardError, TupleParallel, cat, tp_collate, tuple_fn
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


def test_transfer_output(closing):
    """With `transfer_output=True`, all outputs are moved to `output_device`."""
    wrapped = closing(TupleParallel(mlp().to("sim:0"), output_device=2, transfer_output=True))
    assert devices_of(wrapped(rows(8).chunk(4))) == ["sim:2"] * 4


@pytest.mark.parametrize("transfer", [False, True])
def test_reduction(transfer, closing):
    """With `reduction=cat`, the outputs are joined on the first device."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, reduction=cat, transfer_output=transfer))
    x = rows(9)
    torch.testing.assert_close(wrapped(x.chunk(4)), model(x.to("sim:0")))


def test_without_transfer_of_inputs(closing):
    """With `transfer_input=False`, no part is moved. A part on the wrong device raises torch's error."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, transfer_input=False))
    parts = [part.to(device) for part, device in zip(rows(8).chunk(4), SIMS, strict=True)]
    assert devices_of(wrapped(parts)) == SIMS
    with pytest.raises(RuntimeError, match="same device"):
        wrapped(parts[::-1])


def test_more_parts_than_devices(closing):
    """TupleParallel refuses more parts than devices."""
    wrapped = closing(TupleParallel(mlp().to("sim:0")))
    with pytest.raises(ShardError, match="5 parts for 4 devices"):
        wrapped(rows(10).chunk(5))


def test_step_with_collated_batches(closing):
    """A training step with tp_collate, TupleParallel, and tuple_fn gives the plain gradients."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    wrapped = closing(TupleParallel(model))
    samples = [(x, x[:3].sin()) for x in rows(10)]
    collate = tp_collate(4)(lambda batch: tuple(map(torch.stack, zip(*batch, strict=True))))
    xs, ys = collate(samples)
    loss = tuple_fn(lambda output, y: (output - y.to(output.device)).square().sum())
    cat(loss(wrapped(xs), ys)).sum().backward()
    x, y = (torch.cat(parts).to("sim:0") for parts in (xs, ys))
    (plain(x) - y).square().sum().backward()
    assert_same_gradients(model, plain)


# ---------------------------------------------------------------- tuple_fn


@pytest.mark.parametrize("devices", [SIMS, 4, "sim"], ids=str)
def test_tuple_fn_moves_its_parts(devices):
    """`tuple_fn(parallel=True, devices=...)` runs part i on device i."""
    double = tuple_fn(lambda x: x * 2, parallel=True, devices=devices)
    parts = rows(8).chunk(4)
    outputs = double(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [2 * part for part in parts])
    assert devices_of(double(parts[:2])) == SIMS[:2]


def test_tuple_fn_gradients():
    """Gradients flow through a parallel tuple_fn back to parts on the CPU."""
    x = rows(8).requires_grad_()
    square = tuple_fn(lambda x: x.square().sum(), parallel=True, devices=SIMS)
    sum(loss.cpu() for loss in square(x.chunk(4))).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_tuple_fn_errors_name_the_device():
    """An error in a part gains a note with the lane and its device. More parts than devices raise an error."""

    def fragile(x):
        if x == 2:
            raise KeyError("mine")
        return x

    run = tuple_fn(fragile, parallel=True, devices=SIMS)
    with pytest.raises(KeyError, match="mine") as caught:
        run((0, 1, 2, 3))
    assert "in lane 2 on sim:2, shard 2 of 4" in caught.value.__notes__
    with pytest.raises(ShardError, match="5 parts for 4 devices"):
        run((0,) * 5)
