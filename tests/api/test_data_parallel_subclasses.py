"""Subclasses of DataParallel, written as packages write subclasses of torch's class, work with the
import changed.
"""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, scatter_kwargs
from tests.helpers.calling import Calls

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
VERBS = ["scatter", "replicate", "parallel_apply", "gather"]
no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


@pytest.mark.parametrize("on_instance", [False, True], ids=["class", "instance"])
def test_overridden_verbs_are_used(on_instance):
    """Each call uses the four verbs in order, of a subclass or set on an instance."""
    called = []

    def recording(verb):
        def run(*args):
            called.append(verb)
            return getattr(DataParallel, verb)(*args)

        return run

    kind = (
        DataParallel
        if on_instance
        else type("Mine", (DataParallel,), {verb: recording(verb) for verb in VERBS})
    )
    net = kind(nn.Linear(4, 2), TWO)
    if on_instance:
        for verb in VERBS:
            setattr(net, verb, recording(verb).__get__(net))
    x = torch.randn(5, 4)
    assert_close(net(x), net.module(x))
    assert called == VERBS


@pytest.mark.parametrize("verb", ["forward", "replicate", "parallel_apply"])
def test_buffers_and_draws(verb):
    """The statistics of the first shard reach the module, and lanes draw in order, also after a
    call in eval mode.
    """

    def parents(*args):
        return getattr(DataParallel, verb)(*args)

    kind = type("Passing", (DataParallel,), {verb: parents})
    model = nn.BatchNorm1d(4)
    first, x = copy.deepcopy(model), torch.randn(9, 4)
    net = kind(model, TWO)
    for _ in range(2):
        net(x)
        first(x[:5])
    assert_close(dict(model.state_dict()), dict(first.state_dict()))
    net = kind(nn.Dropout(0.5), TWO)
    x = torch.ones(16, 16, requires_grad=True)
    net.eval()
    net(x)
    net.train()
    torch.manual_seed(0)
    expected = torch.cat([nn.functional.dropout(part) for part in x.split(8)])
    for _ in range(3):
        torch.manual_seed(0)
        assert torch.equal(net(x), expected)


class ListOfGraphs(DataParallel):
    """Takes a list of graphs, with its own scatter of two arguments, as PyTorch Geometric's class
    does.
    """

    def forward(self, graphs):
        if not self.device_ids:
            return self.module(torch.cat(graphs))
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            assert tensor.device == self.src_device_obj
        inputs = self.scatter(graphs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        return self.gather(self.parallel_apply(replicas, inputs, None), self.output_device)

    def scatter(self, graphs, device_ids):
        size = -(-len(graphs) // len(device_ids))
        return [torch.cat(graphs[i : i + size]) for i in range(0, len(graphs), size)]


@pytest.mark.parametrize("devices", [None, TWO, THREE], ids=str)
def test_lists_of_graphs_are_cut(devices):
    """Nodes keep their order, also with fewer graphs than devices."""
    net = ListOfGraphs(Calls(lambda nodes: nodes * 2), devices)
    for count in (5, 2, 1):
        graphs = [torch.randn(nodes, 4) for nodes in range(1, count + 1)]
        assert_close(net(graphs), torch.cat(graphs) * 2)


class Unpacking(DataParallel):
    """Unpacks lists with one chunk per device in `scatter`, also on the CPU as device -1, as mmcv's
    class does.
    """

    def forward(self, *inputs, **kwargs):
        if not self.device_ids:
            inputs, kwargs = self.scatter(inputs, kwargs, [-1])
            return self.module(*inputs[0], **kwargs[0])
        return super().forward(*inputs, **kwargs)

    def scatter(self, inputs, kwargs, device_ids):
        if isinstance(inputs[0], list):
            return tuple(zip(*inputs, strict=True)), tuple(dict(kwargs) for _ in inputs[0])
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)


@no_accelerator
@pytest.mark.parametrize("devices", [None, ["cpu"], TWO], ids=str)
def test_containers_are_unpacked(devices):
    x = torch.randn(5, 4)
    net = Unpacking(nn.Linear(4, 2), device_ids=devices)
    assert_close(net([x[:2], x[2:]] if devices == TWO else [x]), net.module(x))
    assert_close(net(x), net.module(x))


@pytest.mark.parametrize("devices", [["cpu"], TWO], ids=len)
def test_scatter_may_return_nothing(devices):
    """For a call without arguments, the module runs once."""
    kind = type("Empty", (DataParallel,), {"scatter": lambda *_: ((), ())})
    assert kind(Calls(lambda: torch.ones(2)), devices)().tolist() == [1, 1]
