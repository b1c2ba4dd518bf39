"""The contract of every NeuronCore runtime: the emulated one, the adapters on doubles, and real
cores.

With PARAWRAP_TEST_NEURON=1, these tests also run on the NeuronCores of the machine, with the
runtime that PARAWRAP_NEURON_RUNTIME names.
"""

from __future__ import annotations

import pytest
import torch

from parawrap import ShapeError, neuron
from parawrap.neuroncores import using
from tests.helpers.neuron_doubles import (
    Doubling,
    assert_equal,
    mlp,
    numbers,
    rows,
    saved_and_loaded,
)


def assert_near(subject, output, expected):
    torch.testing.assert_close(output, expected, **subject.tolerance)


def test_placed_model_is_a_copy(subject):
    """The original does not change, still works, and can be placed again, also after a copy was
    freed.
    """
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
    """For smaller and larger batches than the compiled one, outputs have exactly the input rows, in
    order.
    """
    compiled = subject.runtime.trace(Doubling(), numbers(batch))
    dynamic = subject.runtime.dynamic_batch(
        subject.runtime.place(compiled, 0, subject.runtime.core_count())
    )
    assert subject.runtime.dynamic_batch(dynamic) is dynamic
    for count in range(1, 3 * batch + 2):
        assert_equal(dynamic(*numbers(count)), Doubling()(*numbers(count)))
    placed = subject.runtime.place(subject.runtime.dynamic_batch(compiled), 0, 1)
    assert_equal(placed(*numbers(5)), Doubling()(*numbers(5)))


@pytest.mark.parametrize(
    ("model", "example", "said"),
    [
        (
            lambda x, y: 2 * x + y.sum(),
            (torch.ones(3, 2), torch.ones(1, 2)),
            "input 0 .* 3 .*input 1 .* 1",
        ),
        (lambda x: (2 * x + 1).sum(), (torch.ones(3, 2),), "output 0 has no batch dimension"),
        (
            lambda x: (2 * x + 1).sum(1, keepdim=True).T,
            (torch.ones(3, 2),),
            "input 0 .* 3 .*output 0 .* 1",
        ),
    ],
    ids=["inputs", "scalar", "outputs"],
)
def test_dynamic_batching_needs_rows(subject, model, example, said):
    """The error names the input or output with a different compiled number of rows."""
    compiled = subject.runtime.trace(model, example)
    with pytest.raises(ShapeError, match=said):
        subject.runtime.dynamic_batch(compiled)


def test_model_from_a_file(subject):
    """Without dynamic batching, each core gets the compiled size.

    The vendors do not report the shapes of a file.
    """
    with using(subject.runtime):
        loaded, exact = (
            saved_and_loaded(neuron.trace(Doubling(), numbers(2))),
            2 * neuron.core_count(),
        )
        net = neuron.DataParallel(loaded, set_dynamic_batching=False)
        assert_equal(net(*numbers(exact)), Doubling()(*numbers(exact)))
        net.close()
