"""The calls of the vendor's packages by the adapters: functions, order, and arguments."""

from __future__ import annotations

import pytest
import torch

from parawrap import DeviceUnavailableError, neuron
from parawrap.neuroncores import using
from tests.helpers.neuron_doubles import Around, Doubling, mlp, numbers, rows


def options_of(recorded, **given):
    """Return the options of a trace: that of torch_neuron enables dynamic batching if the model can
    use it.
    """
    return (
        {"dynamic_batch_size": True, **given} if recorded.runtime.name == "torch_neuron" else given
    )


def test_trace_passes_everything_on(recorded):
    """There is one call, with the same model, example, and options. The result is the vendor's."""
    model, x = mlp(), rows(2)
    compiled = recorded.runtime.trace(model, x, compiler_args=["--x"], compiler_workdir="here")
    ((name, traced, example, options),) = recorded.double.calls
    assert name == f"{recorded.runtime.name}.trace"
    assert traced is model
    assert example is x
    assert options == options_of(recorded, compiler_args=["--x"], compiler_workdir="here")
    assert isinstance(compiled, torch.jit.ScriptModule)


def test_examples_are_not_written(recorded):
    """The run that shows the shapes of the outputs leaves the user's examples alone."""
    x = -torch.ones(2, 3)
    recorded.runtime.trace(torch.nn.Sequential(torch.nn.ReLU(inplace=True)), x)
    assert x.tolist() == [[-1] * 3] * 2


def test_placing_uses_one_context(recorded):
    """One context places all cores and all compiled parts. The vendor never sees the modules around
    them.
    """
    compiled = recorded.runtime.trace(mlp(), rows(2))
    whole = Around(*(recorded.runtime.trace(mlp(), rows(2)) for _ in range(2)))
    recorded.double.calls.clear()
    recorded.runtime.place(compiled, 1, 3)
    with using(recorded.runtime):
        neuron.DataParallel(whole, [0, 1], set_dynamic_batching=False).close()
    package = recorded.double.package
    experimental = ".experimental" * ("experimental" in vars(package))
    context = f"{package.__name__}{experimental}.neuron_cores_context"
    load, left = ("torch.jit.load",), ("left",)
    assert recorded.double.calls == [(context, 1, 3), load, left, (context, 0, 2), load, load, left]


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_model_for_emulated_cores(recorded, monkeypatch):
    """The vendor would run it on the CPU. The error names the runtime that is in use."""
    monkeypatch.undo()
    compiled = recorded.host.trace(mlp(), rows(2))
    with pytest.raises(
        DeviceUnavailableError, match=r"emulated NeuronCores, .* uses the runtime torch_neuronx"
    ):
        recorded.runtime.place(compiled, 0, 1)


def test_trace_with_keyword_inputs(recorded, monkeypatch):
    """A trace without the parameter raises Python's error.

    The signature has the order of forward.
    """
    seen, (x, y) = [], numbers(2)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'example_inputs'"):
        recorded.runtime.trace(Doubling(), example_kwarg_inputs={"x": x, "y": y})

    def trace(func, example_inputs=None, *, example_kwarg_inputs=None, **options):
        seen.append((func, example_inputs, example_kwarg_inputs, options))
        compiled = recorded.host.trace(
            func, example_inputs, example_kwarg_inputs=example_kwarg_inputs
        )
        return (
            recorded.host.dynamic_batch(compiled) if "dynamic_batch_size" in options else compiled
        )

    monkeypatch.setattr(recorded.double.package, "trace", trace)
    model, example = Doubling(), {"y": y, "x": x}
    compiled = recorded.runtime.trace(model, example_kwarg_inputs=example, compiler_args=["--x"])
    assert seen == [(model, None, example, options_of(recorded, compiler_args=["--x"]))]
    assert recorded.runtime.signature(compiled).inputs == ((2, 2), (2, 2))
    x, y = numbers(5)
    torch.testing.assert_close(recorded.runtime.dynamic_batch(compiled)(y=y, x=x), model(x, y))
