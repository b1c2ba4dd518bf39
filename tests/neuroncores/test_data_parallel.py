"""`neuron.DataParallel` has the vendor's API. These tests run on emulated cores."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from parawrap import (
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    ReplicaError,
    ShapeError,
    ShardError,
    neuron,
)
from parawrap.neuroncores import Batching
from parawrap.testing import neuron_host


def net_of(batch=1, device_ids=None, **options):
    """Return a linear model that is compiled for `batch` rows, and its DataParallel."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).eval()
    compiled = neuron.trace(plain, torch.zeros(batch, 3))
    return plain, compiled, neuron.DataParallel(compiled, device_ids, **options)


def inferences(host):
    return [core.inferences for core in host.stats()]


def loads(host):
    return [core.loads for core in host.stats()]


# Errors


class Around(nn.Module):
    """Runs a compiled model, and refuses a batch with a row of nines."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled

    def forward(self, x):
        if (x == 9).any():
            raise ValueError("nine")
        return self.compiled(x)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("row", [0, 3])
def test_error_of_one_core_in_turns_is_that_of_the_call(host, workers, row):
    """Cores that were not reached have no outputs."""
    _, compiled, _ = net_of()
    net = neuron.DataParallel(Around(compiled).eval())
    net.num_workers = workers
    x = torch.zeros(4, 3)
    x[row] = 9
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="nine"):
            net(x)
    finally:
        torch.use_deterministic_algorithms(False)
        net.close()


# Choice of cores


@pytest.mark.parametrize(
    ("device_ids", "indices"),
    [(None, [0, 1, 2, 3]), ([2], [2]), (["nc:0", "nc:3"], [0, 3]), ([1, "nc:2"], [1, 2]), ([3, 1], [3, 1])],
    ids=str,
)
def test_device_ids_select_the_cores(host, device_ids, indices):
    """Indices and "nc:#" select cores. Without device_ids, all cores are used."""
    plain, _, net = net_of(device_ids=device_ids)
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(x), plain(x))
    assert net.device_ids == indices
    assert {core for core, count in enumerate(inferences(host)) if count} == set(indices)


@pytest.mark.parametrize(
    ("device_ids", "error", "says"),
    [
        (["nc:14"], DeviceUnavailableError, "'nc:14' is not available: this process sees nc:0 to nc:8"),
        ([9], DeviceUnavailableError, "nc:0 to nc:8"),
        (["gpu:0"], DeviceListError, "'gpu:0' is not a NeuronCore"),
        ([-1], DeviceListError, "-1 is not a NeuronCore"),
        (["nc:-1"], DeviceListError, "'nc:-1' is not a NeuronCore"),
        (["nc:"], DeviceListError, "'nc:' is not a NeuronCore"),
        ([True], DeviceListError, "True is not a NeuronCore"),
        ([0.0], DeviceListError, "0.0 is not a NeuronCore"),
        ([0, "nc:0"], DeviceListError, "nc:0 is named twice"),
        ([], DeviceListError, "list of NeuronCores is empty"),
    ],
    ids=str,
)
def test_invalid_device_ids_are_refused(device_ids, error, says):
    """The error names the missing, invalid, or repeated core, or says that the list is empty."""
    with neuron_host(cores=9), pytest.raises(error, match=says):
        net_of(device_ids=device_ids)


def test_consecutive_cores_are_loaded_in_one_call(host, monkeypatch):
    """Each run of consecutive cores is placed once, in any order of the list."""
    placed = []
    place = type(host).place
    monkeypatch.setattr(type(host), "place", lambda *args: placed.append(args[2:]) or place(*args))
    net_of(device_ids=[3, 0, 1])
    assert placed == [(0, 2), (3, 1)]


def test_a_replica_is_loaded_once(host):
    """Calls, and changes of num_workers or split_size, load nothing more."""
    _, _, net = net_of()
    before = loads(host)
    for rows in (4, 8, 5):
        net(torch.randn(rows, 3))
    net.num_workers = 4
    net(torch.randn(4, 3))
    net.split_size = 1
    net(torch.randn(4, 3))
    assert loads(host) == before


def test_the_original_model_is_unchanged(host):
    """It still takes only its compiled size, and is not moved to other cores."""
    _, compiled, net = net_of(batch=2)
    net(torch.randn(8, 3))
    with pytest.raises(torch.jit.Error, match="compiled for"):
        compiled(torch.randn(3, 3))
    assert net.module is compiled


# Rows


def test_rows_are_cut_into_whole_inferences(host):
    """With a compiled size of 4, nine rows run as three inferences on three cores, not as four partial ones."""
    plain, _, net = net_of(batch=4)
    x = torch.randn(9, 3)
    with pytest.warns(UserWarning, match="9 rows keep 3 of 4 NeuronCores busy"):
        y = net(x)
    torch.testing.assert_close(y, plain(x))
    assert sorted(inferences(host)) == [0, 1, 1, 1]


def test_the_warning_about_idle_cores_says_how_to_use_them(host):
    """It names the rows, the cores, and the divisor, and points at the caller's line."""
    _, _, net = net_of(batch=2)
    with pytest.warns(UserWarning, match=r"4 rows keep 2 of 4 NeuronCores busy\. .* a multiple of 8 rows") as found:
        net(torch.randn(4, 3))
    assert found[0].filename == __file__


def test_zero_rows_give_zero_rows(host):
    """A batch with zero rows gives an output with zero rows, and runs no inference."""
    _, _, net = net_of()
    assert net(torch.zeros(0, 3)).shape == (0, 2)
    assert inferences(host) == [0] * 4


@pytest.mark.parametrize("split_size", [1, 2, 3, 100])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_split_size_and_num_workers_do_not_change_results(host, split_size, workers):
    """For any chunk size and any number of workers, rows equal the plain rows."""
    plain, _, net = net_of(batch=2)
    net.num_workers, net.split_size = workers, split_size
    x = torch.randn(13, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = net(x)
    torch.testing.assert_close(y, plain(x))
    assert (net.num_workers, net.split_size) == (workers, split_size)


@pytest.mark.parametrize("name", ["num_workers", "split_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_a_number_below_one_is_refused(host, name, value):
    """The message names the attribute and the value, and the attribute does not change."""
    _, _, net = net_of()
    before = getattr(net, name)
    with pytest.raises(ShardError, match=f"{name}={value!r}"):
        setattr(net, name, value)
    assert getattr(net, name) == before


def test_the_defaults_are_the_vendors(host):
    """The defaults are two workers per core, and no split size."""
    _, _, net = net_of()
    assert (net.num_workers, net.split_size, net.dim) == (8, None, 0)


# Dynamic batching


def test_without_dynamic_batching_every_core_gets_the_compiled_size(host):
    """Rows per core must equal the compiled size. The error for other numbers shows both."""
    plain, _, net = net_of(batch=2)
    net.disable_dynamic_batching()
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(x), plain(x))
    assert inferences(host) == [1] * 4
    for rows, each in ((4, "1 per core"), (12, "3 per core"), (9, "2.25 per core"), (0, "0 per core")):
        with pytest.raises(ShapeError, match=f"{rows} rows on dim 0 over 4 NeuronCores are {each}.* takes 2, "):
            net(torch.randn(rows, 3))
    torch.testing.assert_close(net(x), plain(x))


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_split_size_of_the_compiled_size_takes_several_chunks(host, workers):
    """Without dynamic batching, any number of workers takes rows in chunks of the compiled size."""
    plain, _, net = net_of(batch=2, set_dynamic_batching=False)
    net.num_workers, net.split_size = workers, 2
    x = torch.randn(12, 3)
    torch.testing.assert_close(net(x), plain(x))
    net.split_size = 3
    with pytest.raises(ShapeError, match=r"in chunks of 3: .* every chunk must have 2 rows"):
        net(torch.randn(12, 3))


def test_fewer_workers_than_cores_without_dynamic_batching(host):
    """One worker feeds every core, one compiled size after another."""
    plain, _, net = net_of(batch=2, set_dynamic_batching=False)
    net.num_workers = 1
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(x), plain(x))


def test_disabling_dynamic_batching_reloads_the_model_once(host):
    """The first call reloads the replicas. A second call, or a call for a model without it, loads nothing."""
    _, _, net = net_of()
    before = loads(host)
    net.disable_dynamic_batching()
    assert loads(host) == [count + 1 for count in before]
    net.disable_dynamic_batching()
    assert loads(host) == [count + 1 for count in before]


class Along(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("dim", [1, 2])
def test_another_dim_turns_dynamic_batching_off_with_a_warning(host, dim):
    """Rows on another dim must be the compiled size per core. That dim is cut and joined."""
    compiled = neuron.trace(Along(), torch.zeros(1, 4, 4))
    with pytest.warns(UserWarning, match=f"dynamic batching is off because dim={dim}"):
        net = neuron.DataParallel(compiled, device_ids=[0, 1], dim=dim)
    shape = [1, 4, 4]
    shape[dim] = 8
    x = torch.randn(shape)
    assert torch.equal(net(x), x * 2)
    shape[dim] = 6
    with pytest.raises(ShapeError, match=f"6 rows on dim {dim} over 2 NeuronCores are 3 per core.* takes 4, "):
        net(torch.randn(shape))


class Mean(nn.Module):
    def forward(self, x):
        return x * 2, x.mean()


def test_an_output_without_a_batch_dimension_turns_dynamic_batching_off(host):
    """The warning names the output and the option. Calls with the exact size work."""
    compiled = neuron.trace(Mean(), torch.zeros(2, 3))
    with pytest.warns(UserWarning, match=r"output\[1\] has no batch dimension.*set_dynamic_batching=False"):
        net = neuron.DataParallel(compiled)
    x = torch.randn(8, 3)
    with pytest.warns(UserWarning, match="0-d"):
        y, means = net(x)
    assert torch.equal(y, x * 2)
    torch.testing.assert_close(means, x.view(4, 2, 3).mean((1, 2)))
    with pytest.raises(ShapeError, match="takes 2, "):
        net(torch.randn(6, 3))
    with pytest.raises(ShapeError, match="no batch dimension"):
        neuron.dynamic_batch(compiled)


# Models and inputs


@pytest.mark.parametrize("model", [nn.Linear(3, 2), torch.tanh, "model.pt"], ids=["module", "function", "path"])
def test_a_model_that_was_not_traced_is_refused(host, model):
    """The error names the function to call."""
    with pytest.raises(ReplicaError, match=r"was not traced for NeuronCores.*parawrap.neuron.trace"):
        neuron.DataParallel(model)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ((torch.zeros(4, 5),), r"args\[0\] is \(4, 5\) float32, but the model is compiled for \(1, 3\) float32"),
        ((torch.zeros(4, 3, dtype=torch.float64),), r"\(4, 3\) float64, .* compiled for \(1, 3\) float32"),
        ((torch.zeros(4, 3, 1),), r"\(4, 3, 1\) float32, .* \(1, 3\) float32"),
        ((torch.zeros(4, 3), torch.zeros(4, 3)), r"2 values, .* 1 tensors: args\[0\] \(1, 3\) float32"),
        ((), "0 values"),
        ((3,), r"args\[0\] is 3, .* for a tensor: \(1, 3\) float32"),
    ],
    ids=["columns", "dtype", "dims", "too many", "none", "a number"],
)
def test_inputs_that_do_not_fit_the_compiled_model_are_refused(host, call, says):
    """The error names the argument, its shape, and the compiled shape. No inference runs."""
    _, _, net = net_of()
    with pytest.raises(ShapeError, match=says):
        net(*call)
    assert inferences(host) == [0] * 4


def test_keyword_arguments_are_checked_against_the_compiled_shapes(host):
    """The error names the argument by its position."""
    _, _, net = net_of()
    with pytest.raises(ShapeError, match=r"args\[0\] is \(4, 5\)"):
        net(input=torch.zeros(4, 5))


def test_a_single_row_input_is_broadcast(host):
    """An input with one row is repeated for the rows of the others, as in torch."""
    net = neuron.DataParallel(neuron.trace(lambda x, y: x + y, (torch.zeros(2, 3), torch.zeros(2, 3))))
    x, y = torch.randn(8, 3), torch.randn(1, 3)
    assert torch.equal(net(x, y), x + y)
    assert torch.equal(net(y, x), x + y)
    with pytest.warns(UserWarning, match="1 row keeps 1 of 4 NeuronCores busy"):
        assert torch.equal(net(y, y), y + y)


def test_an_input_compiled_without_rows_turns_dynamic_batching_off(host):
    """A table for all rows has no batch dimension, so only the exact size works."""
    compiled = neuron.trace(lambda x, table: x @ table, (torch.zeros(2, 3), torch.zeros(1, 3, 5)[0]))
    with pytest.warns(UserWarning, match=r"args\[0\] is compiled for 2 rows on dim 0, and args\[1\] for 3"):
        net = neuron.DataParallel(compiled)
    x, table = torch.randn(8, 3), torch.randn(3, 5)
    with pytest.raises(ShardError, match=r"args\[1\] has 3 on dim 0"):
        net(x, table)


@pytest.mark.parametrize(
    ("dim", "says"), [(2, "out of range"), (-3, "out of range"), ("0", "not an integer"), (None, "not an integer")]
)
def test_a_dim_that_the_inputs_do_not_have_is_refused(host, dim, says):
    """The constructor raises before anything is loaded."""
    with pytest.raises(ShardError, match=says):
        net_of(dim=dim)


def test_rows_that_disagree_are_refused(host):
    """The error names two inputs with different row counts, before anything runs."""
    net = neuron.DataParallel(neuron.trace(lambda x, y: x + y, (torch.zeros(1, 3), torch.zeros(1, 3))))
    with pytest.raises(ShardError, match=r"args\[1\] has 4 on dim 0, args\[0\] has 6\. Give all inputs"):
        net(torch.zeros(6, 3), torch.zeros(4, 3))


def test_a_failed_load_unloads_the_other_cores():
    """If the second run of cores cannot be loaded, the first is unloaded."""
    with neuron_host(cores=4) as host:
        compiled = neuron.trace(nn.Linear(3, 2), torch.zeros(1, 3))
        place, calls = host.place, []

        def fails(model, start, count):
            calls.append(start)
            if start == 2:
                raise RuntimeError("no room on nc:2")
            return place(model, start, count)

        host.place = fails
        with pytest.raises(RuntimeError, match="no room"):
            neuron.DataParallel(compiled, device_ids=[0, 2])
        gc.collect()
        assert calls == [0, 2]
        assert [core.models for core in host.stats()] == [0] * 4


# DataParallel as a module


def test_it_is_a_module(host):
    """The model is its child `module`, with its state under this name. It can be part of another module."""
    plain, _, net = net_of()
    assert isinstance(net, nn.Module)
    assert all(name.startswith("module.") for name in net.state_dict())
    x = torch.randn(8, 3)
    torch.testing.assert_close(nn.Sequential(net, nn.ReLU())(x), plain(x).relu())


def test_a_copy_has_its_own_replicas(host):
    """A deep copy gives the same outputs, and works after the original is gone."""
    plain, _, net = net_of()
    other = copy.deepcopy(net)
    net.close()
    x = torch.randn(8, 3)
    torch.testing.assert_close(other(x), plain(x))
    other.close()


def test_closing_frees_the_cores_and_the_next_call_loads_again(host):
    """`close` frees the memory of all cores. A later call loads the model again."""
    plain, _, net = net_of()
    x = torch.randn(8, 3)
    net(x)
    assert all(core.models for core in host.stats())
    net.close()
    assert [core.models for core in host.stats()] == [0] * 4
    torch.testing.assert_close(net(x), plain(x))
    net.close()


def test_threads_may_call_at_once(host):
    """Each caller gets its own rows."""
    plain, _, net = net_of(batch=2)
    wrong = []

    def client():
        for rows in (8, 16, 24, 9, 31):
            x = torch.randn(rows, 3)
            with torch.no_grad():
                if not torch.allclose(net(x), plain(x), atol=1e-6):
                    wrong.append(rows)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_keyword_arguments_are_cut_like_positional_ones(host):
    """A compiled model keeps the names of its parameters."""
    plain, _, net = net_of()
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(input=x), plain(x))


def test_an_error_in_a_lane_names_the_core(host):
    """The runtime's error arrives unchanged, with a note on lane, core, and shard. Later calls work."""

    class Fails(nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, x):
            if bool((x == 13).any()):
                raise KeyError("thirteen")
            return self.compiled(x)

    plain, compiled, _ = net_of()
    net = neuron.DataParallel(Fails(compiled))
    x = torch.randn(8, 3)
    x[3] = 13
    with pytest.raises(KeyError, match="thirteen") as caught:
        net(x)
    assert any("on nc:" in note for note in caught.value.__notes__)
    x[3] = 0
    torch.testing.assert_close(net(x), plain(x))


def test_outputs_that_cannot_be_joined_are_refused(host):
    """The error for a module with disagreeing shards names the output and the option to set."""

    class Ragged(nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, x):
            y = self.compiled(x)
            return y[:, : 1 + int(x[0, 0])]

    _, compiled, _ = net_of()
    net = neuron.DataParallel(Ragged(compiled))
    x = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]])
    with pytest.raises(GatherError):
        net(x)


# Concurrency


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "num_workers", 3),
        lambda net: setattr(net, "split_size", 1),
        lambda net: net.disable_dynamic_batching(),
        lambda net: net.close(),
    ],
    ids=["num_workers", "split_size", "disable_dynamic_batching", "close"],
)
def test_a_call_in_flight_finishes_on_its_cores(host, change, monkeypatch):
    """This holds for any change from another thread. The cores are freed when the call ends."""
    plain, _, net = net_of()
    cut, begun, let = Batching.cut, threading.Event(), threading.Event()

    def paused(self, rows, lanes):
        if not begun.is_set():
            begun.set()
            assert let.wait(30)
        return cut(self, rows, lanes)

    monkeypatch.setattr(Batching, "cut", paused)
    x = torch.randn(8, 3)
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(net, x)
        assert begun.wait(30)
        changed = threads.submit(change, net)
        changed.result(30)
        let.set()
        torch.testing.assert_close(call.result(30), plain(x))
    net.close()
    assert [core.models for core in host.stats()] == [0] * 4


def test_an_unreferenced_instance_frees_its_cores_at_once(host):
    """It has no reference cycle, so the garbage collector is not needed."""
    _, _, net = net_of()
    net(torch.randn(8, 3))
    gc.disable()
    try:
        del net
        assert [core.models for core in host.stats()] == [0] * 4
    finally:
        gc.enable()


# Chunks, workers, and cores


def test_0d_outputs_of_chunks_are_one_vector(host):
    """Several chunks per core give one value per chunk, in row order, for any number of workers."""
    compiled = neuron.trace(lambda x: x.sum(), torch.zeros(2, 3))
    x = torch.randn(10, 3)
    for workers in (1, 4, 8):
        net = neuron.DataParallel(compiled, set_dynamic_batching=False)
        net.num_workers, net.split_size = workers, 2
        with pytest.warns(UserWarning, match="one value per shard"):
            torch.testing.assert_close(net(x), x.view(5, 6).sum(1))
        net.close()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("dynamic", [True, False])
def test_fewer_workers_than_cores_use_every_core(workers, dynamic):
    """Each core gets its share, also if no two cores are consecutive."""
    with neuron_host(cores=8) as host:
        plain, _, net = net_of(device_ids=[0, 2, 4, 6], set_dynamic_batching=dynamic)
        net.num_workers = workers
        x = torch.randn(4, 3)
        torch.testing.assert_close(net(x), plain(x))
        assert inferences(host) == [1, 0, 1, 0, 1, 0, 1, 0]
        net.close()


def test_a_wrapper_of_unknown_size_without_dynamic_batching(host):
    """Each core gets an equal part of the rows. A number that cannot be divided equally is refused."""

    class Around(nn.Module):
        def __init__(self, compiled):
            super().__init__()
            self.compiled = compiled

        def forward(self, x):
            return self.compiled(x)

    plain, compiled, _ = net_of(batch=2)
    net = neuron.DataParallel(Around(compiled), set_dynamic_batching=False)
    x = torch.randn(8, 3)
    for workers in (1, 8):
        net.num_workers = workers
        torch.testing.assert_close(net(x), plain(x))
    with pytest.raises(ShapeError, match=r"9 rows .* 2.25 per core, .* the same number of rows"):
        net(torch.randn(9, 3))


# Layers around a compiled model


class Head(nn.Module):
    """An ordinary layer after a compiled model."""

    def __init__(self, compiled):
        super().__init__()
        self.compiled = compiled
        self.head = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.5)
        self.table = torch.arange(3.0)

    def forward(self, x):
        return self.drop(self.head(self.compiled(x))), self.table


@pytest.fixture
def head(host):
    """A Head on cores, and an equal plain model."""
    plain, compiled, net = net_of(batch=2)
    net.close()
    model = Head(compiled).eval()
    return model, lambda x: model.drop(model.head(plain(x)))


@pytest.mark.parametrize("device_ids", [[0, 1], [0, 2]], ids=str)
def test_layers_around_a_compiled_model_are_shared(head, device_ids):
    """Replicas see writes to these layers, follow their mode, and return the same tensor objects."""
    model, expected = head
    net = neuron.DataParallel(model, device_ids)
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(x)[0], expected(x))
    with torch.no_grad():
        model.head.weight.mul_(3)
    torch.testing.assert_close(net(x)[0], expected(x))
    assert net(x)[1].shape == (3,)
    net.train()
    assert (net(x)[0] == 0).any()
    net.eval()
    assert not (net(x)[0] == 0).any()
    net.close()


@pytest.mark.parametrize("device_ids", [[0, 1], [0, 2]], ids=str)
def test_gradients_arrive_in_the_layers_around_a_compiled_model(head, device_ids):
    """They equal the gradients of the plain model."""
    model, expected = head
    net = neuron.DataParallel(model, device_ids)
    x = torch.randn(8, 3)
    net(x)[0].square().sum().backward()
    found, model.head.weight.grad = model.head.weight.grad, None
    expected(x).square().sum().backward()
    torch.testing.assert_close(found, model.head.weight.grad)
    net.close()


def test_a_module_that_cannot_be_copied_is_refused(head, host):
    """The error names what cannot be copied, and no core keeps anything."""
    model, _ = head
    model.lock = threading.Lock()
    with pytest.raises(ReplicaError, match=r"Head cannot be copied for a replica: .*lock"):
        neuron.DataParallel(model)
    assert [core.models for core in host.stats()] == [0] * 4


def test_a_lane_may_close_while_another_thread_closes(host):
    """Closing holds no lock that a lane could wait for."""
    nets = []

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.compiled = neuron.trace(nn.Linear(3, 2), torch.zeros(1, 3))

        def forward(self, x):
            threads.submit(nets[0].close)
            nets[0].num_workers = 2
            return self.compiled(x)

    with ThreadPoolExecutor(4) as threads, torch.no_grad():
        nets.append(neuron.DataParallel(Around(), device_ids=[0, 1]))
        for _ in range(5):
            assert nets[0](torch.ones(4, 3)).shape == (4, 2)
    nets.pop().close()
