"""`parallel` on NeuronCores: the same engine, through the context manager."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from parawrap import (
    DataParallel,
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    ReplicaError,
    SessionError,
    ShapeError,
    ShardError,
    neuron,
    parallel,
    tuple_fn,
)


def models(batch=1):
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).eval()
    return plain, neuron.trace(plain, torch.zeros(batch, 3))


@pytest.mark.parametrize("devices", [["nc:0", "nc:1"], ["nc:3", "nc:1"], "nc:2", "nc", "neuron", ["neuron:0", 1]], ids=str)
def test_the_same_object_runs_on_the_cores(host, devices):
    """Inside the block the compiled model takes any number of rows; after it, it is what it was."""
    plain, model = models(batch=2)
    before = dict(vars(model))
    x = torch.randn(9, 3)
    with parallel(model, devices) as p:
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(p(x), plain(x))
    assert vars(model).keys() == before.keys()
    with pytest.raises(RuntimeError, match="compiled for"):
        model(x)
    torch.testing.assert_close(model(x[:2]), plain(x[:2]))


def test_nothing_is_left_on_the_cores_after_the_block(host):
    """The replicas' memory is given back, also when the block ends by an exception."""
    _, model = models()
    in_use, threads = [], set(threading.enumerate())

    def fails():
        with parallel(model, "neuron"):
            model(torch.randn(8, 3))
            in_use.extend(core.memory_bytes for core in host.stats())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert all(in_use)
    assert [core.memory_bytes for core in host.stats()] == [0] * 4
    assert set(threading.enumerate()) <= threads


def test_statistics_name_the_cores(host):
    """Two lanes a core, each told of by its core's name; the rows add up."""
    _, model = models()
    with parallel(model, ["nc:1", "nc:2"]) as p:
        model(torch.randn(8, 3))
        stats = p.stats()
    assert [lane.label for lane in stats.lanes] == ["nc:1", "nc:2", "nc:1", "nc:2"]
    assert sum(lane.rows for lane in stats.lanes) == 8
    assert stats.shards == (2, 2, 2, 2)
    assert "nc:1" in str(stats)
    assert repr(p) == "parallel(TopLevelTracedModule, ['nc:1', 'nc:2'])"


def test_map_streams_batches_of_any_size_in_order(host):
    """Whole batches go to cores, and come back in their order."""
    plain, model = models(batch=2)
    batches = [torch.randn(rows, 3) for rows in (2, 5, 1, 0, 7, 2, 3, 4, 4, 4, 1, 9)]
    with torch.no_grad(), parallel(model, "neuron") as p:
        for batch, output in zip(batches, p.map(iter(batches)), strict=True):
            torch.testing.assert_close(output, plain(batch))
    assert sum(core.inferences > 0 for core in host.stats()) == 4


def test_submit_gives_futures_and_their_errors(host):
    """A request is one row on some core; what the model is not compiled for is refused at once."""
    plain, model = models()
    with torch.no_grad(), parallel(model, ["nc:0", "nc:2"]) as p:
        xs = [torch.randn(1, 3) for _ in range(20)]
        for x, future in zip(xs, [p.submit(x) for x in xs], strict=True):
            torch.testing.assert_close(future.result(), plain(x))
        with pytest.raises(ShapeError, match=r"args\[0\] is \(1, 4\)"):
            p.submit(torch.randn(1, 4))
    assert [core.inferences for core in host.stats()][1::2] == [0, 0]
    with pytest.raises(SessionError):
        p.submit(xs[0])


def test_nested_blocks_and_blocks_of_two_models(host):
    """Blocks on one model nest, and two models share the cores."""
    plain, model = models()
    other_plain, other = models(batch=2)
    x = torch.randn(8, 3)
    with parallel(model, ["nc:0", "nc:1"]), parallel(other, ["nc:1", "nc:2"]):
        with parallel(model, ["nc:3"]):
            torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x) + other(x), plain(x) + other_plain(x))


def test_a_compiled_model_that_another_one_captures_is_refused(host):
    """Lanes on the CPU cannot have copies of it: the error names the variable."""
    _, model = models(batch=2)

    class Around(nn.Module):
        def forward(self, x):
            return model(x) * 2

    with pytest.raises(ReplicaError, match="captures 'model'"), parallel(Around(), ["cpu", "cpu"]):
        pass


def test_verify_runs_the_first_call_on_one_core_too(host):
    """verify=True compares with the outputs of a single core, once for each structure."""
    _, model = models()
    with parallel(model, "neuron", verify=True):
        model(torch.randn(8, 3))
        assert sum(core.inferences for core in host.stats()) == 16
        model(torch.randn(8, 3))
        assert sum(core.inferences for core in host.stats()) == 24


@pytest.mark.parametrize(
    ("devices", "error", "says"),
    [
        (["nc:4"], DeviceUnavailableError, "'nc:4' is not there: this process sees nc:0 to nc:3"),
        (["nc:0", "nc:0"], DeviceListError, "nc:0 is named twice"),
        (["nc:0", "cpu"], DeviceListError, "'cpu' is no NeuronCore"),
        ("nc:x", DeviceListError, "'nc:x' is no NeuronCore"),
    ],
    ids=str,
)
def test_cores_that_cannot_be_are_refused(host, devices, error, says):
    """Before anything is loaded."""
    _, model = models()
    with pytest.raises(error, match=says):
        parallel(model, devices)


def test_a_model_that_was_not_traced_is_refused(host):
    """An ordinary module cannot go onto cores; the block is not entered."""
    plain, _ = models()
    with pytest.raises(ReplicaError, match="was not traced"), parallel(plain, "neuron"):
        pytest.fail("the block was entered")
    assert "forward" not in vars(plain)


def test_faces_for_torch_devices_say_where_cores_are_served(host):
    """DataParallel and tuple_fn point at the faces that know NeuronCores."""
    _, model = models()
    with pytest.raises(DeviceUnavailableError, match=r"neuron\.DataParallel"):
        DataParallel(model, device_ids=["nc:0"])
    with pytest.raises(DeviceUnavailableError, match=r"neuron\.DataParallel"):
        tuple_fn(torch.tanh, parallel=True, devices=["nc:0"])((torch.zeros(1),))


@pytest.mark.parametrize("dim", [1, -1])
def test_another_dim_needs_the_exact_size(host, dim):
    """dim=1 cuts on it, without dynamic batching, and refuses what is not the compiled size a core."""
    model = neuron.trace(lambda x: x * 2, torch.zeros(2, 4))
    x = torch.randn(2, 8)
    with parallel(model, ["nc:0", "nc:1"], dim=dim):
        assert torch.equal(model(x), x * 2)
        with pytest.raises(ShapeError, match=r"must be 4.*there is none on other dims than 0"):
            model(torch.randn(2, 6))


class Two(nn.Module):
    """Holds a compiled model of two inputs, which its methods take the other way round."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def forward(self, x, y):
        return self.compiled(x, y)

    def swapped(self, y, x):
        return self.compiled(x, y)


def test_other_methods_take_keywords_by_their_own_names(host):
    """Each method has its own order of parameters."""
    model = Two(neuron.trace(lambda x, y: x - y, (torch.zeros(1, 3), torch.zeros(1, 3))))
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    with parallel(model, "neuron", methods=("forward", "swapped")):
        for found in (model(x, y), model(y=y, x=x), model.swapped(y, x), model.swapped(x=x, y=y)):
            assert torch.equal(found, x - y)


def test_in_dims_are_refused(host):
    """A compiled model has no input whose rows lie elsewhere; the error says what to do."""
    _, model = models()
    with pytest.raises(ShardError, match="in_dims is not supported on NeuronCores"):
        parallel(model, "neuron", in_dims={"input": None})


def test_the_first_call_is_cut_like_later_ones(host):
    """Cores run fixed shapes, so nothing is learned from shards of different sizes."""
    _, model = models()
    with parallel(model, ["nc:0", "nc:1"]) as p:
        for _ in range(2):
            model(torch.randn(8, 3))
            assert p.stats().shards == (2, 2, 2, 2)


def test_an_output_without_rows_must_be_declared(host):
    """Outputs are taken to have the rows on dim 0; one that has not is refused, unless out_dims declares it."""
    model = neuron.trace(lambda x: (x * 2, torch.ones(3, 4)), torch.zeros(2, 3))
    x = torch.randn(4, 3)  # two cores with the compiled size
    with parallel(model, ["nc:0", "nc:1"]), pytest.raises(GatherError, match=r"output\[1\].*out_dims"):
        model(x)
    with parallel(model, ["nc:0", "nc:1"], out_dims=(0, None)):
        for _ in range(2):
            doubled, table = model(x)
            assert torch.equal(doubled, x * 2)
            assert torch.equal(table, torch.ones(3, 4))


def test_a_number_needs_a_reduction(host):
    """A number from each core is refused without `reduce`, which the error names; with it, the sum is the plain one."""
    model = neuron.trace(lambda x: (x * 2, x.sum()), torch.zeros(2, 3))
    x = torch.randn(4, 3)  # two cores with the compiled size
    with parallel(model, ["nc:0", "nc:1"]), pytest.raises(GatherError, match=r"output\[1\].*reduce"):
        model(x)
    with parallel(model, ["nc:0", "nc:1"], reduce="sum"):
        doubled, total = model(x)
        assert torch.equal(doubled, x * 2)
        torch.testing.assert_close(total, x.sum())


def test_submit_without_dynamic_batching_takes_the_compiled_size(host):
    """One core gets chunks of it one after the other; another number of rows is refused at once."""
    model = neuron.trace(lambda x: (x * 2, x.sum()), torch.zeros(2, 3))
    x = torch.randn(6, 3)
    with parallel(model, "neuron", reduce="sum") as p:
        doubled, total = p.submit(x).result()
        assert torch.equal(doubled, x * 2)
        torch.testing.assert_close(total, x.sum())
        with pytest.raises(ShapeError, match=r"3 rows .* every chunk must have 2 rows.*output\[1\] has no batch dimension"):
            p.submit(x[:3])


def test_joined_as_a_list_there_is_one_output_a_shard(host):
    """join="list" gives the list once, also of a call that one core does."""
    _, model = models()
    x = torch.randn(8, 3)
    with parallel(model, ["nc:0", "nc:1"], join="list") as p:
        assert [len(output) for output in model(x)] == [2, 2, 2, 2]
        assert [len(output) for output in p.submit(x).result()] == [8]
        assert [len(output) for output in model(x[:1])] == [1]


def test_a_kept_block_that_is_closed_says_so(host):
    """After close the cores are free, and a call of the block is refused."""
    _, model = models()
    block = parallel(model, "neuron")
    block(torch.randn(8, 3))
    block.close()
    with pytest.raises(SessionError, match="is closed"):
        block(torch.randn(8, 3))
    assert [core.memory_bytes for core in host.stats()] == [0] * 4


def test_a_block_that_is_dropped_frees_its_cores_at_once(host):
    """Used without `with` and never closed, it leaves nothing for the collector."""
    _, model = models()
    block = parallel(model, "neuron")
    block(torch.randn(8, 3))
    gc.disable()
    try:
        del block
        assert [core.memory_bytes for core in host.stats()] == [0] * 4
    finally:
        gc.enable()


class Table(nn.Module):
    """Holds a compiled model, and takes a table for all rows beside them."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def forward(self, x, table):
        return self.compiled(x) @ table


def test_a_whole_call_may_have_inputs_of_other_rows(host):
    """What one core does is not cut, so nothing has to agree."""
    plain, compiled = models()
    x, table = torch.randn(8, 3), torch.randn(2, 5)
    with parallel(Table(compiled), "neuron") as p:
        torch.testing.assert_close(p.submit(x, table).result(), plain(x) @ table)
        with pytest.raises(ShardError, match=r"args\[1\] has 2 on dim 0"):
            p(x, table)
