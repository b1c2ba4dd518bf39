"""Behaviour of every NeuronCore runtime: the emulated one, the adapters on doubles, and real cores.

With PARAWRAP_TEST_NEURON=1, these tests also run on the NeuronCores of the machine, with the runtime that
PARAWRAP_NEURON_RUNTIME names.
"""

from __future__ import annotations

import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from parawrap.errors import ReplicaError, ShapeError
from parawrap.neuroncores import TensorSpec
from tests.neuroncores.contract.models import Around, Doubling, mlp, numbers, rows


def assert_near(subject, output, expected):
    torch.testing.assert_close(output, expected, **subject.tolerance)


def assert_equal(output, expected):
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_a_traced_model_returns_the_plain_output(subject):
    """The result is a ScriptModule with the outputs of the plain model and without gradients."""
    model, x = mlp(), rows(2)
    compiled = subject.runtime.trace(model, x)
    output = compiled(x)
    assert isinstance(compiled, torch.jit.ScriptModule)
    assert_near(subject, output, model(x).detach())
    assert not output.requires_grad


def test_a_function_can_be_traced(subject):
    """A function of several tensors is compiled like a module."""
    compiled = subject.runtime.trace(lambda x, y: 2 * x + y, numbers(3))
    assert_equal(compiled(*numbers(3)), numbers(3)[0])


def test_a_placed_model_is_a_copy(subject):
    """The original model does not change, still works, and can be placed a second time."""
    model, x = mlp(), rows(2)
    compiled = subject.runtime.trace(model, x)
    state = {name: tensor.clone() for name, tensor in compiled.state_dict().items()}
    first, second = subject.runtime.place(compiled, 0, 1), subject.runtime.place(compiled, 0, 1)
    assert len({id(compiled), id(first), id(second)}) == 3
    for answering in (first, second, compiled):
        assert_near(subject, answering(x), model(x).detach())
    assert_equal(dict(compiled.state_dict()), state)


def test_a_model_runs_on_all_cores(subject):
    """A model that is placed on every core in one call can be called repeatedly."""
    count = subject.runtime.core_count()
    placed = subject.runtime.place(subject.runtime.trace(Doubling(), numbers(2)), 0, count)
    for _ in range(2 * count + 1):
        assert_equal(placed(*numbers(2)), Doubling()(*numbers(2)))


def test_a_wrapper_is_placed_with_every_compiled_part(subject):
    """A plain module around compiled models is copied with its own parameters, and each compiled part once."""
    whole = Around(*(subject.runtime.trace(mlp(), rows(2)) for _ in range(2)))
    placed = subject.runtime.place(whole, 0, 1)
    assert isinstance(placed, Around)
    assert placed.before is not whole.before
    assert placed.before.weight is whole.before.weight
    assert all(part is not of_whole for part, of_whole in zip(placed.parts, whole.parts, strict=True))
    expected = Around(mlp(), mlp())(rows(2))
    for answering in (placed, whole):
        assert_near(subject, [part.detach() for part in answering(rows(2))], [part.detach() for part in expected])


@pytest.mark.parametrize("model", [mlp(), nn.Identity(), nn.ModuleList()], ids=["mlp", "identity", "empty"])
def test_a_model_that_was_not_traced_is_refused(subject, model):
    """The error names the class of the model and the function that compiles it."""
    said = rf"{type(model).__name__} was not traced .*parawrap\.neuron\.trace\(model, example_inputs\) first"
    with pytest.raises(ReplicaError, match=said):
        subject.runtime.place(model, 0, 1)
    with pytest.raises(ReplicaError, match=said):
        subject.runtime.dynamic_batch(model)


@pytest.mark.parametrize("batch", [1, 3])
def test_dynamic_batching_gives_every_row_exactly_once(subject, batch):
    """For smaller and larger batches than the compiled one, outputs have exactly the input rows, in order."""
    placed = subject.runtime.place(subject.runtime.trace(Doubling(), numbers(batch)), 0, subject.runtime.core_count())
    dynamic = subject.runtime.dynamic_batch(placed)
    for count in range(1, 3 * batch + 2):
        assert_equal(dynamic(*numbers(count)), Doubling()(*numbers(count)))


def test_dynamic_batching_returns_the_compiled_models_containers(subject):
    """TorchScript returns a plain tuple for a namedtuple, for every batch size."""
    pair = namedtuple("pair", ["left", "right"])
    compiled = subject.runtime.trace(lambda x: pair(2 * x + 1, {"x": x - 1}), torch.ones(2, 3))
    answer = compiled(torch.ones(2, 3))
    dynamic = subject.runtime.dynamic_batch(compiled)
    for count in range(1, 6):
        x = torch.arange(3.0 * count).reshape(count, 3)
        assert_equal(dynamic(x), (2 * x + 1, {"x": x - 1}))
        assert type(dynamic(x)) is type(answer)


def test_dynamic_batching_can_be_enabled_twice(subject):
    """The second call returns the same model."""
    once = subject.runtime.dynamic_batch(subject.runtime.trace(Doubling(), numbers(2)))
    twice = subject.runtime.dynamic_batch(once)
    assert twice is once
    assert_equal(twice(*numbers(5)), Doubling()(*numbers(5)))


def test_dynamic_batching_before_placing_is_kept(subject):
    """The placed copy takes batches of any size."""
    dynamic = subject.runtime.dynamic_batch(subject.runtime.trace(Doubling(), numbers(2)))
    placed = subject.runtime.place(dynamic, 0, 1)
    assert_equal(placed(*numbers(5)), Doubling()(*numbers(5)))


def test_rows_that_disagree_are_refused(subject):
    """With dynamic batching, all inputs must have the same number of rows."""
    dynamic = subject.runtime.dynamic_batch(subject.runtime.trace(Doubling(), numbers(2)))
    with pytest.raises((ValueError, RuntimeError, torch.jit.Error)):
        dynamic(numbers(4)[0], numbers(3)[1])


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (lambda x, y: 2 * x + y.sum(), (torch.ones(3, 2), torch.ones(1, 2)), r"args\[0\].* 3 .*args\[1\].* 1"),
        (lambda x: (2 * x + 1).sum(), (torch.ones(3, 2),), "output has no batch dimension"),
        (lambda x: (2 * x + 1).sum(1, keepdim=True).T, (torch.ones(3, 2),), r"args\[0\].* 3 .*output.* 1"),
    ],
    ids=["inputs disagree", "a scalar", "outputs disagree"],
)
def test_dynamic_batching_is_refused_for_differing_rows(subject, model, example, said):
    """The error names the input or output with a different compiled number of rows."""
    compiled = subject.runtime.trace(model, example)
    with pytest.raises(ShapeError, match=said):
        subject.runtime.dynamic_batch(compiled)


@pytest.mark.parametrize("shape", [(3, 6), (2, 5), (2, 6, 1), (6,)], ids=str)
def test_other_shapes_than_the_compiled_one_are_refused(subject, shape):
    """Without dynamic batching, the number of rows is fixed too."""
    options = {"dynamic_batch_size": False} if subject.runtime.name == "torch_neuron" else {}
    placed = subject.runtime.place(subject.runtime.trace(mlp(), rows(2), **options), 0, 1)
    with pytest.raises((ValueError, RuntimeError, torch.jit.Error)):
        placed(torch.zeros(shape))
    assert placed(rows(2)).shape == (2, 3)


def test_dynamic_batching_only_frees_dim_0(subject):
    """With dynamic batching, the other dims keep their compiled size."""
    dynamic = subject.runtime.dynamic_batch(subject.runtime.trace(mlp(), rows(2)))
    with pytest.raises((ValueError, RuntimeError, torch.jit.Error)):
        dynamic(torch.zeros(4, 5))


def test_a_model_can_be_placed_again(subject):
    """Cores can be freed and used again any number of times."""
    model, x = mlp(), rows(2)
    compiled = subject.runtime.trace(model, x)
    for _ in range(3):
        placed = subject.runtime.place(compiled, 0, subject.runtime.core_count())
        assert_near(subject, placed(x), model(x).detach())
        del placed


def test_the_signature_is_that_of_the_example(subject):
    """It has the shapes, dtypes, and addresses of inputs and outputs, for a traced model and its placed copies."""
    compiled = subject.runtime.trace(Doubling(), numbers(2))
    for model in (compiled, subject.runtime.place(compiled, 0, 1)):
        signature = subject.runtime.signature(model)
        assert signature.inputs == tuple(TensorSpec((2, 2), torch.float32, f"args[{i}]") for i in range(2))
        assert signature.outputs == tuple(TensorSpec((2, 2), torch.float32, f"output[{i}]") for i in range(2))
        assert signature.batch == 2


def test_a_single_tensor_has_an_address(subject):
    """A single example tensor is args[0], and a single output tensor is output."""
    signature = subject.runtime.signature(subject.runtime.trace(mlp(), rows(2)))
    assert [str(spec) for spec in (*signature.inputs, *signature.outputs)] == ["(2, 6) float32", "(2, 3) float32"]
    assert [spec.address for spec in (*signature.inputs, *signature.outputs)] == ["args[0]", "output"]


def test_a_plain_module_has_no_signature(subject):
    """The signature of a module that was not compiled is None."""
    assert subject.runtime.signature(mlp()) is None


def test_threads_call_a_placed_model_at_once(subject):
    """Every thread gets the outputs for its own inputs."""
    threads, calls = 8, 20
    placed = subject.runtime.place(subject.runtime.trace(Doubling(), numbers(1)), 0, subject.runtime.core_count())
    together = threading.Barrier(threads)

    def ask(thread):
        x = torch.full((1, 2), float(thread))
        together.wait()
        return [placed(x, x) for _ in range(calls)]

    with ThreadPoolExecutor(threads) as pool:
        for thread, answers in enumerate(pool.map(ask, range(threads))):
            expected = (torch.full((1, 2), 2.0 * thread + 1), torch.full((1, 2), 3.0 * thread))
            assert_equal(answers, [expected] * calls)


def test_threads_place_at_once(subject):
    """Models that several threads place at the same time all work."""
    compiled = subject.runtime.trace(Doubling(), numbers(1))
    threads = 4
    together = threading.Barrier(threads)

    def put(thread):
        together.wait()
        return subject.runtime.place(compiled, thread % subject.runtime.core_count(), 1)

    with ThreadPoolExecutor(threads) as pool:
        placed = list(pool.map(put, range(threads)))
    for model in placed:
        assert_equal(model(*numbers(1)), Doubling()(*numbers(1)))


def test_there_are_cores(subject):
    """A process that may use NeuronCores has at least one."""
    assert subject.runtime.core_count() >= 1
