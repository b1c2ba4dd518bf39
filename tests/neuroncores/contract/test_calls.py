"""The calls of the vendor's packages by the adapters: functions, order, and arguments."""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parawrap import neuron
from parawrap.errors import DeviceUnavailableError, ReplicaError, ShapeError
from parawrap.neuroncores import using
from parawrap.neuroncores._vendor_runtimes import TorchNeuronx
from parawrap.testing import neuron_host
from tests.neuroncores.contract.doubles import Double
from tests.neuroncores.contract.models import Around, Doubling, mlp, numbers, rows


@pytest.fixture
def calls(recorded):
    """The calls of the vendor's package so far."""
    return recorded.double.calls


@pytest.fixture
def context(recorded):
    """The name of the placement context in this release."""
    which = recorded.double.package
    return f"{which.__name__}.experimental" if "experimental" in vars(which) else which.__name__


@pytest.fixture
def placing(context):
    """A function that returns the expected calls for placing a number of compiled parts."""

    def expected(start, count, parts=1):
        return [(f"{context}.neuron_cores_context", start, count), *[("torch.jit.load",)] * parts, ("left",)]

    return expected


def options_of(recorded, **given):
    """Return the options of a trace: that of torch_neuron enables dynamic batching if the model can use it."""
    return {"dynamic_batch_size": True, **given} if recorded.runtime.name == "torch_neuron" else given


def test_trace_passes_everything_on(recorded, calls):
    """There is one call, with the same model, example, and options. The result is the vendor's."""
    model, x = mlp(), rows(2)
    compiled = recorded.runtime.trace(model, x, compiler_args=["--x"], compiler_workdir="here")
    (call,) = calls
    name, traced, example, options = call
    assert name == f"{recorded.runtime.name}.trace"
    assert traced is model
    assert example is x
    assert options == options_of(recorded, compiler_args=["--x"], compiler_workdir="here")
    assert isinstance(compiled, torch.jit.ScriptModule)


def test_placing_loads_inside_the_context(recorded, calls, placing):
    """A saved copy is loaded inside one context for all cores."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    recorded.runtime.place(compiled, 1, 3)
    assert calls == placing(1, 3)


def test_a_wrapper_is_placed_in_one_context(recorded, calls, placing):
    """All compiled parts are loaded inside one context. The vendor never sees the modules around them."""
    whole = Around(*(recorded.runtime.trace(mlp(), rows(2)) for _ in range(2)))
    calls.clear()
    recorded.runtime.place(whole, 0, 2)
    assert calls == placing(0, 2, parts=2)


def test_a_model_that_was_not_traced_does_not_reach_the_vendor(recorded, calls):
    """The vendor silently ignores an uncompiled module, so the adapter refuses it first."""
    for ask in (lambda: recorded.runtime.place(mlp(), 0, 1), lambda: recorded.runtime.dynamic_batch(mlp())):
        with pytest.raises(ReplicaError):
            ask()
    assert calls == []


def test_a_recorded_signature_is_dropped_with_its_model(recorded):
    """A signature does not keep its model alive."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    gone = weakref.ref(compiled)
    recorded.double.calls.clear()  # the record also refers to the model
    del compiled
    gc.collect()
    assert gone() is None


def test_core_count_and_signature_do_not_call_the_vendor(recorded, calls):
    """The vendor documents no function for the number of cores or the signature."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    assert recorded.runtime.core_count() == 4
    assert recorded.runtime.signature(compiled).batch == 2
    assert calls == []


def test_dynamic_batching_uses_the_vendors_function(recorded, calls):
    """torch_neuronx gets a call with the compiled module. torch_neuron has no such function, and gets none."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    assert recorded.runtime.dynamic_batch(compiled) is compiled
    assert calls == ([("torch_neuronx.dynamic_batch", compiled)] if recorded.runtime.name == "torch_neuronx" else [])


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_dynamic_batching_of_a_wrapper_passes_each_part(recorded, calls):
    """The vendor documents it for traced models only, so each compiled part is passed separately."""
    whole = Around(*(recorded.runtime.trace(mlp(), rows(2)) for _ in range(2)))
    calls.clear()
    assert recorded.runtime.dynamic_batch(whole) is whole
    assert calls == [("torch_neuronx.dynamic_batch", part) for part in whole.parts]
    assert [part.shape for part in whole(rows(5))] == [(5, 3)] * 2


def test_an_ineligible_model_does_not_reach_the_vendor(recorded, calls):
    """The vendor does not check outputs, so parawrap refuses a model with outputs without rows."""
    compiled = recorded.runtime.trace(lambda x: (2 * x + 1).sum(), torch.ones(3))
    calls.clear()
    with pytest.raises(ShapeError):
        recorded.runtime.dynamic_batch(compiled)
    assert calls == []


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_the_vendors_refusal_becomes_a_shape_error(recorded):
    """If the signature is unknown, the vendor decides. The ShapeError keeps its reason."""
    compiled = recorded.runtime.trace(lambda x: (2 * x + 1).sum(), torch.ones(3))
    loaded = _saved_and_loaded(compiled)
    with pytest.raises(ShapeError, match=r"this model cannot use dynamic batching: .*output") as refused:
        recorded.runtime.dynamic_batch(loaded)
    assert type(refused.value.__cause__) is ValueError


@pytest.mark.parametrize("recorded", ["torch_neuron", "torch_neuron.experimental"], indirect=True)
def test_torch_neuron_traces_for_dynamic_batching(recorded, calls):
    """Its trace gets dynamic_batch_size=True. Placed copies and wrappers of the model take any number of rows."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    placed = recorded.runtime.place(compiled, 0, 1)
    calls.clear()
    for model in (compiled, placed, Around(compiled)):
        assert recorded.runtime.dynamic_batch(model) is model
    assert placed(rows(5)).shape == (5, 3)
    assert calls == []


@pytest.mark.parametrize("recorded", ["torch_neuron"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"dynamic_batch_size": False}], ids=str)
def test_torch_neuron_refuses_dynamic_batching_of_other_traces(recorded, calls, options):
    """A model without rows on dim 0 is traced as it is. An option of the user is passed on, and the error names it."""
    example = rows(2) if options else torch.ones(())
    compiled = recorded.runtime.trace(lambda x: 2 * x + 1, example, **options)
    assert calls[0][-1] == options
    with pytest.raises(ShapeError, match="Trace it with dynamic_batch_size=True" if options else "no batch dimension"):
        recorded.runtime.dynamic_batch(compiled)


@pytest.mark.parametrize("recorded", ["torch_neuron"], indirect=True)
def test_a_model_from_a_file_keeps_its_own_dynamic_batching_on_torch_neuron(recorded):
    """It cannot be enabled afterwards. A model that has it takes any number of rows as it is, as the error says."""
    loaded = _saved_and_loaded(recorded.runtime.trace(mlp(), rows(2)))
    with pytest.raises(ShapeError, match=r"from a file .* traced with dynamic_batch_size=True, use it as it is"):
        recorded.runtime.dynamic_batch(loaded)
    assert loaded(rows(5)).shape == (5, 3)
    with using(recorded.runtime):
        net = neuron.DataParallel(loaded, set_dynamic_batching=False)
        torch.testing.assert_close(net(rows(12)), mlp()(rows(12)))
        net.close()


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_a_model_for_emulated_cores_is_refused(recorded, monkeypatch):
    """The vendor would run it on the CPU. The error names the runtime that is in use."""
    monkeypatch.undo()
    compiled = recorded.host.trace(mlp(), rows(2))
    with pytest.raises(
        DeviceUnavailableError, match="emulated NeuronCores, but this process uses the runtime torch_neuronx"
    ):
        recorded.runtime.place(compiled, 0, 1)


def test_a_trace_without_keyword_inputs_is_an_error(recorded, calls):
    """The vendor documents no example_kwarg_inputs. A trace with `**options` would silently ignore it."""
    x, y = numbers(2)
    with pytest.raises(DeviceUnavailableError, match=rf"{recorded.runtime.name} has no example_kwarg_inputs.* by position"):
        recorded.runtime.trace(Doubling(), example_kwarg_inputs={"x": x, "y": y})
    assert calls == []


def test_a_trace_with_keyword_inputs_gets_them(recorded, monkeypatch):
    """A release whose trace has the parameter is used. The signature has the order of forward."""
    seen = []

    def trace(func, example_inputs=None, *, example_kwarg_inputs=None, **options):
        seen.append((func, example_inputs, example_kwarg_inputs, options))
        compiled = recorded.host.trace(func, example_inputs, example_kwarg_inputs=example_kwarg_inputs)
        return recorded.host.dynamic_batch(compiled) if "dynamic_batch_size" in options else compiled

    monkeypatch.setattr(recorded.double.package, "trace", trace)
    model, (x, y) = Doubling(), numbers(2)
    example = {"y": y, "x": x}
    compiled = recorded.runtime.trace(model, example_kwarg_inputs=example, compiler_args=["--x"])
    assert seen == [(model, None, example, options_of(recorded, compiler_args=["--x"]))]
    signature = recorded.runtime.signature(compiled)
    assert [spec.address for spec in signature.inputs] == ['kwargs["x"]', 'kwargs["y"]']
    x, y = numbers(5)
    torch.testing.assert_close(recorded.runtime.dynamic_batch(compiled)(y=y, x=x), model(x, y))


def test_a_model_that_fails_on_the_cpu_is_traced(recorded):
    """A model that only the vendor's compiler can run has no signature, but can be placed."""
    model = _OnTheSecondCall()
    compiled = recorded.runtime.trace(model, rows(2))
    assert recorded.runtime.signature(compiled) is None
    assert recorded.runtime.place(compiled, 0, 1)(rows(2)).shape == (2, 6)


def test_a_mistake_in_the_model_is_reported_by_the_trace(recorded):
    """The model's own exception arrives from the vendor's trace."""

    def mistaken(x):
        msg = "a mistake"
        raise LookupError(msg)

    with pytest.raises(LookupError, match="a mistake"):
        recorded.runtime.trace(mistaken, rows(2))


def test_an_error_of_the_vendor_arrives_and_leaves_the_context(recorded, calls, context):
    """An invalid number of cores is the vendor's ValueError. The next model can be placed."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    with pytest.raises(ValueError, match="invalid number of NeuronCores: 5"):
        recorded.runtime.place(compiled, 0, 5)
    assert calls == [(f"{context}.neuron_cores_context", 0, 5)]
    assert recorded.runtime.place(compiled, 0, 1)(rows(2)).shape == (2, 3)


def test_no_two_threads_are_in_the_context_at_once(recorded, calls, placing, monkeypatch):
    """The context is not thread-safe, so each thread leaves it before the next one enters."""
    interval = sys.getswitchinterval()
    threads, times = 8, 5
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    together = threading.Barrier(threads)

    def place(thread):
        together.wait()
        for _ in range(times):
            recorded.runtime.place(compiled, thread % 4, 1)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(place, range(threads)))
    finally:
        sys.setswitchinterval(interval)
    placements = [calls[first : first + 3] for first in range(0, len(calls), 3)]
    assert len(placements) == threads * times
    assert all(placement == placing(placement[0][1], 1) for placement in placements)


def test_a_release_without_a_documented_function_is_an_error(monkeypatch):
    """If a function has neither of its names, the error gives both and advice."""
    with neuron_host(cores=1) as host:
        double = Double("torch_neuronx", host, experimental=False)
        del double.package.neuron_cores_context
        double.install(monkeypatch)
        runtime = TorchNeuronx()
        compiled = runtime.trace(mlp(), rows(2))
        said = r"has neither torch_neuronx\.neuron_cores_context nor torch_neuronx\.experimental.*neuron_hardware\.md"
        with pytest.raises(DeviceUnavailableError, match=said):
            runtime.place(compiled, 0, 1)


class _OnTheSecondCall(torch.nn.Module):
    """Fails in its first run, like a kernel without a CPU version. The compiler then runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = iter([1])

    def __deepcopy__(self, memo: object) -> _OnTheSecondCall:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if next(self.runs, None):
            msg = "no such kernel on the CPU"
            raise NotImplementedError(msg)
        return 2 * x + 1


def _saved_and_loaded(compiled: torch.jit.ScriptModule) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(compiled, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)
