"""The stream of each lane, and the stream of the caller."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from parawrap import parallel
from tests.cuda.gpus import HOME, TWICE, cuda, every
from tests.cuda.zoo import Where
from tests.helpers.device_models import assert_same_gradients, mlp, rows


def test_each_lane_has_its_own_stream():
    """Without gradients, each lane has one stream, different from the caller's and from those of other lanes."""
    model = Where().to(HOME)
    with torch.no_grad(), parallel(model, TWICE):
        model(rows(9))
        first = sorted(model.seen)
        model.seen.clear()
        model(rows(9))
    caller = cuda.current_stream(HOME).stream_id
    assert len({stream for _, stream, _ in first}) == 2
    assert caller not in {stream for _, stream, _ in first}
    assert sorted(model.seen) == first


def test_lanes_use_the_callers_stream_under_gradients(devices):
    """Gradients are accumulated on the caller's stream, because torch warns about other streams."""
    model = Where().to(HOME)
    x = rows(13).to(HOME)
    stream = cuda.Stream(HOME)
    stream.wait_stream(cuda.current_stream(HOME))
    with parallel(model, devices), cuda.stream(stream):
        model(x).sum().backward()
    assert {each for device, each, _ in model.seen if device == 0} == {stream.stream_id}


@pytest.mark.parametrize("grad", [True, False])
def test_the_caller_keeps_its_device_and_streams(grad, devices):
    """A call, also a failed one, does not change the caller's current device and streams."""
    model = mlp().to(HOME)
    stream = cuda.Stream(every()[-1])
    elsewhere = [cuda.current_stream(device) for device in every()[:-1]]
    with torch.set_grad_enabled(grad), parallel(model, devices), cuda.stream(stream):
        for width, raises in ((5, nullcontext()), (4, pytest.raises(RuntimeError))):
            with raises:
                model(rows(13, width))
            assert cuda.current_device() == len(every()) - 1
            assert cuda.current_stream(every()[-1]) == stream
            assert [cuda.current_stream(device) for device in every()[:-1]] == elsewhere


@pytest.mark.parametrize("grad", [True, False])
def test_a_caller_on_another_stream(grad, devices):
    """Lanes run after the work that the caller queued before the call, and before the work that it queues later."""
    model = mlp().to(HOME)
    plain = copy.deepcopy(model)
    stream = cuda.Stream(HOME)
    cuda.synchronize(HOME)
    with parallel(model, devices), cuda.stream(stream), torch.set_grad_enabled(grad):
        for _ in range(3):
            x = rows(13).pin_memory().to(HOME, non_blocking=True)
            for each in (model, plain):
                with torch.no_grad():
                    each[2].bias.add_(x.mean())
            output, expected = model(x), plain(x)
            torch.testing.assert_close(output, expected)
            if grad:
                output.square().sum().backward()
                expected.square().sum().backward()
                assert_same_gradients(model, plain)
