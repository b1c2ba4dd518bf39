"""Rows in = rows out: every batch size, number of cores and compiled batch, for every shape of inputs and outputs."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from parawrap import neuron
from parawrap.testing import neuron_host
from parawrap.tree import flatten, unflatten

Pair = namedtuple("Pair", "first second")


class Double(nn.Module):
    """A row is what it is in any company: nothing is added up over columns in an order of the batch's."""

    def forward(self, x):
        return x * 2 + 1


class OfTuple(nn.Module):
    def forward(self, pair):
        return pair[0] * 2, pair[1] + pair[0].sum(1, keepdim=True)


class OfList(nn.Module):
    def forward(self, items):
        return [items[0] + items[1], items[1] * 3]


class OfDict(nn.Module):
    def forward(self, named):
        return {"sum": named["x"] + named["y"], "x": named["x"]}


class OfSeveral(nn.Module):
    def forward(self, x, y):
        return x - y, y


class Nested(nn.Module):
    def forward(self, x, rest):
        more, named = rest
        return x + named["y"], ([more[0] * 2, x], {"last": more[1] + 1}), ((x - 1,), more[1])


class OfNamed(nn.Module):
    """Holds a compiled model, as a user does whose inputs or outputs the compiler does not take."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def forward(self, pair):
        doubled = self.compiled(pair.first)
        return Pair(doubled, {"of": pair.second, "doubled": self.compiled(pair.second)})


def tensors(rows):
    while True:
        yield torch.randn(rows, 3)


def a_tensor(t):
    return (next(t),)


def a_tuple(t):
    return ((next(t), next(t)),)


def a_list(t):
    return ([next(t), next(t)],)


def a_dict(t):
    return ({"x": next(t), "y": next(t)},)


def several(t):
    return next(t), next(t)


def nested(t):
    return next(t), ([next(t), next(t)], {"y": next(t)})


def a_namedtuple(t):
    return (Pair(next(t), next(t)),)


KINDS = {
    "tensor": (Double(), a_tensor),
    "tuple": (OfTuple(), a_tuple),
    "list": (OfList(), a_list),
    "dict": (OfDict(), a_dict),
    "several arguments": (OfSeveral(), several),
    "nested": (Nested(), nested),
    "namedtuple": (OfNamed(Double()), a_namedtuple),
}


def compiled_for(kind, batch):
    """The model of that kind, compiled for so many rows."""
    plain, example = KINDS[kind]
    if kind == "namedtuple":
        return OfNamed(neuron.trace(plain.compiled, torch.zeros(batch, 3)))
    leaves, spec = flatten(example(tensors(batch)))
    return neuron.trace(plain, unflatten(spec, leaves))


def assert_same(found, expected):
    """Equal to the last bit, and of the same structure: TorchScript gives plain containers back."""
    leaves, spec = flatten(found)
    wanted, wanted_spec = flatten(expected)
    assert spec == wanted_spec
    assert all(map(torch.equal, leaves, wanted))


@pytest.mark.filterwarnings("ignore:.* rows? keeps? .* NeuronCores busy:UserWarning")
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_are_rows_out(kind, batch):
    """For 1 to 64 rows on 1 to 8 cores the output is the plain model's, row for row and bit for bit."""
    plain, example = KINDS[kind]
    with neuron_host(cores=8):
        model = compiled_for(kind, batch)
        for cores in range(1, 9):
            net = neuron.DataParallel(model, device_ids=list(range(cores)))
            for rows in (*range(1, 18), 31, 32, 33, 63, 64):
                call = example(tensors(rows))
                assert_same(net(*call), plain(*call))
            net.close()


@pytest.mark.filterwarnings("ignore:.* rows? keeps? .* NeuronCores busy:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_are_rows_out_on_cores_that_are_no_neighbours(kind):
    """With a replica for each run of cores the rows are the plain model's too."""
    plain, example = KINDS[kind]
    with neuron_host(cores=6):
        net = neuron.DataParallel(compiled_for(kind, 3), device_ids=[5, 0, 2])
        for rows in range(1, 40):
            call = example(tensors(rows))
            assert_same(net(*call), plain(*call))
        net.close()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_are_rows_out_without_dynamic_batching(kind, batch):
    """Each core gets exactly the compiled size, on any number of cores."""
    plain, example = KINDS[kind]
    with neuron_host(cores=8):
        model = compiled_for(kind, batch)
        for cores in range(1, 9):
            net = neuron.DataParallel(model, device_ids=list(range(cores)), set_dynamic_batching=False)
            call = example(tensors(cores * batch))
            assert_same(net(*call), plain(*call))
            net.close()
