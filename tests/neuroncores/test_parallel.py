"""`parallel` on NeuronCores."""

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
    """Inside the block, the compiled model takes any number of rows. After the block, only the compiled number."""
    plain, model = models(batch=2)
    x = torch.randn(9, 3)
    model(x[:2])  # TorchScript keeps its forward in the module from the first call
    before = dict(vars(model))
    with parallel(model, devices) as p:
        torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(p(x), plain(x))
    assert vars(model).keys() == before.keys()
    with pytest.raises(torch.jit.Error, match="compiled for"):
        model(x)
    torch.testing.assert_close(model(x[:2]), plain(x[:2]))


def test_stats_leave_out_calls_that_raise(host):
    """Cut calls, plain calls, and submitted calls count when they return, and not if a core raises."""
    model = neuron.trace(nn.Embedding(5, 2).eval(), torch.zeros(2, dtype=torch.int64))
    bad = torch.full((8,), 9)
    with parallel(model, ["nc:0", "nc:1"]) as p:
        p(torch.zeros(8, dtype=torch.int64))
        for call in (p, lambda x: p(x[:1]), lambda x: p.submit(x[:2]).result()):
            with pytest.raises((IndexError, RuntimeError)):
                call(bad)
        stats = p.stats()
    assert (stats.calls, stats.plain, sum(lane.rows for lane in stats.lanes)) == (1, 0, 8)


def test_nothing_is_left_on_the_cores_after_the_block(host):
    """The replicas are unloaded, also if the block ends with an exception."""
    _, model = models()
    in_use, threads = [], set(threading.enumerate())

    def fails():
        with parallel(model, "neuron"):
            model(torch.randn(8, 3))
            in_use.extend(core.models for core in host.stats())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert all(in_use)
    assert [core.models for core in host.stats()] == [0] * 4
    assert set(threading.enumerate()) <= threads


def test_statistics_name_the_cores(host):
    """There are two lanes per core, each labelled with its core. Their rows add up to the total."""
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
    """Whole batches run on the cores, and outputs keep their order."""
    plain, model = models(batch=2)
    batches = [torch.randn(rows, 3) for rows in (2, 5, 1, 0, 7, 2, 3, 4, 4, 4, 1, 9)]
    with torch.no_grad(), parallel(model, "neuron") as p:
        for batch, output in zip(batches, p.map(iter(batches)), strict=True):
            torch.testing.assert_close(output, plain(batch))
    assert sum(core.inferences > 0 for core in host.stats()) == 4


def test_submit_returns_futures_and_refuses_other_shapes(host):
    """A request with one row runs on one core. Inputs that do not fit the compiled model are refused at once."""
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
    """Blocks of one model nest, and blocks of two models share the cores."""
    plain, model = models()
    other_plain, other = models(batch=2)
    x = torch.randn(8, 3)
    with parallel(model, ["nc:0", "nc:1"]), parallel(other, ["nc:1", "nc:2"]):
        with parallel(model, ["nc:3"]):
            torch.testing.assert_close(model(x), plain(x))
        torch.testing.assert_close(model(x) + other(x), plain(x) + other_plain(x))


def test_cpu_lanes_share_a_compiled_model_that_forward_captures(host):
    """It has no state, so every lane may call it."""
    plain, model = models(batch=4)

    class Around(nn.Module):
        def forward(self, x):
            return model(x) * 2

    around, x = Around(), torch.randn(8, 3)
    with torch.no_grad(), parallel(around, ["cpu", "cpu"], out_dims=0) as p:
        torch.testing.assert_close(around(x), plain(x) * 2)
        assert p.stats().shards == (4, 4)


@pytest.mark.parametrize(
    ("devices", "error", "says"),
    [
        (["nc:4"], DeviceUnavailableError, "'nc:4' is not available: this process sees nc:0 to nc:3"),
        (["nc:0", "nc:0"], DeviceListError, "nc:0 is named twice"),
        (["nc:0", "cpu"], DeviceListError, "'cpu' is not a NeuronCore"),
        ("nc:x", DeviceListError, "'nc:x' is not a NeuronCore"),
    ],
    ids=str,
)
def test_invalid_cores_are_refused(host, devices, error, says):
    """The error is raised before anything is loaded."""
    _, model = models()
    with pytest.raises(error, match=says):
        parallel(model, devices)


def test_a_model_that_was_not_traced_is_refused(host):
    """An ordinary module cannot run on NeuronCores, so the block raises on entry."""
    plain, _ = models()
    with pytest.raises(ReplicaError, match="was not traced"), parallel(plain, "neuron"):
        pytest.fail("the block was entered")
    assert "forward" not in vars(plain)


def test_faces_for_torch_devices_name_the_face_for_cores(host):
    """The errors of DataParallel and tuple_fn name neuron.DataParallel."""
    _, model = models()
    with pytest.raises(DeviceUnavailableError, match=r"neuron\.DataParallel"):
        DataParallel(model, device_ids=["nc:0"])
    with pytest.raises(DeviceUnavailableError, match=r"neuron\.DataParallel"):
        tuple_fn(torch.tanh, parallel=True, devices=["nc:0"])((torch.zeros(1),))


@pytest.mark.parametrize("dim", [1, -1])
def test_another_dim_needs_the_exact_size(host, dim):
    """dim=1 cuts on dim 1 without dynamic batching, and refuses other sizes than the compiled one per core."""
    model = neuron.trace(lambda x: x * 2, torch.zeros(2, 4))
    x = torch.randn(2, 8)
    with parallel(model, ["nc:0", "nc:1"], dim=dim):
        assert torch.equal(model(x), x * 2)
        with pytest.raises(ShapeError, match=r"takes 4, .*supports only dim 0"):
            model(torch.randn(2, 6))


class Two(nn.Module):
    """Holds a compiled model with two inputs. One method takes them in the opposite order."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def forward(self, x, y):
        return self.compiled(x, y)

    def swapped(self, y, x):
        return self.compiled(x, y)


def test_each_method_has_its_own_parameter_names(host):
    """Keywords are matched with the parameters of the called method."""
    model = Two(neuron.trace(lambda x, y: x - y, (torch.zeros(1, 3), torch.zeros(1, 3))))
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    with parallel(model, "neuron", methods=("forward", "swapped")):
        for found in (model(x, y), model(y=y, x=x), model.swapped(y, x), model.swapped(x=x, y=y)):
            assert torch.equal(found, x - y)


def test_in_dims_names_what_every_core_gets_whole(host):
    """A module around a compiled model may take values that are not rows, and a compiled model a table without rows."""
    plain, compiled = models(batch=2)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.compiled = compiled

        def forward(self, x, names, scale):
            return self.compiled(x) * scale.sum(), names

    x, names, scale = torch.randn(8, 3), [str(row) for row in range(8)], torch.ones(8)
    with torch.no_grad(), parallel(Scaled(), ["nc:0", "nc:1"], in_dims={"names": "items", "scale": None}) as p:
        outputs, joined = p(x, names, scale)
        torch.testing.assert_close(outputs, plain(x) * 8)
        assert joined == names
        assert p.submit(x, names, scale).result()[1] == names
    product = neuron.trace(lambda x, table: x @ table, (torch.zeros(2, 3), torch.zeros(3, 5)))
    with parallel(product, ["nc:0", "nc:1"], in_dims={"table": None}) as p:
        table = torch.randn(3, 5)
        torch.testing.assert_close(p(x[:4], table), x[:4] @ table)
        torch.testing.assert_close(torch.cat(list(p.map([(rows, table) for rows in x.split(2)]))), x @ table)
        with pytest.raises(ShapeError, match=r"args\[0\] is \[4, 3\], but the model is compiled for \[2, 3\]"):
            p(x, table)


def test_shards_are_equal(host):
    """Cores run fixed shapes, so the sizes of shards do not differ, and outputs have their rows on dim 0."""
    _, model = models()
    with parallel(model, ["nc:0", "nc:1"]) as p:
        for _ in range(2):
            model(torch.randn(8, 3))
            assert p.stats().shards == (2, 2, 2, 2)


def test_an_output_without_rows_must_be_declared(host):
    """Rows of outputs are on dim 0. An output without rows is refused unless out_dims declares it."""
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
    """Without `reduce`, one number per core is refused, and the error names `reduce`. With "sum" it is the plain sum."""
    model = neuron.trace(lambda x: (x * 2, x.sum()), torch.zeros(2, 3))
    x = torch.randn(4, 3)  # two cores with the compiled size
    with parallel(model, ["nc:0", "nc:1"]), pytest.raises(GatherError, match=r"output\[1\].*reduce"):
        model(x)
    with parallel(model, ["nc:0", "nc:1"], reduce="sum"):
        doubled, total = model(x)
        assert torch.equal(doubled, x * 2)
        torch.testing.assert_close(total, x.sum())


def test_submit_without_dynamic_batching_takes_the_compiled_size(host):
    """One core gets chunks of the compiled size one after another. Other row counts are refused at once."""
    model = neuron.trace(lambda x: (x * 2, x.sum()), torch.zeros(2, 3))
    x = torch.randn(6, 3)
    with parallel(model, "neuron", reduce="sum") as p:
        doubled, total = p.submit(x).result()
        assert torch.equal(doubled, x * 2)
        torch.testing.assert_close(total, x.sum())
        with pytest.raises(ShapeError, match=r"3 rows .* every chunk must have 2 rows.*output\[1\] has no batch dimension"):
            p.submit(x[:3])


def test_join_list_returns_one_output_per_shard(host):
    """join="list" also returns a list for a call that runs whole on one core."""
    _, model = models()
    x = torch.randn(8, 3)
    with parallel(model, ["nc:0", "nc:1"], join="list") as p:
        assert [len(output) for output in model(x)] == [2, 2, 2, 2]
        assert [len(output) for output in p.submit(x).result()] == [8]
        assert [len(output) for output in model(x[:1])] == [1]


def test_a_closed_block_refuses_calls(host):
    """After close the cores are free, and a call of the block raises an error."""
    _, model = models()
    block = parallel(model, "neuron")
    block(torch.randn(8, 3))
    block.close()
    with pytest.raises(SessionError, match="is closed"):
        block(torch.randn(8, 3))
    assert [core.models for core in host.stats()] == [0] * 4


def test_an_unreferenced_block_frees_its_cores_at_once(host):
    """A block without `with` or close leaves no work for the garbage collector."""
    _, model = models()
    block = parallel(model, "neuron")
    block(torch.randn(8, 3))
    gc.disable()
    try:
        del block
        assert [core.models for core in host.stats()] == [0] * 4
    finally:
        gc.enable()


class Table(nn.Module):
    """Holds a compiled model, and also takes a table that applies to all rows."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def forward(self, x, table):
        return self.compiled(x) @ table


def test_a_whole_call_may_have_inputs_with_different_row_counts(host):
    """A call that runs whole on one core is not cut, so row counts may differ."""
    plain, compiled = models()
    x, table = torch.randn(8, 3), torch.randn(2, 5)
    with parallel(Table(compiled), "neuron") as p:
        torch.testing.assert_close(p.submit(x, table).result(), plain(x) @ table)
        with pytest.raises(ShardError, match=r"args\[1\] has 2 on dim 0"):
            p(x, table)


def test_modules_around_follow_assigned_parameters_and_buffers(host):
    """A parameter or buffer that is assigned after the first call reaches every core."""
    _, compiled = models()
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), compiled).eval()
    x = torch.randn(8, 3)
    with torch.no_grad(), parallel(model, ["nc:0", "nc:1", "nc:3"]) as p:
        p(x)
        model[0].load_state_dict(
            {name: torch.zeros_like(value) for name, value in model[0].state_dict().items()}, assign=True
        )
        model[1].running_mean = torch.ones(3)
        torch.testing.assert_close(p(x), torch.cat([compiled(row) for row in model[:2](x).split(1)]))


class Equal(nn.Linear):
    """A layer that is equal to all others of its class."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    __hash__ = nn.Linear.__hash__


def test_a_replaced_submodule_is_refused(host):
    """Also by an equal one. The error says to open the block again, which works."""
    _, compiled = models()
    model = nn.Sequential(Equal(3, 3), compiled).eval()
    x = torch.randn(8, 3)
    with torch.no_grad(), parallel(model, ["nc:0", "nc:1"]) as p:
        p(x)
        model[0] = Equal(3, 3)
        with pytest.raises(ReplicaError, match=r"a submodule of Sequential was replaced .* open it again"):
            p(x)
    with torch.no_grad(), parallel(model, ["nc:0", "nc:1"]) as p:
        torch.testing.assert_close(p(x), torch.cat([compiled(row) for row in model[0](x).split(1)]))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True)], ids=repr)
def test_normalizations_around_a_compiled_model_may_not_update_their_statistics(host, norm):
    """Every core would update them with other rows."""
    _, compiled = models()
    model = nn.Sequential(norm, compiled).train()
    refused = pytest.raises(ReplicaError, match=f"{type(norm).__name__} around a compiled model is in train mode")
    with torch.no_grad(), parallel(model, ["nc:0", "nc:1"]) as p, refused:
        p(torch.randn(8, 3))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False)], ids=repr)
def test_other_normalizations_around_a_compiled_model_run(host, norm):
    """These are the cures that the error names."""
    _, compiled = models()
    with torch.no_grad(), parallel(nn.Sequential(norm, compiled), ["nc:0", "nc:1"]) as p:
        assert p(torch.randn(8, 3)).shape == (8, 2)


def test_wrong_keywords_are_refused_before_anything_runs(host):
    """The error shows the names of the call and those of the model."""
    model = neuron.trace(lambda x, mask, z: x * mask + z, tuple(torch.ones(1, 3) for _ in range(3)))
    x = torch.ones(4, 3)
    with parallel(model, ["nc:0", "nc:1"]) as p:
        assert torch.equal(p(x, z=x, mask=x), 2 * x)
        ran = host.stats()
        for kwargs in ({"mask": x, "q": x}, {"mask": x, "z": x, "q": x}):
            with pytest.raises(ShapeError, match=r"'q' after 1 positional values, but the model takes x, mask, z"):
                p(x, **kwargs)
        with pytest.raises(ShapeError, match=r"the call has 2 values, but the model is compiled for 3 tensors"):
            p(x, mask=x)
        assert host.stats() == ran
