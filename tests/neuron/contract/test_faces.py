"""The faces on every runtime: what users write, over whatever puts their models on cores."""

from __future__ import annotations

import io

import pytest
import torch

from parawrap import ShapeError, neuron, parallel
from parawrap.backends.neuron import using
from tests.neuron.contract.models import Around, Doubling, mlp, numbers, rows

pytestmark = pytest.mark.filterwarnings("ignore:.* rows? keeps? .* NeuronCores busy:UserWarning")


@pytest.fixture
def serving(subject):
    """The runtime serves the process, as one does that was chosen."""
    with using(subject.runtime):
        yield subject


@pytest.mark.parametrize("device_ids", [None, [0]], ids=str)
def test_data_parallel_takes_any_number_of_rows(serving, device_ids):
    """Rows in are rows out, exactly, and in their order."""
    net = neuron.DataParallel(neuron.trace(Doubling(), numbers(2)), device_ids)
    for count in (1, 2, 3, 8, 13):
        torch.testing.assert_close(net(*numbers(count)), Doubling()(*numbers(count)), rtol=0, atol=0)
    net.close()


def test_data_parallel_on_cores_that_are_no_neighbours(serving):
    """Each run of cores is placed by itself."""
    if neuron.core_count() < 3:
        pytest.skip("needs three cores")
    net = neuron.DataParallel(neuron.trace(Doubling(), numbers(1)), [0, 2])
    torch.testing.assert_close(net(*numbers(7)), Doubling()(*numbers(7)), rtol=0, atol=0)
    net.close()


def test_without_dynamic_batching_each_core_gets_the_compiled_size(serving):
    """The exact number of rows is taken, and another one refused with both numbers."""
    net = neuron.DataParallel(neuron.trace(Doubling(), numbers(2)))
    net.disable_dynamic_batching()
    exact = 2 * neuron.core_count()
    torch.testing.assert_close(net(*numbers(exact)), Doubling()(*numbers(exact)), rtol=0, atol=0)
    with pytest.raises(ShapeError, match=rf"{exact + 1} rows .* must be 2, as the model is compiled"):
        net(*numbers(exact + 1))
    net.close()


def test_a_block_with_map_and_submit(serving):
    """The same through parallel; after the block the model is what it was."""
    compiled = neuron.trace(Doubling(), numbers(2))
    with parallel(compiled, "neuron") as p:
        torch.testing.assert_close(compiled(*numbers(9)), Doubling()(*numbers(9)), rtol=0, atol=0)
        torch.testing.assert_close(p.submit(*numbers(3)).result(), Doubling()(*numbers(3)), rtol=0, atol=0)
        batches = [numbers(count) for count in (2, 5, 1)]
        for output, batch in zip(p.map(batches), batches, strict=True):
            torch.testing.assert_close(output, Doubling()(*batch), rtol=0, atol=0)


def test_a_module_around_compiled_ones(serving):
    """Its compiled size is not known, and rows are shared out evenly; torch_neuron has no dynamic batching of it."""
    plain = Around(mlp(), mlp()).eval()
    around = Around(*(neuron.trace(mlp(), rows(2)) for _ in range(2))).eval()
    counts = [1, 5, 8]
    if serving.runtime.name == "torch_neuron":
        counts = [2 * neuron.core_count()]
        with pytest.warns(UserWarning, match="dynamic batching cannot be had of this model"):
            net = neuron.DataParallel(around)
    else:
        net = neuron.DataParallel(around)
    with torch.no_grad():
        for count in counts:
            torch.testing.assert_close(net(rows(count)), plain(rows(count)), **serving.tolerance)
    net.close()


def test_a_model_from_a_file(serving):
    """What was saved and loaded is parallel as what was traced; the vendors tell nothing of it, so rows are exact here."""
    file = io.BytesIO()
    neuron.save(neuron.trace(Doubling(), numbers(2)), file)
    net = neuron.DataParallel(neuron.load(io.BytesIO(file.getvalue())), set_dynamic_batching=False)
    exact = 2 * neuron.core_count()
    torch.testing.assert_close(net(*numbers(exact)), Doubling()(*numbers(exact)), rtol=0, atol=0)
    net.close()
