"""Outputs and gradients equal the plain ones, for all devices, models, and modes of the caller."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
from torch import cuda, nn
from torch.utils.checkpoint import checkpoint

from parawrap import DataParallel, parallel
from tests.cuda.gpus import HOME, ONE, every
from tests.cuda.zoo import NETS, conv_net, net_and_rows
from tests.helpers.device_models import (
    assert_same_gradients,
    assert_same_training_step,
    dropout,
    mlp,
    rows,
)


@pytest.mark.parametrize("count", [17, 1])
@pytest.mark.parametrize("place", ["cpu", HOME])
@pytest.mark.parametrize("net", NETS)
def test_outputs_and_gradients(net, place, count, devices):
    model, x = net_and_rows(net, count)
    assert_same_training_step(model, x.to(place), devices)


def test_checkpoints_repeat_the_masks(devices):
    """With and without checkpointing, a seed gives the same gradients."""

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    plain = dropout(HOME)
    model = Checkpointed(*copy.deepcopy(plain))
    x = rows(4 * len(devices) + 1)
    for each in (model, plain):
        with parallel(each, devices):
            for seed in range(3):
                torch.manual_seed(seed)
                each(x).square().sum().backward()
    assert_same_gradients(model, plain)


@pytest.mark.usefixtures("every_warning")
def test_products_as_first_work():
    """Nothing warns if a matrix product is the first GPU work of a thread."""
    model = nn.Linear(64, 64, dtype=torch.float64).to(HOME)
    x = torch.randn(8, 64, dtype=torch.float64, device=HOME)
    expected = model(x)
    for _ in range(2):  # there is memory for all that comes, and streams to choose from
        model(x)
        cuda.Stream(HOME)
    with parallel(model, ONE) as p:
        torch.testing.assert_close(p.submit(x).result(), expected)


@pytest.mark.parametrize("train", [True, False])
def test_equals_data_parallel_of_torch(train):
    """Two lanes on one GPU give the outputs, gradients, and names of torch.nn.DataParallel, and in
    eval mode the buffers.

    In train mode, both of torch's lanes on one GPU write the module's buffers. Here lane 0 alone
    does, as on two GPUs.
    """
    module = conv_net().to(HOME).train(train)
    theirs = nn.DataParallel(copy.deepcopy(module), device_ids=[0, 0])
    with closing(DataParallel(module, device_ids=[0, 0])) as mine:
        for _ in range(3):
            x = torch.randn(8, 2, 6, 6, dtype=torch.float64, device=HOME)
            outputs = [each(x) for each in (mine, theirs)]
            for output in outputs:
                output.square().sum().backward()
            torch.testing.assert_close(*outputs)
            assert_same_gradients(mine, theirs)
        assert list(mine.state_dict()) == list(theirs.state_dict())
        assert mine.state_dict()["module.1.num_batches_tracked"] == (3 if train else 0)
        if not train:
            torch.testing.assert_close(mine.state_dict(), theirs.state_dict())


def test_all_gpus_are_the_default():
    """A block without devices, or with the kind alone, has one lane per GPU."""
    for devices in (None, "auto", "cuda"):
        assert [str(device) for device in parallel(mlp(), devices).devices] == every()
