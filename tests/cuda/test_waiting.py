"""The host does not wait for GPUs in calls or training steps, and no data
passes through the host.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import cuda

from parawrap import parallel
from tests.cuda.gpus import HOME
from tests.cuda.zoo import NETS, net_and_rows
from tests.helpers.device_models import assert_same_gradients, mlp, rows

PLACES = ["pageable", "pinned", HOME]
SMALL, LARGE = 13, 1 << 14  # rows of a batch that is copied directly, and of one that is staged


@contextmanager
def torch_refuses_to_wait():
    """Have torch raise in all threads if the host would wait for a GPU inside this block."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once, that it does not detect everything
        cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode("default")


def placed(x, place):
    """Return the batch in the memory that the parameter names."""
    return x.pin_memory() if place == "pinned" else x if place == "pageable" else x.to(place)


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("place", PLACES)
def test_a_call_without_gradients(place, count, devices):
    """Neither the first nor a later call makes the host wait, and outputs are joined on the GPU."""
    model = mlp().to(HOME)
    x = rows(count)
    expected = copy.deepcopy(model)(x.to(HOME))
    x = placed(x, place)
    with torch.no_grad(), parallel(model, devices):
        with torch_refuses_to_wait():
            outputs = [model(x) for _ in range(3)]
        for output in outputs:
            torch.testing.assert_close(output, expected.detach())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("net", NETS)
def test_a_step_of_training(net, place, devices):
    """Call, backward pass, and refresh of replicas do not make the host wait."""
    model, x = net_and_rows(net, SMALL)
    plain = copy.deepcopy(model)
    at_home, x = x.to(HOME), placed(x, place)
    pairs = [
        (each, torch.optim.SGD(each.parameters(), lr=0.01), batch)
        for each, batch in ((model, x), (plain, at_home))
    ]
    with parallel(model, devices), torch_refuses_to_wait():
        for _ in range(3):
            for each, optimizer, batch in pairs:
                optimizer.zero_grad()
                each(batch).square().mean().backward()
                optimizer.step()
    assert_same_gradients(model, plain)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("place", PLACES)
def test_map(place, devices):
    """Streaming batches does not make the host wait, except to limit how far a lane runs ahead of
    its GPU.
    """
    model = mlp().to(HOME)
    batches = [rows(count) for count in (SMALL, LARGE, SMALL, LARGE, LARGE)]
    expected = [copy.deepcopy(model)(batch.to(HOME)).detach() for batch in batches]
    batches = [placed(batch, place) for batch in batches]
    with torch.no_grad(), parallel(model, devices) as p:
        with torch_refuses_to_wait():
            outputs = list(p.map(batches))
        torch.testing.assert_close(outputs, expected)
