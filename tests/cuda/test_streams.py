"""The stream of each lane, and the stream of the caller."""

from __future__ import annotations

import copy

import pytest
import torch

from parawrap import parallel
from tests.cuda.gpus import HOME, cuda
from tests.cuda.zoo import Where
from tests.helpers.device_models import assert_same_gradients, mlp, rows


def test_gradients_on_callers_stream(devices):
    """Gradients are accumulated on the caller's stream, because torch warns about other streams."""
    model = Where().to(HOME)
    x = rows(13).to(HOME)
    stream = cuda.Stream(HOME)
    stream.wait_stream(cuda.current_stream(HOME))
    with parallel(model, devices), cuda.stream(stream):
        model(x).sum().backward()
    assert {each for device, each, _ in model.seen if device == 0} == {stream.stream_id}


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
