"""The contract of every NeuronCore runtime: the emulated one, the adapters on doubles, and real cores.

With PARAWRAP_TEST_NEURON=1, these tests also run on the NeuronCores of the machine, with the runtime that
PARAWRAP_NEURON_RUNTIME names.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parawrap import ShapeError, neuron, parallel
from parawrap.neuroncores import using
from tests.helpers.neuron_doubles import Around, Doubling, assert_equal, mlp, numbers, rows, saved_and_loaded


@pytest.fixture
def serving(subject):
    """Use the runtime in the process, as if it had been chosen."""
    with using(subject.runtime):
        yield subject


def assert_near(subject, output, expected):
    torch.testing.assert_close(output, expected, **subject.tolerance)


def test_placed_model_is_a_copy(subject):
    """The original does not change, still works, and can be placed again, also after a copy was freed."""
    model, x = mlp(), rows(2)
    compiled = subject.runtime.trace(model, x)
    state = {name: tensor.clone() for name, tensor in compiled.state_dict().items()}
    first, second = subject.runtime.place(compiled, 0, 1), subject.runtime.place(compiled, 0, 1)
    assert len({id(compiled), id(first), id(second)}) == 3
    for answering in (first, second, compiled):
        assert_near(subject, answering(x), model(x).detach())
    assert_equal(dict(compiled.state_dict()), state)
    del first, second
    assert_near(subject, subject.runtime.place(compiled, 0, 1)(x), model(x).detach())


@pytest.mark.parametrize("batch", [1, 3])
def test_dynamic_batching_keeps_rows(subject, batch):
    """For smaller and larger batches than the compiled one, outputs have exactly the input rows, in order."""
    compiled = subject.runtime.trace(Doubling(), numbers(batch))
    dynamic = subject.runtime.dynamic_batch(subject.runtime.place(compiled, 0, subject.runtime.core_count()))
    assert subject.runtime.dynamic_batch(dynamic) is dynamic
    for count in range(1, 3 * batch + 2):
        assert_equal(dynamic(*numbers(count)), Doubling()(*numbers(count)))
    placed = subject.runtime.place(subject.runtime.dynamic_batch(compiled), 0, 1)
    assert_equal(placed(*numbers(5)), Doubling()(*numbers(5)))


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (lambda x, y: 2 * x + y.sum(), (torch.ones(3, 2), torch.ones(1, 2)), "input 0 .* 3 .*input 1 .* 1"),
        (lambda x: (2 * x + 1).sum(), (torch.ones(3, 2),), "output 0 has no batch dimension"),
        (lambda x: (2 * x + 1).sum(1, keepdim=True).T, (torch.ones(3, 2),), "input 0 .* 3 .*output 0 .* 1"),
    ],
    ids=["inputs", "scalar", "outputs"],
)
def test_dynamic_batching_needs_rows(subject, model, example, said):
    """The error names the input or output with a different compiled number of rows."""
    compiled = subject.runtime.trace(model, example)
    with pytest.raises(ShapeError, match=said):
        subject.runtime.dynamic_batch(compiled)


def test_threads_place_and_call_at_once(subject):
    """Every thread gets the outputs for its own inputs."""
    threads, calls = 4, 5
    compiled = subject.runtime.trace(Doubling(), numbers(1))
    shared = subject.runtime.place(compiled, 0, subject.runtime.core_count())
    together = threading.Barrier(threads)

    def ask(thread):
        x = torch.full((1, 2), float(thread))
        together.wait()
        own = subject.runtime.place(compiled, thread % subject.runtime.core_count(), 1)
        return [placed(x, x) for placed in (shared, own) for _ in range(calls)]

    with ThreadPoolExecutor(threads) as pool:
        for thread, answers in enumerate(pool.map(ask, range(threads))):
            expected = (torch.full((1, 2), 2.0 * thread + 1), torch.full((1, 2), 3.0 * thread))
            assert_equal(answers, [expected] * 2 * calls)


def test_model_from_a_file(serving):
    """Without dynamic batching, each core gets the compiled size. The vendors do not report the shapes of a file."""
    loaded, exact = saved_and_loaded(neuron.trace(Doubling(), numbers(2))), 2 * neuron.core_count()
    net = neuron.DataParallel(loaded, set_dynamic_batching=False)
    assert_equal(net(*numbers(exact)), Doubling()(*numbers(exact)))
    net.close()


def test_block_with_map_and_submit(serving):
    compiled = neuron.trace(Doubling(), numbers(2))
    with parallel(compiled, "neuron") as p:
        assert_equal(compiled(*numbers(9)), Doubling()(*numbers(9)))
        assert_equal(p.submit(*numbers(3)).result(), Doubling()(*numbers(3)))
        batches = [numbers(count) for count in (2, 5, 1)]
        for output, batch in zip(p.map(batches), batches, strict=True):
            assert_equal(output, Doubling()(*batch))


def test_module_around_compiled_ones(serving):
    """Its compiled size is unknown, so rows are cut evenly."""
    plain = Around(mlp(), mlp()).eval()
    net = neuron.DataParallel(Around(*(neuron.trace(mlp(), rows(2)) for _ in range(2))).eval())
    with torch.no_grad():
        for count in (1, 5, 8):
            torch.testing.assert_close(net(rows(count)), plain(rows(count)), **serving.tolerance)
    net.close()
