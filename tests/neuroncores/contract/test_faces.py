"""The public classes and functions on every runtime."""

from __future__ import annotations

import io

import pytest
import torch

from parawrap import ShapeError, neuron, parallel
from parawrap.neuroncores import using
from tests.neuroncores.contract.models import Around, Doubling, mlp, numbers, rows

pytestmark = pytest.mark.filterwarnings("ignore:.* rows? keeps? .* NeuronCores busy:UserWarning")


@pytest.fixture
def serving(subject):
    """Use the runtime in the process, as if it had been chosen."""
    with using(subject.runtime):
        yield subject


@pytest.mark.parametrize("device_ids", [None, [0]], ids=str)
def test_data_parallel_takes_any_number_of_rows(serving, device_ids):
    """The output has the rows of the input, exactly and in order."""
    net = neuron.DataParallel(neuron.trace(Doubling(), numbers(2)), device_ids)
    for count in (1, 2, 3, 8, 13):
        torch.testing.assert_close(net(*numbers(count)), Doubling()(*numbers(count)), rtol=0, atol=0)
    net.close()


def test_data_parallel_on_cores_with_gaps(serving):
    """Each run of consecutive cores is placed separately."""
    if neuron.core_count() < 3:
        pytest.skip("needs three cores")
    net = neuron.DataParallel(neuron.trace(Doubling(), numbers(1)), [0, 2])
    torch.testing.assert_close(net(*numbers(7)), Doubling()(*numbers(7)), rtol=0, atol=0)
    net.close()


def test_without_dynamic_batching_each_core_gets_the_compiled_size(serving):
    """The exact number of rows is accepted. The error for another number shows both numbers."""
    net = neuron.DataParallel(neuron.trace(Doubling(), numbers(2)))
    net.disable_dynamic_batching()
    exact = 2 * neuron.core_count()
    torch.testing.assert_close(net(*numbers(exact)), Doubling()(*numbers(exact)), rtol=0, atol=0)
    with pytest.raises(ShapeError, match=rf"{exact + 1} rows .* each core takes 2, the compiled number"):
        net(*numbers(exact + 1))
    net.close()


def test_a_block_with_map_and_submit(serving):
    """Calls, `submit`, and `map` of a `parallel` block give the plain outputs."""
    compiled = neuron.trace(Doubling(), numbers(2))
    with parallel(compiled, "neuron") as p:
        torch.testing.assert_close(compiled(*numbers(9)), Doubling()(*numbers(9)), rtol=0, atol=0)
        torch.testing.assert_close(p.submit(*numbers(3)).result(), Doubling()(*numbers(3)), rtol=0, atol=0)
        batches = [numbers(count) for count in (2, 5, 1)]
        for output, batch in zip(p.map(batches), batches, strict=True):
            torch.testing.assert_close(output, Doubling()(*batch), rtol=0, atol=0)


def test_a_module_around_compiled_ones(serving):
    """Its compiled size is unknown, so rows are cut evenly."""
    plain = Around(mlp(), mlp()).eval()
    net = neuron.DataParallel(Around(*(neuron.trace(mlp(), rows(2)) for _ in range(2))).eval())
    with torch.no_grad():
        for count in (1, 5, 8):
            torch.testing.assert_close(net(rows(count)), plain(rows(count)), **serving.tolerance)
    net.close()


def test_a_model_from_a_file(serving):
    """A loaded model is parallel too. The vendors do not report its shapes, so the number of rows is exact here."""
    file = io.BytesIO()
    neuron.save(neuron.trace(Doubling(), numbers(2)), file)
    net = neuron.DataParallel(neuron.load(io.BytesIO(file.getvalue())), set_dynamic_batching=False)
    exact = 2 * neuron.core_count()
    torch.testing.assert_close(net(*numbers(exact)), Doubling()(*numbers(exact)), rtol=0, atol=0)
    net.close()
