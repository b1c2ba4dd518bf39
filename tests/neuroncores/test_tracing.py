"""Inputs by name. Tracing leaves the warning filters of the process and the user's module unchanged."""

from __future__ import annotations

import copy
import functools
import io
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import neuron, parallel
from parawrap.errors import ShapeError
from parawrap.neuroncores import TensorSpec


class Weighed(nn.Module):
    """Has parameters in another order than that of their names; one is keyword-only."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x, mask=None, *, bias=None):
        y = self.fc(x)
        y = y if mask is None else y * mask
        return {"y": y if bias is None else y + bias}


def inputs(rows):
    """Return all inputs of `Weighed`, with different shapes and in another order."""
    return {"bias": torch.randn(rows, 5), "x": torch.randn(rows, 3), "mask": torch.rand(rows, 1)}


@pytest.fixture
def weighed():
    return Weighed().eval()


def by_name(model):
    """Compile `Weighed` for two rows and all inputs by name."""
    return neuron.trace(model, example_kwarg_inputs=inputs(2))


def saved_and_loaded(model):
    file = io.BytesIO()
    neuron.save(model, file)
    return neuron.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(
    "through", [lambda model: model, copy.deepcopy, saved_and_loaded], ids=["traced", "copied", "loaded"]
)
def test_a_model_traced_by_name_takes_its_inputs_by_name(host, weighed, through):
    """The names may be in any order. A copy and a loaded model keep them."""
    given = inputs(2)
    assert_close(through(by_name(weighed))(**given), weighed(**given))


def test_inputs_by_name_may_be_a_subset(host, weighed):
    """Parameters without an example keep their defaults."""
    compiled = neuron.trace(weighed, example_kwarg_inputs={"bias": torch.zeros(2, 5), "x": torch.zeros(2, 3)})
    given = inputs(2)
    assert_close(compiled(x=given["x"], bias=given["bias"]), weighed(given["x"], bias=given["bias"]))


@pytest.mark.parametrize("rows", [2, 9, 1])
@pytest.mark.filterwarnings("ignore:.* NeuronCores busy")
@pytest.mark.parametrize("through", [lambda model: model, saved_and_loaded], ids=["traced", "loaded"])
def test_data_parallel_takes_inputs_by_name(host, weighed, rows, through):
    """Any number of rows is split over the cores."""
    given = inputs(rows)
    net = neuron.DataParallel(through(by_name(weighed)))
    assert_close(net(**given), weighed(**given))
    net.close()


def test_a_block_takes_inputs_by_name(host, weighed):
    """The call and `submit` in a block, with more rows than were compiled."""
    given = inputs(9)
    compiled = by_name(weighed)
    with parallel(compiled, ["nc:0", "nc:3"]) as p:
        assert_close(compiled(**given), weighed(**given))
        assert_close(p.submit(**given).result(), weighed(**given))


def test_dynamic_batching_keeps_names(host, weighed):
    """`dynamic_batch` of a model with inputs by name accepts any number of rows."""
    given = inputs(5)
    assert_close(neuron.dynamic_batch(by_name(weighed))(**given), weighed(**given))


def test_the_signature_has_names_in_the_order_of_forward(host, weighed):
    """A positional call has the same order, also over several cores."""
    compiled = by_name(weighed)
    assert host.signature(compiled).inputs == (
        TensorSpec((2, 3), torch.float32, 'kwargs["x"]'),
        TensorSpec((2, 1), torch.float32, 'kwargs["mask"]'),
        TensorSpec((2, 5), torch.float32, 'kwargs["bias"]'),
    )
    given = inputs(8)
    net = neuron.DataParallel(compiled)
    assert_close(net(given["x"], given["mask"], given["bias"]), net(**given))
    net.close()


def test_keyword_only_functions_and_nested_inputs_are_traced_by_name(host):
    """A function may take `**kwargs`, and an input may be a dict or a list."""
    compiled = neuron.trace(
        lambda **kwargs: kwargs["x"] + kwargs["past"]["k"][0],
        example_kwarg_inputs={"x": torch.zeros(2, 1), "past": {"k": [torch.zeros(2, 1)]}},
    )
    assert compiled(past={"k": [torch.full((2, 1), 2.0)]}, x=torch.ones(2, 1)).tolist() == [[3.0], [3.0]]


@pytest.mark.parametrize(
    "function",
    [Weighed().forward, functools.partial(Weighed(), bias=torch.ones(1)), torch.jit.script(nn.Bilinear(3, 1, 2))],
    ids=["a bound method", "a partial", "a scripted module"],
)
def test_other_callables_are_traced_by_name(host, function):
    """Anything that has named parameters can be traced by name."""
    names = ("input1", "input2") if isinstance(function, torch.jit.ScriptModule) else ("x", "mask")
    given = dict(zip(names, (torch.randn(2, 3), torch.randn(2, 1)), strict=True))
    assert_close(neuron.trace(function, example_kwarg_inputs=given)(**given), function(**given))


def test_a_module_around_passes_inputs_by_name(host, weighed):
    """The module around a compiled model may call it by name, also over several cores."""

    class Around(nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, **named):
            return self.compiled(**named)["y"]

    around, given = Around(by_name(weighed)), inputs(8)
    with parallel(around, ["nc:0", "nc:1"]):
        assert_close(around(**given), weighed(**given)["y"])


def test_a_function_with_inputs_by_name_closes_over_weights(host, weighed):
    """Its weights become constants, and still require gradients afterwards."""
    compiled = neuron.trace(lambda x: weighed(x)["y"], example_kwarg_inputs={"x": torch.zeros(2, 3)})
    assert_close(compiled(x=torch.ones(2, 3)), weighed(torch.ones(2, 3))["y"].detach())
    assert weighed.fc.weight.requires_grad


def test_other_shapes_are_refused_by_name(host, weighed):
    """The error names the keyword."""
    net = neuron.DataParallel(by_name(weighed))
    with pytest.raises(ShapeError, match=r'kwargs\["mask"\] is \(8, 2\)'):
        net(**{**inputs(8), "mask": torch.zeros(8, 2)})
    net.close()


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (({"x": torch.zeros(2, 3)},), {}, r"is a dict\. .* example_kwarg_inputs=\. .* one dict, .*\(inputs,\)"),
        ((), {}, "got neither of example_inputs and example_kwarg_inputs"),
        ((torch.zeros(2, 3),), {"example_kwarg_inputs": {}}, "got both of example_inputs and example_kwarg_inputs"),
        ((), {"example_kwarg_inputs": {}}, "the example has no tensors"),
        ((), {"example_kwarg_inputs": (torch.zeros(2, 3),)}, "example_kwarg_inputs is a tuple. Give a dict"),
        ((), {"example_kwarg_inputs": {"x": torch.zeros(2, 3), "mask": None}}, r'a NoneType at kwargs\["mask"\]'),
        ((), {"example_kwarg_inputs": {"z": torch.zeros(2, 3)}}, "unexpected keyword argument 'z'"),
    ],
    ids=["a dict by position", "neither", "both", "empty", "a tuple", "None", "unknown name"],
)  # fmt: skip
def test_wrong_examples_are_refused(host, weighed, args, kwargs, words):
    """The error names the option and the remedy."""
    with pytest.raises(TypeError, match=words):
        neuron.trace(weighed, *args, **kwargs)


def test_a_dict_in_a_tuple_is_the_only_argument(host):
    """A model that takes one dict is traced and called with it."""
    compiled = neuron.trace(lambda batch: batch["x"] * 2, ({"x": torch.zeros(2, 1)},))
    assert compiled({"x": torch.ones(2, 1)}).tolist() == [[2.0], [2.0]]


def test_concurrent_traces_leave_the_warning_filters_unchanged(host):
    """Warning filters are per process, so two threads must not restore each other's."""
    before, ready = list(warnings.filters), threading.Barrier(4)

    def trace(_):
        ready.wait(30)
        for _ in range(5):
            neuron.trace(nn.Linear(3, 2), torch.zeros(1, 3))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(trace, range(4)))
    assert warnings.filters == before


def test_saving_and_loading_hide_the_torchscript_deprecation(host):
    """torch.jit is deprecated, but users of NeuronCores cannot avoid it."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        neuron.save(neuron.trace(nn.ReLU(), torch.zeros(1, 3)), file)
        model = neuron.load(io.BytesIO(file.getvalue()))
    assert torch.equal(model(-torch.ones(1, 3)), torch.zeros(1, 3))
