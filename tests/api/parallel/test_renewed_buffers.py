"""Lanes renew their buffers for each call.

Whatever else holds one keeps its values, and gradients stay right.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

from parawrap import parallel

TWO = ["cpu"] * 2
BATCHES = [torch.randn(9, 3) * (i + 1) + i for i in range(4)]
put_back = pytest.mark.filterwarnings("ignore:the model wrote")


def norms():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))


@dataclass
class Found:
    table: torch.Tensor


class Returns(nn.Module):
    """A model of batch norms that returns statistics next to its rows, in some form."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = norms(), form

    def forward(self, x):
        y = self.net(x)
        return y, self.form(self.net[0].running_mean)


FORMS = {
    "itself": lambda table: table,
    "view": lambda table: table[:2],
    "dict": lambda table: {"deep": [table]},
    "dataclass": lambda table: Found(table.view(3, 1)),
}


def flat(output):
    y, table = output
    table = table["deep"][0] if isinstance(table, dict) else table
    return [y, table.table if isinstance(table, Found) else table]


@put_back
@torch.no_grad()
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_returned_buffers(form):
    """A buffer of a lane in an output, also a view of it or one inside an object, is whole after
    later calls.
    """
    model = Returns(form)
    plain = copy.deepcopy(model)
    with parallel(model, TWO, join="list") as p:
        cut = [model(x)[0] for x in BATCHES]
        sizes = p.stats().shards
    expected = [flat(copy.deepcopy(plain(x[: sizes[0]]))) for x in BATCHES]
    assert_close([flat(output) for output in cut], expected)
    start = copy.deepcopy(model)
    with parallel(model, TWO) as p:
        streamed = [flat(output) for output in p.map(BATCHES)]
        streamed += [flat(future.result()) for future in [p.submit(x) for x in BATCHES]]
    assert_close(streamed, [flat(copy.deepcopy(start)(x)) for x in BATCHES] * 2)


def keep(kept, module):
    if isinstance(module, nn.BatchNorm1d):
        kept += [module.running_mean, module.running_var]


@put_back
@torch.no_grad()
@pytest.mark.parametrize("kind", ["hook of a layer", "global hook", "argument", "prepare"])
def test_kept_buffers_stay_the_same(kind):
    """Code of the user's that runs in a lane may keep a buffer. No later call writes it."""
    model, kept = norms(), []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            kept.extend(each for each in args if type(each) is torch.Tensor)
            return super().__torch_function__(function, types, args, kwargs or {})

    def prepare(x, layer=model[0]):
        keep(kept, layer)
        return x

    def hook(module, args, output):
        keep(kept, module)

    with parallel(model, TWO, out_dims=0) as p:
        model(BATCHES[0])
        if kind == "hook of a layer":
            handle = model[0].register_forward_hook(hook)
            model(BATCHES[1])
            handle.remove()
        elif kind == "global hook":
            handle = register_module_forward_hook(hook)
            model(BATCHES[1])
            handle.remove()
        elif kind == "argument":
            model(BATCHES[1].as_subclass(Watched))
        else:
            assert len([*p.map(BATCHES, prepare=prepare)]) == len(BATCHES)
        assert kept
        values = [*map(torch.clone, kept)]
        for x in BATCHES:
            model(x)
        assert_close(kept, values)


@pytest.mark.filterwarnings("ignore:a model in eval mode is called with gradients")
@pytest.mark.parametrize("between", ["cut", "map"])
def test_graphs_keep_buffers(between):
    """Calls without gradients, in training mode, may come between a forward and its backward."""
    model = norms()
    plain = copy.deepcopy(model)
    with parallel(model.eval(), TWO, out_dims=0) as p:
        for _ in range(3):
            outputs = [model(BATCHES[0])] if between == "cut" else [*p.map(BATCHES[:1])]
            with torch.no_grad():
                model.train()
                for x in BATCHES:
                    model(x)
            sizes = p.stats().shards
            outputs[0].square().sum().backward()
            plain.eval()(BATCHES[0]).square().sum().backward()
            with torch.no_grad():
                plain.train()
                for x in BATCHES:
                    plain(x[: sizes[0]])
            model.eval()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(mine.grad, theirs.grad)


@torch.no_grad()
def test_statistics_between_calls():
    """Lanes start from the statistics that the model has now, whatever wrote them, also new memory
    and another dtype.
    """
    model = norms()
    changes = {
        "reset": lambda net: net[0].reset_running_stats(),
        "quiet write": lambda net: net[0].running_mean.data.fill_(3),
        "new data": lambda net: setattr(net[0].running_var, "data", torch.full((3,), 2.0)),
        "new buffer": lambda net: setattr(net[2], "running_mean", torch.ones(3)),
        "doubles": lambda net: net.double(),
        "plain call": lambda net: net(BATCHES[3][:1].repeat(3, 1).to(net[1].weight.dtype)),
        "attribute": lambda net: setattr(net[0], "momentum", 0.5),
    }
    plain = copy.deepcopy(model)
    with parallel(model, TWO, out_dims=0) as p:
        for change in (lambda net: None, *changes.values()):
            for x in BATCHES[:2]:
                x = x.to(model[1].weight.dtype)
                output = model(x)
                parts = x.split(p.stats().shards)
                assert_close(output[: len(parts[0])], plain(parts[0]), rtol=1e-5, atol=1e-5)
                assert_close(
                    dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-5
                )
            if change is changes["plain call"]:
                change(model[:])  # layers alone, of which the block knows nothing
            else:
                change(model)
            change(plain)


@torch.no_grad()
def test_batch_norms_without_statistics():
    """Batch norms without statistics normalize the rows of their lane in both modes, and have
    nothing to renew.
    """
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 3))
    with parallel(model, TWO, out_dims=0) as p:
        for x in BATCHES:
            output = model(x)
            assert_close(output, torch.cat([model[:](part) for part in x.split(p.stats().shards)]))
            suspect = model[:](x)  # a plain call of layers, in training mode
            assert suspect.shape == output.shape
