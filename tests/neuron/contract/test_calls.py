"""What the adapters call of the vendor's packages: which functions, in which order, with what."""

from __future__ import annotations

import gc
import io
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parawrap.backends.neuron._torch_neuronx import TorchNeuronx
from parawrap.errors import DeviceUnavailableError, ReplicaError, ShapeError
from parawrap.testing import neuron_host
from tests.neuron.contract.doubles import Double
from tests.neuron.contract.models import Around, Doubling, mlp, numbers, rows


@pytest.fixture
def calls(recorded):
    """The calls of the vendor's package so far."""
    return recorded.double.calls


@pytest.fixture
def context(recorded):
    """The name under which this release has the placement context."""
    which = recorded.double.package
    return f"{which.__name__}.experimental" if "experimental" in vars(which) else which.__name__


@pytest.fixture
def placing(context):
    """The calls that place so many compiled parts."""

    def expected(start, count, parts=1):
        return [(f"{context}.neuron_cores_context", start, count), *[("torch.jit.load",)] * parts, ("left",)]

    return expected


def test_trace_passes_everything_on(recorded, calls):
    """One call, with the very model, the very example and every option; the answer is the vendor's."""
    model, x = mlp(), rows(2)
    compiled = recorded.runtime.trace(model, x, compiler_args=["--x"], compiler_workdir="here")
    (call,) = calls
    name, traced, example, options = call
    assert name == f"{recorded.runtime.name}.trace"
    assert traced is model
    assert example is x
    assert options == {"compiler_args": ["--x"], "compiler_workdir": "here"}
    assert isinstance(compiled, torch.jit.ScriptModule)


def test_placing_loads_inside_the_context(recorded, calls, placing):
    """A saved copy is loaded between the entering and the leaving of one context for all cores."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    recorded.runtime.place(compiled, 1, 3)
    assert calls == placing(1, 3)


def test_a_wrapper_is_placed_in_one_context(recorded, calls, placing):
    """All compiled parts of a module are loaded inside one context; what stands around them concerns the vendor not."""
    whole = Around(*(recorded.runtime.trace(mlp(), rows(2)) for _ in range(2)))
    calls.clear()
    recorded.runtime.place(whole, 0, 2)
    assert calls == placing(0, 2, parts=2)


def test_a_model_that_was_not_traced_does_not_reach_the_vendor(recorded, calls):
    """The vendor places an uncompiled module by doing nothing, and says nothing: so it is not asked."""
    for ask in (lambda: recorded.runtime.place(mlp(), 0, 1), lambda: recorded.runtime.dynamic_batch(mlp())):
        with pytest.raises(ReplicaError):
            ask()
    assert calls == []


def test_unplacing_calls_nothing(recorded, calls):
    """The vendor unloads with the last reference: when that is gone, the cores are empty."""
    placed = recorded.runtime.place(recorded.runtime.trace(mlp(), rows(2)), 0, 2)
    calls.clear()
    recorded.runtime.unplace(placed)
    assert calls == []
    del placed
    gc.collect()
    assert [core.memory_bytes for core in recorded.host.stats()] == [0, 0, 0, 0]


def test_what_is_remembered_goes_with_the_model(recorded):
    """A signature keeps no model alive."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    gone = weakref.ref(compiled)
    recorded.double.calls.clear()  # which noted it down
    del compiled
    gc.collect()
    assert gone() is None


def test_the_questions_call_nothing(recorded, calls):
    """The number of cores and signatures are known without the vendor, which documents no function for them."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    assert recorded.runtime.core_count() == 4
    assert recorded.runtime.signature(compiled).batch == 2
    assert calls == []


def test_dynamic_batching_is_the_vendors_where_it_has_it(recorded, calls):
    """torch_neuronx is asked for it, with the compiled module; torch_neuron, which cannot be, is not."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    dynamic = recorded.runtime.dynamic_batch(compiled)
    if recorded.runtime.name == "torch_neuronx":
        assert calls == [("torch_neuronx.dynamic_batch", compiled)]
        assert dynamic is compiled
    else:
        assert calls == []
        assert dynamic is not compiled
    assert recorded.runtime.signature(dynamic) == recorded.runtime.signature(compiled)


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_dynamic_batching_of_a_wrapper_asks_for_each_part(recorded, calls):
    """The vendor documents it for what trace returns: every compiled part is handed over by itself."""
    whole = Around(*(recorded.runtime.trace(mlp(), rows(2)) for _ in range(2)))
    calls.clear()
    assert recorded.runtime.dynamic_batch(whole) is whole
    assert calls == [("torch_neuronx.dynamic_batch", part) for part in whole.parts]
    assert [part.shape for part in whole(rows(5))] == [(5, 3)] * 2


def test_a_model_that_is_known_not_to_be_eligible_does_not_reach_the_vendor(recorded, calls):
    """The vendor documents no look at the outputs: a model whose outputs have no rows is refused without it."""
    compiled = recorded.runtime.trace(lambda x: (2 * x + 1).sum(), torch.ones(3))
    calls.clear()
    with pytest.raises(ShapeError):
        recorded.runtime.dynamic_batch(compiled)
    assert calls == []


@pytest.mark.parametrize("recorded", ["torch_neuronx"], indirect=True)
def test_what_the_vendor_does_not_make_dynamic_is_a_shape_error(recorded):
    """Where no signature is known, the vendor decides; its reason is kept."""
    compiled = recorded.runtime.trace(lambda x: (2 * x + 1).sum(), torch.ones(3))
    loaded = _saved_and_loaded(compiled)
    with pytest.raises(ShapeError, match=r"dynamic batching cannot be had of this model: .*output") as refused:
        recorded.runtime.dynamic_batch(loaded)
    assert type(refused.value.__cause__) is ValueError


@pytest.mark.parametrize("recorded", ["torch_neuron", "torch_neuron.experimental"], indirect=True)
def test_what_was_traced_for_any_batch_is_returned_as_it_is(recorded, calls):
    """dynamic_batch_size=True is torch_neuron's own way, and is remembered of copies on cores and inside of wrappers."""
    compiled = recorded.runtime.trace(mlp(), rows(2), dynamic_batch_size=True)
    placed = recorded.runtime.place(compiled, 0, 1)
    calls.clear()
    for model in (compiled, placed, Around(compiled)):
        assert recorded.runtime.dynamic_batch(model) is model
    assert placed(rows(5)).shape == (5, 3)
    assert calls == []


@pytest.mark.parametrize("recorded", ["torch_neuron"], indirect=True)
def test_a_model_from_a_file_has_no_dynamic_batching_on_torch_neuron(recorded):
    """Nothing is known of it: the error names both ways of tracing it that would do."""
    loaded = _saved_and_loaded(recorded.runtime.trace(mlp(), rows(2)))
    with pytest.raises(ShapeError, match=r"dynamic_batch_size=True.*parawrap\.neuron\.trace"):
        recorded.runtime.dynamic_batch(loaded)


@pytest.mark.parametrize("recorded", ["torch_neuron"], indirect=True)
def test_a_batch_without_rows_does_not_reach_torch_neuron(recorded):
    """Its outputs have no rows, and the structure of the model."""
    dynamic = recorded.runtime.dynamic_batch(recorded.runtime.trace(Doubling(), numbers(2)))
    assert [output.shape for output in dynamic(*numbers(0))] == [(0, 2), (0, 2)]


@pytest.mark.parametrize("recorded", ["torch_neuron"], indirect=True)
def test_names_of_arguments_are_kept_by_what_cuts_batches(recorded):
    """A call by keyword goes to the compiled model by keyword."""
    dynamic = recorded.runtime.dynamic_batch(recorded.runtime.trace(Doubling(), numbers(2)))
    x, y = numbers(5)
    torch.testing.assert_close(dynamic(y=y, x=x), Doubling()(x, y))


def test_a_model_that_fails_on_the_cpu_is_traced_all_the_same(recorded):
    """What only the vendor's compiler can run has no signature, and is placed as any other."""
    model = _OnTheSecondCall()
    compiled = recorded.runtime.trace(model, rows(2))
    assert recorded.runtime.signature(compiled) is None
    assert recorded.runtime.place(compiled, 0, 1)(rows(2)).shape == (2, 6)


def test_a_mistake_in_the_model_is_reported_by_the_trace(recorded):
    """The model's own exception arrives, as the vendor's trace raises it."""

    def mistaken(x):
        msg = "a mistake"
        raise LookupError(msg)

    with pytest.raises(LookupError, match="a mistake"):
        recorded.runtime.trace(mistaken, rows(2))


def test_an_error_of_the_vendor_arrives_and_leaves_the_context(recorded, calls, context):
    """A number of cores that there is not is the vendor's ValueError; the next model is placed as if nothing had been."""
    compiled = recorded.runtime.trace(mlp(), rows(2))
    calls.clear()
    with pytest.raises(ValueError, match="invalid number of NeuronCores: 5"):
        recorded.runtime.place(compiled, 0, 5)
    assert calls == [(f"{context}.neuron_cores_context", 0, 5)]
    assert recorded.runtime.place(compiled, 0, 1)(rows(2)).shape == (2, 3)


def test_no_two_threads_are_in_the_context_at_once(recorded, calls, placing, monkeypatch):
    """The context is documented as not thread-safe: each is left before the next is entered."""
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


def test_a_release_without_the_function_is_named(monkeypatch):
    """Where a function is under neither of its names, the error says both and what to do."""
    with neuron_host(cores=1) as host:
        double = Double("torch_neuronx", host, experimental=False)
        del double.package.neuron_cores_context
        double.install(monkeypatch)
        runtime = TorchNeuronx()
        compiled = runtime.trace(mlp(), rows(2))
        said = r"torch_neuronx has neither torch_neuronx\.neuron_cores_context nor torch_neuronx\.experimental.* later"
        with pytest.raises(DeviceUnavailableError, match=said):
            runtime.place(compiled, 0, 1)


class _OnTheSecondCall(torch.nn.Module):
    """Fails when it is run first, as a kernel that no CPU has would; the compiler then runs it in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs == 1:
            msg = "no such kernel on the CPU"
            raise NotImplementedError(msg)
        return 2 * x + 1


def _saved_and_loaded(compiled: torch.jit.ScriptModule) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.jit.save(compiled, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)
