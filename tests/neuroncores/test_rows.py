"""Rows in equal rows out, for batch sizes, numbers of cores, compiled sizes, and structures of inputs and outputs."""

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
    """A model with independent rows: no sum runs over columns, so its order cannot change."""

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
    """Holds a compiled model, because the compiler does not support namedtuples."""

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
    """Return the model of that kind, compiled for this batch size."""
    plain, example = KINDS[kind]
    if kind == "namedtuple":
        return OfNamed(neuron.trace(plain.compiled, torch.zeros(batch, 3)))
    leaves, spec = flatten(example(tensors(batch)))
    return neuron.trace(plain, unflatten(spec, leaves))


def assert_same(found, expected):
    """Check for equal structure and bitwise equal tensors. TorchScript returns plain containers."""
    leaves, spec = flatten(found)
    expected_leaves, expected_spec = flatten(expected)
    assert spec == expected_spec
    assert all(map(torch.equal, leaves, expected_leaves))


@pytest.mark.filterwarnings("ignore:.* rows? keeps? .* NeuronCores busy:UserWarning")
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_are_rows_out(kind, batch):
    """For 1 to 64 rows on 1 to 8 cores, the output equals the plain model's bit for bit."""
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
def test_rows_in_are_rows_out_on_cores_with_gaps(kind):
    """With one placed model per run of consecutive cores, the output also equals the plain model's."""
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
    """Each core gets exactly the compiled size, for any number of cores."""
    plain, example = KINDS[kind]
    with neuron_host(cores=8):
        model = compiled_for(kind, batch)
        for cores in range(1, 9):
            net = neuron.DataParallel(model, device_ids=list(range(cores)), set_dynamic_batching=False)
            call = example(tensors(cores * batch))
            assert_same(net(*call), plain(*call))
            net.close()
