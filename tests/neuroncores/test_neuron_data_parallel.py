"""`neuron.DataParallel` has the vendor's API. These tests run on emulated cores."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from parawrap import ReplicaError, ShapeError, ShardError, neuron
from parawrap.neuroncores import Batching
from parawrap.testing import neuron_host
from tests.helpers.neuron_doubles import assert_equal, counts

FREE = [0] * 4
ignore_idle = pytest.mark.filterwarnings("ignore:.* rows? keeps? .* NeuronCores busy:UserWarning")


class Around(nn.Module):
    def __init__(self, compiled, function=lambda compiled, x: compiled(x)):
        super().__init__()
        self.compiled, self.function = compiled, function

    def forward(self, x):
        return self.function(self.compiled, x)


class Head(nn.Module):
    def __init__(self, compiled):
        super().__init__()
        self.compiled, self.head, self.drop = compiled, nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.head(self.compiled(x)))


def net_of(batch=1, device_ids=None, **options):
    """Return a linear model that is compiled for `batch` rows, and its DataParallel."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).eval()
    compiled = neuron.trace(plain, torch.zeros(batch, 3))
    return plain, compiled, neuron.DataParallel(compiled, device_ids, **options)


# -- rows


KINDS = {
    "tensor": (lambda x: x * 2 + 1, lambda t: (t(),)),
    "list": (lambda items: [items[0] + items[1], items[1] * 3], lambda t: ([t(), t()],)),
    "dict": (lambda named: {"sum": named["x"] + named["y"], "x": named["x"]}, lambda t: ({"x": t(), "y": t()},)),
    "nested": (
        lambda x, rest: (x + rest[1]["y"], ([rest[0][0] * 2, x], {"last": rest[0][1] + 1}), ((x - 1,), rest[0][1])),
        lambda t: (t(), ([t(), t()], {"y": t()})),
    ),
}


@ignore_idle
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_are_rows_out(kind, batch):
    """For 1 to 64 rows on 1 to 8 cores, with gaps between cores, and without dynamic batching."""
    plain, example = KINDS[kind]
    with neuron_host(cores=8):
        model = neuron.trace(plain, example(lambda: torch.zeros(batch, 3)))
        for device_ids in ([0], [5, 0, 1], [*range(8)]):
            net = neuron.DataParallel(model, device_ids=device_ids)
            for rows in (*range(10), 31, 64):
                call = example(partial(torch.randn, rows, 3))
                assert_equal(net(*call), plain(*call))
            net.disable_dynamic_batching()
            call = example(partial(torch.randn, len(device_ids) * batch, 3))
            assert_equal(net(*call), plain(*call))
            net.close()


def test_rows_are_whole_inferences(host):
    """The warning about idle cores points at the caller's line and says how many rows use all cores."""
    plain, _, net = net_of(batch=4)
    x = torch.randn(9, 3)
    with pytest.warns(UserWarning, match=r"9 rows keep 3 of 4 NeuronCores busy\. .* a multiple of 16 rows") as found:
        y = net(x)
    assert found[0].filename == __file__
    torch.testing.assert_close(y, plain(x))
    assert sorted(counts(host, "inferences")) == [0, 1, 1, 1]


# -- cores


@pytest.mark.parametrize(
    ("device_ids", "indices"), [(None, [0, 1, 2, 3]), ([2], [2]), ([1, "nc:2"], [1, 2]), ([3, 0], [3, 0])], ids=str
)
def test_device_ids_select_the_cores(host, device_ids, indices):
    plain, _, net = net_of(device_ids=device_ids)
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(input=x), plain(x))
    assert net.device_ids == indices
    assert {core for core, count in enumerate(counts(host, "inferences")) if count} == set(indices)


def test_failed_load_frees_other_cores(host, monkeypatch):
    compiled = neuron.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    place = host.place

    def fails(model, start, count):
        if start == 2:
            raise RuntimeError("no room on nc:2")
        return place(model, start, count)

    monkeypatch.setattr(host, "place", fails)
    with pytest.raises(RuntimeError, match="no room"):
        neuron.DataParallel(compiled, device_ids=[0, 2])
    gc.collect()
    assert counts(host, "models") == FREE


def test_closing_frees_the_cores(host):
    """So does the last reference, at once. A call after `close` loads again. A deep copy has its own replicas."""
    plain, compiled, net = net_of(batch=2)
    x = torch.randn(8, 3)
    for _ in range(2):
        torch.testing.assert_close(net(x), plain(x))
        assert all(counts(host, "models"))
        net.close()
        assert counts(host, "models") == FREE
    assert net.module is compiled
    other = copy.deepcopy(net)
    torch.testing.assert_close(other(x), plain(x))
    other.close()
    with pytest.raises(torch.jit.Error, match="compiled for"):
        compiled(torch.randn(3, 3))
    net(x)
    gc.disable()
    try:
        del net
        assert counts(host, "models") == FREE
    finally:
        gc.enable()


# -- the vendor's options


@ignore_idle
@pytest.mark.parametrize("split_size", [1, 3, 100])
@pytest.mark.parametrize("workers", [1, 3, 8])
def test_workers_and_chunks(host, split_size, workers):
    plain, _, net = net_of(batch=2)
    assert (net.num_workers, net.split_size, net.dim) == (8, None, 0)
    net.num_workers, net.split_size = workers, split_size
    x = torch.randn(13, 3)
    torch.testing.assert_close(net(x), plain(x))
    assert (net.num_workers, net.split_size) == (workers, split_size)


@pytest.mark.parametrize("name", ["num_workers", "split_size"])
@pytest.mark.parametrize("value", [0, 1.5, "2", True])
def test_number_below_one_is_refused(host, name, value):
    """The attribute does not change."""
    _, _, net = net_of()
    before = getattr(net, name)
    with pytest.raises(ShardError, match=f"{name}={value!r}"):
        setattr(net, name, value)
    assert getattr(net, name) == before


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_without_dynamic_batching(host, workers):
    """Each core, and each chunk, gets the compiled size. The error for other numbers shows both."""
    plain, _, net = net_of(batch=2)
    before = counts(host, "loads")
    net.num_workers = workers
    net.disable_dynamic_batching()
    net.disable_dynamic_batching()
    assert counts(host, "loads") == [count + 1 for count in before]
    x = torch.randn(8, 3)
    torch.testing.assert_close(net(x), plain(x))
    assert counts(host, "inferences") == [1] * 4
    for rows, each in ((12, "3 per core"), (9, "2.25 per core"), (0, "0 per core")):
        with pytest.raises(ShapeError, match=f"{rows} rows on dim 0 over 4 NeuronCores are {each}.* takes 2, "):
            net(torch.randn(rows, 3))
    net.split_size, x = 2, torch.randn(12, 3)
    torch.testing.assert_close(net(x), plain(x))
    net.split_size = 3
    with pytest.raises(ShapeError, match=r"in chunks of 3: .* every chunk must have 2 rows"):
        net(x)


def test_another_dim_needs_exact_rows(host):
    """With a warning. Rows on that dim must be the compiled size per core."""
    compiled = neuron.trace(lambda x: x * 2, torch.zeros(1, 4, 4))
    with pytest.warns(UserWarning, match="dynamic batching is off because dim=2"):
        net = neuron.DataParallel(compiled, device_ids=[0, 1], dim=2)
    x = torch.randn(1, 4, 8)
    assert torch.equal(net(x), x * 2)
    with pytest.raises(ShapeError, match=r"6 rows on dim 2 over 2 NeuronCores are 3 per core.* takes 4, "):
        net(torch.randn(1, 4, 6))
    for dim, says in ((3, "out of range"), (-4, "out of range"), ("0", "not an integer"), (None, "not an integer")):
        with pytest.raises(ShardError, match=says):
            neuron.DataParallel(compiled, dim=dim)


def test_outputs_without_rows(host):
    """They turn dynamic batching off, with a warning. 0-d outputs are one vector, with one value per chunk in row order."""
    compiled = neuron.trace(lambda x: (x * 2, x.mean()), torch.zeros(2, 3))
    with pytest.warns(UserWarning, match=r"output\[1\] has no batch dimension.*set_dynamic_batching=False"):
        net = neuron.DataParallel(compiled)
    for rows, workers, split_size in ((8, 8, None), (10, 1, 2), (10, 4, 2)):
        x = torch.randn(rows, 3)
        net.num_workers, net.split_size = workers, split_size
        with pytest.warns(UserWarning, match="one value per shard"):
            y, means = net(x)
        assert torch.equal(y, x * 2)
        torch.testing.assert_close(means, x.view(rows // 2, 2, 3).mean((1, 2)))
    with pytest.raises(ShapeError, match="no batch dimension"):
        neuron.dynamic_batch(compiled)


# -- models and inputs


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((torch.zeros(4, 5),), {}, r"args\[0\] is \(4, 5\) float32, but the model is compiled for \(1, 3\) float32"),
        ((torch.zeros(4, 3, dtype=torch.float64),), {}, r"\(4, 3\) float64, .* compiled for \(1, 3\) float32"),
        ((torch.zeros(4, 3), torch.zeros(4, 3)), {}, r"2 values, .* 1 tensors: args\[0\] \(1, 3\) float32"),
        ((), {}, "0 values"),
        ((3,), {}, r"args\[0\] is 3, .* for a tensor: \(1, 3\) float32"),
        ((), {"input": torch.zeros(4, 5)}, r"args\[0\] is \(4, 5\)"),
    ],
    ids=["columns", "dtype", "many", "none", "number", "keyword"],
)
def test_wrong_inputs_are_refused(host, args, kwargs, says):
    """The error names the argument, its shape, and the compiled shape. No inference runs."""
    _, _, net = net_of()
    with pytest.raises(ShapeError, match=says):
        net(*args, **kwargs)
    assert counts(host, "inferences") == [0] * 4


@pytest.mark.parametrize("device_ids", [[0, 1], [0, 2]], ids=str)
def test_layers_around_a_compiled_model(host, device_ids):
    """Replicas share these layers: they see writes, follow the mode, and give the plain gradients."""
    plain, compiled, _ = net_of(batch=2)
    model, x = Head(compiled).eval(), torch.randn(8, 3)
    net = neuron.DataParallel(model, device_ids)
    for _ in range(2):
        torch.testing.assert_close(net(x), model.head(plain(x)))
        with torch.no_grad():
            model.head.weight.mul_(3)
    net(x).square().sum().backward()
    found, model.head.weight.grad = model.head.weight.grad, None
    model.head(plain(x)).square().sum().backward()
    torch.testing.assert_close(found, model.head.weight.grad)
    net.train()
    assert (net(x) == 0).any()
    net.close()
    model.lock = threading.Lock()
    with pytest.raises(ReplicaError, match=r"Head cannot be copied for a replica: .*lock"):
        neuron.DataParallel(model)


# -- errors and threads


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_error_names_its_core(host, workers, deterministic):
    """Also where lanes run in turns, and cores were not reached. Later calls work."""

    def refuse_nines(compiled, x):
        if (x == 9).any():
            raise ValueError("nine")
        return compiled(x)

    plain, compiled, _ = net_of()
    net, x = neuron.DataParallel(Around(compiled, refuse_nines).eval()), torch.zeros(4, 3)
    net.num_workers = workers
    x[3] = 9
    torch.use_deterministic_algorithms(deterministic)
    try:
        with pytest.raises(ValueError, match="nine") as caught:
            net(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("on nc:" in note for note in caught.value.__notes__)
    torch.testing.assert_close(net(x * 0), plain(x * 0))
    net.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "num_workers", 3),
        lambda net: setattr(net, "split_size", 1),
        lambda net: net.disable_dynamic_batching(),
        lambda net: net.close(),
    ],
    ids=["num_workers", "split_size", "disable", "close"],
)
def test_call_in_flight_finishes(host, change, monkeypatch):
    """This holds for any change from another thread. The cores are freed when the call ends."""
    plain, _, net = net_of()
    cut, begun, let = Batching.cut, threading.Event(), threading.Event()

    def paused(self, rows, lanes):
        if not begun.is_set():
            begun.set()
            assert let.wait(60)
        return cut(self, rows, lanes)

    monkeypatch.setattr(Batching, "cut", paused)
    x = torch.randn(8, 3)
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(net, x)
        assert begun.wait(60)
        threads.submit(change, net).result(60)
        let.set()
        torch.testing.assert_close(call.result(60), plain(x))
    net.close()
    assert counts(host, "models") == FREE


def test_lane_may_close(host):
    """While another thread closes. Closing holds no lock that a lane could wait for."""
    nets = []

    def close(compiled, x):
        threads.submit(nets[0].close)
        nets[0].num_workers = 2
        return compiled(x)

    _, compiled, _ = net_of()
    with ThreadPoolExecutor(4) as threads, torch.no_grad():
        nets.append(neuron.DataParallel(Around(compiled, close), device_ids=[0, 1]))
        for _ in range(5):
            assert nets[0](torch.ones(4, 3)).shape == (4, 2)
    nets.pop().close()
